"""Embeddings of texts: hidden states after the last norm, pooled and of length 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from lmstate import ops
from lmstate.errors import UnsupportedError
from lmstate.generation.prompts import Prompt, as_token_lists
from lmstate.language_model import LanguageModel
from lmstate.state.validate import whole_number

if TYPE_CHECKING:
    from lmstate.ops import Norm
    from lmstate.state import State

Pooling = Literal["mean", "last", "cls"]
POOLINGS: tuple[str, ...] = get_args(Pooling)
EMBED_CHUNK = 512  # tokens that are read in one go


class HiddenModel(LanguageModel, Protocol):
    """A language model that gives the stream after its last block."""

    @property
    def norm(self) -> Norm:
        """The last norm."""
        ...

    def hidden(self, tokens: Any, state: State | None = None) -> Tensor:
        """The stream of these tokens, float32 `[rows, T, E]`."""
        ...


def embeddings(
    model: HiddenModel, texts: Prompt, pooling: Pooling | None = None, *, dimensions: int | None = None
) -> Tensor:
    """The embeddings of texts, float32 `[N, E]`, each of length 1; of a single text `[E]`.

    texts       a text or a list of token ids; or a list of these
    pooling     "mean" of all tokens, the "last" one's, or the first one's: "cls"; None: what the checkpoint was trained
                for, else mean
    dimensions  keep only the first this many numbers of each, for checkpoints trained for it (Matryoshka)

    Each text is read by itself, in parts, so that its vector depends on no other. Raises ValueError for arguments out
    of range and texts without tokens, `UnsupportedError` for a checkpoint of another pooling.
    """
    chosen = chosen_pooling(model.defaults, pooling)
    widest = model.config.hidden_size
    if dimensions is not None and not 1 <= whole_number(dimensions, "dimensions") <= widest:
        raise ValueError(f"dimensions={dimensions} was asked for; give 1 to {widest}")
    rows, single = as_token_lists(model.tokenizer if model.has_tokenizer else None, texts, None)
    vectors = [unit_vector(_read(model, tokens, row, chosen), dimensions) for row, tokens in enumerate(rows)]
    return vectors[0] if single else torch.stack(vectors)


def _read(model: HiddenModel, tokens: list[int], row: int, pooling: Pooling) -> Tensor:
    """One text's pooled states, float32 `[E]`."""
    if not tokens:
        raise ValueError(f"text {row} has no tokens; give texts that are not empty")
    state = model.new_state(rewind=0)
    state.expect(0, len(tokens))
    starts = range(0, len(tokens), EMBED_CHUNK)
    return pooled(torch.cat([read_part(model, state, tokens[at : at + EMBED_CHUNK]) for at in starts]), pooling)


def read_part(model: HiddenModel, state: State, tokens: list[int]) -> Tensor:
    """Read some more tokens of a text -> their states after the last norm, float32 `[T, E]`."""
    return ops.norm(model.hidden([tokens], state)[0], model.norm)


def chosen_pooling(defaults: dict[str, Any], asked: str | None) -> Pooling:
    """The pooling that is asked for, else the checkpoint's own, else mean.

    Raises ValueError for an unknown one, `UnsupportedError` where the checkpoint's own is.
    """
    own = defaults.get("pooling", "mean")
    for known in get_args(Pooling):
        if known == (asked or own):
            return known
    choices = f"expected one of {', '.join(POOLINGS)}"
    if asked is None:
        raise UnsupportedError(f"the checkpoint was trained for pooling={own!r}, which is not supported; {choices}")
    raise ValueError(f"unknown pooling={asked!r}; {choices}")


def pooled(hidden: Tensor, pooling: Pooling) -> Tensor:
    """One vector, float32 `[E]`, from `[T, E]`."""
    return (hidden.mean(0) if pooling == "mean" else hidden[-1 if pooling == "last" else 0]).float()


def unit_vector(vector: Tensor, dimensions: int | None = None) -> Tensor:
    """The first numbers of a vector, as one of length 1."""
    vector = vector[:dimensions]
    return vector / vector.norm().clamp_min(1e-12)
