"""Whole numbers and token ids as callers give them: made plain ints, or refused before anything changes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, SupportsFloat, SupportsIndex

from torch import Tensor

from lmstate.errors import StateError


def whole_number(value: SupportsIndex, what: str) -> int:
    """`value` as a plain int: an int, or one of numpy, or of torch without axes. Raises `StateError` for anything else.

    Also for a bool, which as an index means "all" or "none" of an axis, and for a float with a whole value.
    """
    number: Any = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    if not isinstance(number, bool | Tensor):
        with suppress(TypeError):
            return operator.index(number)
    raise StateError(f"{what} must be a whole number; {value!r:.80} was given")


def real_number(value: SupportsFloat, what: str) -> float:
    """`value` as a plain float: a number of Python or numpy, or of torch without axes; else raises `StateError`."""
    number: Any = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    if isinstance(number, Real) and not isinstance(number, bool):
        with suppress(OverflowError):  # a whole number beyond any float
            return float(number)
    raise StateError(f"{what} must be a number; {value!r:.80} was given")


def flag(value: bool, what: str) -> bool:
    """`value`, which is True or False; else raises `StateError`: "no" would count as yes."""
    if not isinstance(value, bool):
        raise StateError(f"{what} must be True or False; {value!r:.80} was given")
    return value


def flags(values: bool | Sequence[bool], rows: int, what: str) -> tuple[bool, ...]:
    """One flag for each row; a single one is that of all. Raises `StateError` for anything else."""
    if isinstance(values, bool):
        return (values,) * rows
    if not isinstance(values, Sequence) or len(values) != rows:
        raise StateError(f"{what} must be True or False, or that for each of {rows} rows; {values!r:.80} was given")
    return tuple(flag(value, what) for value in values)


def token_ids(values: Iterable[SupportsIndex], whose: str, vocab_size: int | None = None) -> list[int]:
    """The ids of one row, in a list that shares nothing with `values`. Raises `StateError` for anything but ids.

    `whose` they are is for messages: "row 0". With `vocab_size` an id is below it, and never negative.
    """
    try:
        ids = list(values.tolist() if isinstance(values, Tensor) else values)
    except TypeError:
        raise StateError(f"{whose} was given {values!r:.80}; it takes a list of token ids") from None
    if not set(map(type, ids)) <= {int}:
        ids = [whole_number(token, f"a token id of {whose}") for token in ids]
    if vocab_size is not None and ids:
        bad = [token for token in (min(ids), max(ids)) if not 0 <= token < vocab_size]
        if bad:
            raise StateError(f"{whose} has the token id {bad[0]}; this model's ids are 0 to {vocab_size - 1}")
    return ids
