"""The state of a layer with several mixers: attention and a recurrence side by side, say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from lmstate.errors import SnapshotError
from lmstate.ops.types.block_table import KVBlock
from lmstate.state.blocks import Parts
from lmstate.state.changes import Changes
from lmstate.state.layers.attention import KeyValueState
from lmstate.state.layers.base import LayerState
from lmstate.state.step import Step


class CompositeState(LayerState):
    """Layer states that move together. Its mixer uses each of `members`; the state sees one layer."""

    kind = "composite"

    def __init__(self, members: Sequence[LayerState]):
        self.members = tuple(members)
        self.lossy = any(member.lossy for member in members)

    def reserve(self, step: Step) -> None:
        for member in self.members:
            member.reserve(step)

    def commit(self, step: Step, accepted: tuple[int, ...], changes: Changes) -> None:
        for member in self.members:
            member.commit(step, accepted, changes)

    def discard(self) -> None:
        for member in self.members:
            member.discard()

    def earliest_rewind(self, row: int, length: int) -> int:
        return max((member.earliest_rewind(row, length) for member in self.members), default=0)

    def rewind(self, row: int, length: int, to: int, changes: Changes) -> None:
        for member in self.members:
            member.rewind(row, length, to, changes)

    def select(self, rows: Sequence[int | None], changes: Changes) -> None:
        for member in self.members:
            member.select(rows, changes)

    def add_row(self, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        for member, own in zip(self.members, self._split(tensors)):
            member.add_row(length, own, changes)

    def capture(self, row: int, length: int) -> Mapping[str, Tensor]:
        return Parts([member.capture(row, length) for member in self.members])

    def restore(self, row: int, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        for member, own in zip(self.members, self._split(tensors)):
            member.restore(row, length, own, changes)

    def _split(self, tensors: Mapping[str, Tensor]) -> Sequence[Mapping[str, Tensor]]:
        if isinstance(tensors, Parts) and len(tensors.members) == len(self.members):
            return tensors.members
        split: list[dict[str, Tensor]] = [{} for _ in self.members]
        for name, tensor in tensors.items():
            index = name.partition(".")[0]
            if index not in map(str, range(len(self.members))):
                raise SnapshotError(f"the snapshot has a tensor {name!r} that no part of this layer holds")
            split[int(index)][name[len(index) + 1 :]] = tensor
        return split

    def kept(self, row: int, length: int) -> list[list[int]]:
        for leaf in self.leaves():
            if isinstance(leaf, KeyValueState):
                return leaf.kept(row, length)
        return super().kept(row, length)

    def refuses_drop(self, row: int) -> str | None:
        return next((why for member in self.members if (why := member.refuses_drop(row)) is not None), None)

    def drop(self, row: int, length: int, start: int, stop: int, changes: Changes) -> None:
        for member in self.members:
            member.drop(row, length, start, stop, changes)

    def adopt_device_step(self, step: Step) -> None:
        for member in self.members:
            member.adopt_device_step(step)

    def static_tensors(self) -> dict[str, Tensor]:
        return {
            f"{i}.{name}": t for i, member in enumerate(self.members) for name, t in member.static_tensors().items()
        }

    def rebind(self, tensors: dict[str, Tensor]) -> None:
        for i, member in enumerate(self.members):
            member.rebind({name: tensors[f"{i}.{name}"] for name in member.static_tensors()})

    def commit_on_device(self) -> None:
        for member in self.members:
            member.commit_on_device()

    def tensors(self) -> list[Tensor]:
        return [tensor for member in self.members for tensor in member.tensors()]

    def nbytes(self) -> int:
        return sum(member.nbytes() for member in self.members)

    def nbytes_shared(self) -> int:
        return sum(member.nbytes_shared() for member in self.members)

    def blocks(self) -> Iterator[KVBlock]:
        for member in self.members:
            yield from member.blocks()

    def nbytes_apart(self) -> int:
        return sum(member.nbytes_apart() for member in self.members)

    def nbytes_to_come(self) -> int:
        return sum(member.nbytes_to_come() for member in self.members)

    def leaves(self) -> list[LayerState]:
        return [leaf for member in self.members for leaf in member.leaves()]
