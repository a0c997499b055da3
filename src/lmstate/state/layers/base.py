"""The contract between the state of a layer, its mixer and the state of the model that owns it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate.errors import UnsupportedError
from lmstate.ops.types.block_table import KVBlock
from lmstate.state.blocks import BlockPool
from lmstate.state.changes import Changes
from lmstate.state.step import CHUNK, Step


class Policy:
    """The value of `new_state(kv=...)` for a layer: a `Storage` keeps every token, an `Evicting` policy forgets."""


@dataclass(frozen=True)
class Layout:
    """The options of `new_state`; every layer state is made from them."""

    rows: int
    device: torch.device
    dtype: torch.dtype  # of stored keys and values
    capacity: int | None = None  # tokens a row may hold; None: grows
    rewind: int = 16  # how many tokens back a rewind recomputes nothing
    chunk: int = CHUNK  # tokens of a row that one forward takes
    carries: int = 32  # bits of what recurrences sum over tokens: 32, 16 or 8
    kv: Policy | None = None  # how an attention layer stores and forgets; None: all of it, in `dtype`
    max_positions: int | None = None  # how many positions the model has learned, each by itself; None: it knows any
    static: bool = False  # tensors that a step uses are made once, and changed only in place
    pool: BlockPool | None = None  # that counts the blocks of stored positions; None: one for each layer


class LayerState(ABC):
    """One layer's memory of every row.

    It holds no length: the committed length of a row comes with each call. Between `reserve` and `commit` or `discard`
    it is pending, and its committed part stays whole. `commit`, `rewind`, `select`, `restore` and `drop` compute their
    result and add the assignments to `changes`. They change nothing that is committed. When every layer has computed
    its own, the state applies the changes of all layers at once.
    """

    kind: str  # how `State.memory` groups it
    lossy: bool  # whether it drops what a rewind far back would need
    evicts = False  # whether what a token sees depends on where the steps before it ended
    conditioned = False  # whether it holds what `State.condition` gave, beside what it remembers of tokens
    device: torch.device | None = None  # where it is, in the state of a model over several devices

    @abstractmethod
    def reserve(self, step: Step) -> None:
        """Make room for `step`. Nothing committed is lost; `discard` brings back what was."""

    @abstractmethod
    def commit(self, step: Step, accepted: tuple[int, ...], changes: Changes) -> None:
        """Make the first `accepted[r]` tokens of the step real in each row; the rest never happened."""

    @abstractmethod
    def discard(self) -> None:
        """The step that was reserved never happened. Harmless when nothing is reserved, or when called again."""

    @abstractmethod
    def earliest_rewind(self, row: int, length: int) -> int:
        """The earliest position that `rewind` reaches in a row of this length."""

    @abstractmethod
    def rewind(self, row: int, length: int, to: int, changes: Changes) -> None:
        """Take a row from `length` back to `to`, `earliest_rewind <= to <= length`, exactly."""

    @abstractmethod
    def select(self, rows: Sequence[int | None], changes: Changes) -> None:
        """Make row i of the new batch a copy of row `rows[i]` of the old one; empty where that is None."""

    @abstractmethod
    def add_row(self, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        """Add a row after the others, which may be pending, and put in it what `restore` would put there."""

    @abstractmethod
    def capture(self, row: int, length: int) -> Mapping[str, Tensor]:
        """All that the row needs to go on from `length`, without a row axis: copies, or blocks that never change."""

    @abstractmethod
    def restore(self, row: int, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        """Put what `capture` gave at `length` in a row. Length 0 with no tensors empties it.

        Raises `SnapshotError` if the tensors are not what this layer would have captured.
        """

    def forget_tokens(self, row: int, changes: Changes) -> None:
        """Forget all tokens of a row. The source that `State.condition` encoded stays."""
        self.restore(row, 0, {}, changes)

    def kept(self, row: int, length: int) -> list[list[int]]:
        """For each kv head, the positions whose keys and values the next token could see."""
        raise UnsupportedError(f"a {self.kind} layer keeps no positions apart; ask an attention layer")

    def refuses_drop(self, row: int) -> str | None:
        """Reason that no span of the row can be dropped exactly; None if one can."""
        return "its memory of the span cannot be told from the rest"

    def drop(self, row: int, length: int, start: int, stop: int, changes: Changes) -> None:
        """Forget the positions `start .. stop - 1` and move the later ones up. Only where `refuses_drop` is None."""
        raise UnsupportedError(f"a {self.kind} layer cannot drop a span")

    def adopt_device_step(self, step: Step) -> None:
        """A `DeviceStep` ran, and `step` says in host integers what it was: from here it is pending like any other."""
        self.reserve(step)

    def static_tensors(self) -> dict[str, Tensor]:
        """The tensors that a `DeviceStep` reads and writes, by name. Of a static layout, always the same."""
        return {}

    def rebind(self, tensors: dict[str, Tensor]) -> None:
        """Use these instead of `static_tensors()`: for a program that owns them."""
        assert not tensors, f"a {self.kind} layer has no fixed tensors"

    def commit_on_device(self) -> None:  # noqa: B027
        """Make all of a `DeviceStep` real, on the device: for a program without a host."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Every tensor held now, for counting bytes."""

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def blocks(self) -> Iterator[KVBlock]:
        """Blocks of all rows; one that several share comes several times."""
        return iter(())

    def nbytes_apart(self) -> int:
        """Bytes that are in no blocks, which others could share."""
        return self.nbytes()

    def nbytes_to_come(self) -> int:
        """Bytes that the rows come to hold beside `nbytes`, whatever their lengths."""
        return 0

    def nbytes_shared(self) -> int:
        """Bytes of blocks that other rows, marks or snapshots may hold too: a write into them goes to a copy."""
        return 0

    def leaves(self) -> list[LayerState]:
        """The layer states in it that are not composites: itself, most often."""
        return [self]


class TokenlessState(LayerState):
    """A layer that stores nothing of the tokens that it reads: no step, rewind or drop changes it."""

    def reserve(self, step: Step) -> None:
        pass

    def commit(self, step: Step, accepted: tuple[int, ...], changes: Changes) -> None:
        pass

    def discard(self) -> None:
        pass

    def earliest_rewind(self, row: int, length: int) -> int:
        return 0

    def rewind(self, row: int, length: int, to: int, changes: Changes) -> None:
        pass

    def refuses_drop(self, row: int) -> str | None:
        return None

    def drop(self, row: int, length: int, start: int, stop: int, changes: Changes) -> None:
        pass
