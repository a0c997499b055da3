"""Tokens of a batch as a caller gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from lmstate.errors import StateError
from lmstate.state.validate import token_ids, whole_number

Tokens = Tensor | Sequence[Sequence[int]]
"""int64 `[rows, T]`, or one list of ids a row."""


def token_rows(tokens: Tokens, vocab_size: int) -> list[list[int]]:
    """A list of ids for each row. Raises `StateError` for no rows, and for anything but ids of this vocabulary."""
    if isinstance(tokens, Tensor):
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise StateError(f"tokens are {tokens.dtype} {list(tokens.shape)}; they must be int64 [rows, T]")
        tokens = tokens.tolist()
    if isinstance(tokens, Mapping):
        raise StateError('a dict was given for tokens; give the lists of its "input_ids", each without padding')
    if not isinstance(tokens, Iterable):
        raise StateError(f"tokens are {tokens!r:.80}; they must be int64 [rows, T], or a list of ids for each row")
    rows = list(tokens)
    if any(isinstance(row, str) for row in rows):
        raise StateError("a text was given for tokens; model.tokenizer.encode(text) gives a row's ids")
    ids = [token_ids(row, f"row {index}", vocab_size) for index, row in enumerate(rows)]
    if not ids:
        raise StateError("no rows of tokens were given; a batch has at least one, idle rows are empty lists")
    return ids


def last_counts(counts: Sequence[int], ids: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of last tokens, one for each row of `ids`, that have as many. Raises `StateError` for any others."""
    numbers = [whole_number(count, "a number of logits") for count in counts]
    if len(numbers) != len(ids) or any(not 0 <= n <= len(row) for n, row in zip(numbers, ids)):
        raise StateError(f"logits={numbers} was asked for; the rows have {[len(row) for row in ids]} tokens")
    return numbers
