"""Settings of a model that do not depend on a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Settings of a model that do not depend on a layer."""

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int | None = None  # tokens that the model was made for; longer texts run, and are the caller's risk
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    marks: int = 0  # ids past the vocabulary, of pictures in a text; no answer has them

    @property
    def ids(self) -> int:
        """Number of token ids that a text may have."""
        return self.vocab_size + self.marks
