"""Interface of a rewindable cache layer beyond that of transformers, and helpers of the layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lmstate.errors import SnapshotError, StateError

Tensors = dict[str, Tensor]


class RewindableLayer(ABC):
    """Interface of a layer of `StateCache` beyond that of transformers."""

    kind: str  # names it in a file

    @abstractmethod
    def reach(self, length: int) -> int:
        """The earliest position that `cut` reaches in a layer that holds `length` tokens."""

    def attention_reach(self, length: int) -> int:
        """The earliest position that `cut` reaches in what it holds of attention."""
        return self.reach(length)

    @abstractmethod
    def cut(self, length: int, to: int) -> None:
        """Take the layer from `length` tokens back to `to`, `reach <= to <= length`."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Make row i of the new batch a copy of row `rows[i]` (int64) of the old one."""

    @abstractmethod
    def rows(self) -> int | None:
        """Rows of the batch; None before the first token."""

    @abstractmethod
    def capture(self) -> Tensors:
        """Copies of all that the layer needs to go on; empty before the first token."""

    @abstractmethod
    def check(self, length: int, tensors: Tensors) -> None:
        """Raise `SnapshotError` unless `capture` may have given these at `length` tokens. Changes nothing."""

    @abstractmethod
    def put(self, length: int, tensors: Tensors) -> None:
        """Become what `capture` gave at `length` tokens, which `check` has passed."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held, room included."""


def last(x: Tensor, tokens: int) -> Tensor:
    """A view of the last `tokens` of `[..., n, D]`, or of all if there are fewer."""
    return x if tokens >= x.shape[-2] else x.narrow(-2, x.shape[-2] - tokens, tokens)


def joined(held: Tensor, seen: int, new: Tensor) -> Tensor:
    return torch.cat([last(held, seen), new], dim=-2) if seen else new


def whole(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def repeated(rows: int | None, repeats: int) -> Tensor:
    return torch.arange(rows or 0).repeat_interleave(repeats)


def chosen(indices: Tensor | Sequence[int] | Sequence[bool], rows: int) -> Tensor:
    """The row numbers of a batch of `rows` that are asked for, by number or by a mask; a batch of 0 has not begun.

    Raises `StateError` for what is neither, and `IndexError` for rows that are not there.
    """
    index = torch.as_tensor(indices).cpu()
    if index.ndim != 1 or index.is_floating_point() or not len(index):
        raise StateError(f"rows {indices!r:.80} were asked for; give at least one row number, or a mask of the rows")
    if index.dtype == torch.bool:
        if rows and len(index) != rows:
            raise StateError(f"a mask of {len(index)} rows was given for a batch of {rows}")
        return index.nonzero().flatten()
    if rows and not bool(((index >= 0) & (index < rows)).all()):
        raise IndexError(f"rows {index.tolist()} of a batch of {rows} rows were asked for: take 0 to {rows - 1}")
    return index.long()


def check_pair(kind: str, tensors: Tensors, least: int, most: int) -> None:
    """Raise `SnapshotError` unless these are keys and values of `least` to `most` tokens, or nothing at all."""
    if not tensors:
        return
    if set(tensors) != {"k", "v"}:
        raise SnapshotError(f"a {kind} layer needs the tensors k and v; the snapshot has {sorted(tensors)}")
    k, v = tensors["k"], tensors["v"]
    floats = k.is_floating_point() and k.dtype == v.dtype
    if not floats or k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or not least <= k.shape[2] <= most:
        raise SnapshotError(
            f"the snapshot has keys {list(k.shape)} and values {list(v.shape)} for a {kind} layer; it needs "
            f"[rows, heads, {least} to {most} tokens, width] of both"
        )


def check_fit(kind: str, tensors: Tensors, held: tuple[Tensor, Tensor]) -> None:
    """Raise `SnapshotError` unless these keys and values have the heads and the width of those that are held."""
    for name, x, old in zip(("keys", "values"), (tensors["k"], tensors["v"]), held):
        if heads_and_width(x) != heads_and_width(old):
            raise SnapshotError(
                f"the snapshot has {name} {list(x.shape)} for a {kind} layer, and the model's are {list(old.shape)}, "
                "of other heads or another width: the file was changed, or is of another model"
            )


def check_new(held: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
    """Raise `StateError` unless new keys and values go on from those that are held: torch would take the one head of
    the ones for all heads of the others."""
    for name, old, x in zip(("keys", "values"), held, new):
        if heads_and_width(x) != heads_and_width(old):
            raise StateError(
                f"a layer of the cache holds {name} {list(old.shape)}, and the model gives {list(x.shape)}, of other "
                "heads or another width: the cache was loaded from a file that was changed, or is of another model"
            )


def heads_and_width(x: Tensor) -> tuple[int, int]:
    """Of keys or values `[R, K, n, D]`: (K, D)."""
    return x.shape[1], x.shape[-1]


def storage_bytes(tensors: list[Tensor | None]) -> int:
    """Bytes of the memory behind these tensors, each counted once."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(sizes.values())
