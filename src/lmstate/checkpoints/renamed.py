"""Checkpoints whose tensors have other names than families ask for: base models, and models saved while compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lmstate.checkpoints.source import GroupedQuant, RowTable, Source
from lmstate.errors import ModelError
from lmstate.text.tokenizer import TokenizerFiles

# The embedding of a model saved without its head, and what its tensors' names begin with where there is a head.
BASES = {
    "embed_tokens.weight": "model.",
    "decoder.embed_tokens.weight": "model.",
    "embeddings.weight": "backbone.",
    "embed_in.weight": "gpt_neox.",
    "wte.weight": "transformer.",
    "word_embeddings.weight": "transformer.",
}
HEAD = "lm_head."
# Heads of GPT-NeoX, RWKV, BioGPT, ModernBERT's decoder, Whisper, T5Gemma, Inkling.
OTHER_HEADS = (
    "embed_out", "head", "output_projection", "decoder", "proj_out", "lm_head.out_proj", "model.llm.unembed"
)  # fmt: skip
COMPILED = "_orig_mod."  # torch.compile wraps a module, and the wrapper shows in the names of what is saved
CONSTANTS = (".masked_bias",)  # what old versions of transformers put where attention may not look; no weight


class Renamed:
    """A `Source` over another, with other names: `pairs` of the name here and the name there. The rest is left out.

    Raises `ModelError` if two tensors get the same name.
    """

    def __init__(self, whole: Source, pairs: Iterable[tuple[str, str]], config: dict[str, Any]) -> None:
        self.whole = whole
        self.path = whole.path
        self.generation = whole.generation
        self.notes = whole.notes
        self.conversions = whole.conversions
        self.weights = whole.weights
        self.config = config
        self._names: dict[str, str] = {}
        for name, there in pairs:
            if (other := self._names.setdefault(name, there)) != there:
                raise ModelError(
                    f"{self.path} holds {name[:80]!r} twice, as {min(other, there)[:80]!r} and as "
                    f"{max(other, there)[:80]!r}; which of them is meant is not clear"
                )

    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def outer_name(self, name: str) -> str:
        """Name of a tensor in the source below."""
        return self._names[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.whole.shape(self._names[name])

    def stored(self, name: str) -> str:
        return self.whole.stored(self._names[name])

    def read(self, name: str) -> Tensor | GroupedQuant:
        return self.whole.read(self._names[name])

    def part(self, name: str, index: int) -> Tensor:
        return self.whole.part(self._names[name], index)

    def rows(self, name: str) -> RowTable:
        return self.whole.rows(self._names[name])

    def activation_bits(self, name: str) -> int:
        return self.whole.activation_bits(self._names[name])

    def key(self) -> str:
        return self.whole.key()

    def tokenizer_files(self) -> TokenizerFiles | None:
        return self.whole.tokenizer_files()


def file_source(source: Source) -> Source:
    """The checkpoint itself, without what gives its tensors other names."""
    while isinstance(source, Renamed):
        source = source.whole
    return source


def file_name(source: Source, name: str) -> str:
    """The name that the checkpoint itself gives a tensor."""
    while isinstance(source, Renamed):
        name = source.outer_name(name)
        source = source.whole
    return name


def plain(source: Source) -> Source:
    """A checkpoint under the names that its model has in memory: not compiled, and as one with a head."""
    pairs = [(_plain(name), name) for name in source.names() if not name.endswith(CONSTANTS)]
    return Renamed(source, with_head(pairs), source.config)


def _plain(name: str) -> str:
    name = name.replace(COMPILED, "")
    module, _, kind = name.rpartition(".")
    return f"{HEAD}{kind}" if module in OTHER_HEADS and kind in ("weight", "bias") else name


def with_head(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Renames from a base model's names to those of the model with a head, where the names are a base model's."""
    new = {name for name, _ in pairs}
    base = next((base for embedding, base in BASES.items() if embedding in new), "")
    return [(name if name.startswith(HEAD) else base + name, there) for name, there in pairs]


def require_head(source: Source, *configs: Mapping[str, Any]) -> None:
    """Raise `ModelError` if there is no head and the configs say that the embedding is not the head either.

    Where no config says, it is: before version 5, transformers left out of a config that the two are tied.
    """
    said = [config["tie_word_embeddings"] for config in configs if config.get("tie_word_embeddings") is not None]
    if f"{HEAD}weight" not in source.names() and said and True not in said:
        raise ModelError(
            f"{source.path} is incomplete, or a base model without a language model head: it has no {HEAD}weight, and "
            f"its config says that the embedding is not the head (tie_word_embeddings is false). Load a checkpoint "
            f"that was saved with one"
        )
