"""What a state knows of one sequence beside its layers: tokens, and places to come back to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Mark:
    """What a row was at one position, for the layers that forget."""

    at: int
    regime: int  # the row's, when it was made
    layers: dict[int, dict[str, Tensor]]
    logits: Tensor | None

    def tensors(self) -> Iterable[Tensor]:
        yield from (tensor for layer in self.layers.values() for tensor in layer.values())
        if self.logits is not None:
            yield self.logits


@dataclass
class Row:
    """What the state knows of one sequence."""

    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # how many of the tokens the layers have seen; the rest is computed by the next call
    regime: int = 0  # what the cached keys were rotated for, see State
    logits: Tensor | None = None  # [V] after the last token, as a text of this length has them
    marks: list[Mark] = field(default_factory=list)

    def fork(self) -> Row:
        return Row(list(self.tokens), self.cached, self.regime, self.logits, list(self.marks))
