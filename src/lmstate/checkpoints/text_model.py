"""The text model inside a checkpoint that wraps it with others: vision and audio towers, projectors, draft heads."""

from __future__ import annotations

import re
from typing import Any

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.renamed import BASES, HEAD, Renamed, require_head, with_head
from lmstate.checkpoints.source import Source
from lmstate.errors import ModelError

# Where wrappers put the text model, with its head or without, and where its head is.
TEXT = re.compile(r"(model\.)?((language|text)_model|llm)\.")
TEXT_HEAD = re.compile(r"(model\.)?((language|text)_model\.)?lm_head\.")
# Where some have the text model's multi-token prediction heads: beside it.
HEADS = "mtp."
# Where models that also speak have what thinks: text model, head, and towers.
THINKER = "thinker."
# The text model's own names, for a wrapper that leaves it as it is.
OWN = (*BASES.values(), HEAD, HEADS)


class TextModelSource(Renamed):
    """A `Source` over the text model of a wrapper: its `text_config`, its tensors under their plain names.

    Tensors outside of the text model belong to other parts, whatever their names, and are left out. Tensors inside it
    are all kept: one that the text model does not use is an error. Raises `ModelError` if there is no text model.
    """

    def __init__(self, whole: Source, text_config: Config) -> None:
        config: dict[str, Any] = dict(text_config)
        for name in ("tie_word_embeddings", "quantization_config"):  # some wrappers say it outside only
            if config.get(name) is None and whole.config.get(name) is not None:
                config[name] = whole.config[name]
        pairs = [(plain, name) for name in whole.names() if (plain := _plain(name)) is not None]
        if all(plain.startswith((HEAD, HEADS)) for plain, _ in pairs):  # it is in none of those places
            pairs = [(name, name) for name in whole.names() if name.startswith(OWN)]
        super().__init__(whole, with_head(pairs), config)
        if not any(base + embedding in self.names() for embedding, base in BASES.items()):
            raise ModelError(
                f"{whole.path} wraps a text model, says its config, and no embedding of one is where lmstate looks: "
                f"under language_model., text_model. or llm., alone or after model., or under model. itself. The "
                f"checkpoint is incomplete, or its tensors are named in a way that is not supported"
            )
        require_head(self, text_config, whole.config)


def _plain(name: str) -> str | None:
    """The text model's own name of a tensor; None if the tensor is not of the text model."""
    if name.startswith(THINKER):
        name = name.removeprefix(THINKER)
        return name if name.startswith((*BASES.values(), HEAD)) else None
    if head := TEXT_HEAD.match(name):
        return HEAD + name[head.end() :]
    if text := TEXT.match(name):
        inside = name[text.end() :]
        return "embed_tokens.weight" if inside == "embed.weight" else inside  # of Inkling
    return name if name.startswith(HEADS) else None
