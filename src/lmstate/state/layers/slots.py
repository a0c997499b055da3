"""The stored positions of a row, which keys and values, or latents, are in: the base of attention states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lmstate import ops
from lmstate.errors import SnapshotError
from lmstate.ops import KVView
from lmstate.ops.types.block_table import KVBlock, Stored
from lmstate.state.blocks import BlockPool, Buffer, CapturedBlocks
from lmstate.state.changes import Changes
from lmstate.state.layers.base import LayerState, Layout
from lmstate.state.layers.block_store import BlockStore
from lmstate.state.layers.fixed_slots import FixedSlots
from lmstate.state.step import Step


class SlotState(LayerState):
    """Named buffers `[R, *heads, S, D]` with a slot for each position: in blocks, or, of a static layout, in tensors
    that never move."""

    what: str  # is stored, for messages: "keys and values"

    def __init__(
        self,
        layout: Layout,
        widths: Mapping[str, tuple[int, ...]],
        window_span: int | None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ):
        """`widths`: the shape of each buffer without rows and slots, `(K, D)` say.

        `window_span`: the stored positions that some query may still need, those that a rewind brings in sight
        included; None for all of them. `dtypes`: of the buffers that are not in the layout's.
        """
        self.layout = layout
        self.window_span = window_span
        self.lossy = window_span is not None
        self.buffers = {
            name: Buffer(tuple(heads), width, (dtypes or {}).get(name, layout.dtype), layout.device)
            for name, (*heads, width) in widths.items()
        }
        self.content: BlockStore | FixedSlots
        if layout.static:
            self.content = FixedSlots(layout, self.buffers, window_span)
        else:
            self.content = BlockStore(layout, self.buffers, window_span, layout.pool or BlockPool())

    def stored(self, name: str) -> Stored:
        """A buffer as operations read and write it in the step at hand: `[R, K, S, D]`."""
        if isinstance(self.content, BlockStore):
            return self.content.table(name)
        tensor = self.content.buffers[name]
        return tensor if self.buffers[name].heads else tensor[:, None]

    def store_one(self, name: str, new: Tensor, step: Step) -> None:
        """Store vectors `[R, T, D]` of a step's positions in a buffer with one of each."""
        new, held = new[:, :, None], self.stored(name)
        ops.append(new, new, held, held, step.starts_t, step.counts_t)  # it stores pairs: this one twice

    def all_stored(self) -> dict[str, Stored]:
        """Every buffer as `stored`, by name."""
        return {name: self.stored(name) for name in self.buffers}

    @property
    def view_cache(self) -> list[KVView]:
        """The buffers as attention reads them, once it was asked for."""
        return self.content.views

    # ---- the step

    def reserve(self, step: Step) -> None:
        self.content.reserve(step)

    def commit(self, step: Step, accepted: tuple[int, ...], changes: Changes) -> None:
        self.content.commit(step, accepted, changes)

    def discard(self) -> None:
        self.content.discard()

    # ---- moving about

    def earliest_rewind(self, row: int, length: int) -> int:
        return self.content.earliest_rewind(row)

    def rewind(self, row: int, length: int, to: int, changes: Changes) -> None:
        self.content.rewind(row, to, changes)

    def select(self, rows: Sequence[int | None], changes: Changes) -> None:
        self.content.select(rows, changes)

    def add_row(self, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        assert isinstance(self.content, BlockStore), "a static state keeps its rows"
        self._check(length, tensors)
        self.content.add_row(length, tensors, changes)

    def capture(self, row: int, length: int) -> Mapping[str, Tensor]:
        return self.content.capture(row, length)

    def restore(self, row: int, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        self._check(length, tensors)
        self.content.restore(row, length, tensors, changes)

    def kept(self, row: int, length: int) -> list[list[int]]:
        heads = next(iter(self.buffers.values())).heads
        low = self.lowest(length)
        return [list(range(low, length)) for _ in range(heads[0] if heads else 1)]

    def in_blocks(self, start: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Stored tensors of the positions from `start` on, as `capture` has them. Raises SnapshotError for others."""
        self._check_tensors(tensors)
        if len({tensors[name].shape[-2] for name in self.buffers}) != 1:
            raise SnapshotError(f"the buffers {' and '.join(self.buffers)} have different numbers of positions")
        assert isinstance(self.content, BlockStore), "a static state's slots are in no blocks"
        return self.content.in_blocks(start, tensors)

    def lowest(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        return 0

    def refuses_drop(self, row: int) -> str | None:
        return "its window has forgotten earlier tokens" if self.content.has_lost(row) else None

    def drop(self, row: int, length: int, start: int, stop: int, changes: Changes) -> None:
        later = self.content.later(row, length, stop)
        moved = {name: self.moved(name, stored, start - stop) for name, stored in later.items()}
        self.content.drop(row, length, start, stop, moved, changes)

    def moved(self, name: str, stored: Tensor, delta: int) -> Tensor:
        """The content of a buffer, `[..., n, D]`, moved by `delta` positions."""
        return stored

    def static_tensors(self) -> dict[str, Tensor]:
        return dict(self.content.buffers) if isinstance(self.content, FixedSlots) else {}

    def rebind(self, tensors: dict[str, Tensor]) -> None:
        assert isinstance(self.content, FixedSlots)
        self.content.buffers = dict(tensors)

    def tensors(self) -> list[Tensor]:
        return self.content.tensors()

    def nbytes(self) -> int:
        return self.content.nbytes()

    def nbytes_shared(self) -> int:
        return self.content.nbytes_shared() if isinstance(self.content, BlockStore) else 0

    def blocks(self) -> Iterator[KVBlock]:
        if isinstance(self.content, BlockStore):
            yield from (block for row in self.content.rows for block in row.blocks if block is not None)

    def nbytes_apart(self) -> int:
        return 0 if isinstance(self.content, BlockStore) else self.content.nbytes()

    def _check(self, length: int, tensors: Mapping[str, Tensor]) -> None:
        """Raise `SnapshotError` where these are not what `capture` gives of a row of `length`."""
        if length == 0 and not tensors:
            return
        if isinstance(tensors, CapturedBlocks) and tensors.buffers == self.buffers:
            counts = [tensors.stop - tensors.start if tensors.stop == length else -1]
        else:
            self._check_tensors(tensors)
            counts = [tensors[name].shape[-2] for name in self.buffers]
        least = length if self.window_span is None else min(length, self.window_span - self.layout.rewind)
        if len(set(counts)) != 1 or not least <= counts[0] <= length:
            raise SnapshotError(
                f"the snapshot stores {', '.join(map(str, counts))} positions of this layer's "
                f"{' and '.join(self.buffers)}; a row of {length} tokens needs the same number of each, {least} to "
                f"{length}"
            )

    def _check_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if set(tensors) != set(self.buffers):
            raise SnapshotError(
                f"this layer needs the tensors {' and '.join(self.buffers)}; the snapshot has {sorted(tensors)}: "
                "where keys and values are stored in another form, a state with the same kv= takes it"
            )
        for name, buffer in self.buffers.items():
            tensor, heads, width = tensors[name], list(buffer.heads), buffer.width
            if tensor.ndim != len(heads) + 2 or [*tensor.shape[:-2], tensor.shape[-1]] != [*heads, width]:
                expected = ", ".join(map(str, [*heads, "stored", width]))
                raise SnapshotError(f"the snapshot's {name} is {list(tensor.shape)}; this layer holds [{expected}]")
            if tensor.dtype != buffer.dtype and not (tensor.is_floating_point() and buffer.dtype.is_floating_point):
                kind = "floating point" if buffer.dtype.is_floating_point else buffer.dtype
                raise SnapshotError(f"the snapshot's {name} is {tensor.dtype}; {self.what} are {kind} here")
