"""The text model inside a checkpoint that wraps it with others: vision and audio towers, projectors, draft heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmstate.models.weights.fields import Fields
from lmstate.models.weights.source import GroupedQuant, Source, TokenizerFiles

# Where wrappers put the text model's tensors, and the names that the text model alone has.
PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
# Beginnings of the names of what is no part of it.
OTHERS = (
    "vision_tower.", "vision_model.", "visual.", "audio_tower.", "multi_modal_projector.", "embed_vision.",
    "embed_audio.", "mtp.",
)  # fmt: skip


class TextPart:
    """A `Source` over the text model of a wrapper: its `text_config`, its tensors under their plain names."""

    def __init__(self, whole: Source, text_config: Fields) -> None:
        self.whole = whole
        self.path = whole.path
        self.generation = whole.generation
        self.config: dict[str, Any] = dict(text_config)
        for name in ("tie_word_embeddings", "quantization_config"):  # some wrappers say it outside only
            if self.config.get(name) is None and whole.config.get(name) is not None:
                self.config[name] = whole.config[name]
        self._names = {plain: name for name in whole.names() if (plain := _plain(name)) is not None}

    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.whole.shape(self._names[name])

    def stored(self, name: str) -> str:
        return self.whole.stored(self._names[name])

    def read(self, name: str) -> Tensor | GroupedQuant:
        return self.whole.read(self._names[name])

    def key(self) -> str:
        return self.whole.key()

    def tokenizer_files(self) -> TokenizerFiles | None:
        return self.whole.tokenizer_files()


def _plain(name: str) -> str | None:
    """The text model's own name of a tensor; None if the tensor is not of the text model."""
    for prefix, plain in PREFIXES:
        if name.startswith(prefix):
            return plain + name[len(prefix) :]
    return None if name.removeprefix("model.").startswith(OTHERS) else name
