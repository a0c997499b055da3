"""A tree of pending tokens: several continuations of a row in one step, of which a verdict keeps one path.

Each leaf has its branch: a row of a forked state that takes the path from the root to it. So every layer kind,
recurrent ones too, sees a plain sequence, and a node's logits do not depend on the other branches. A fork copies what
the row holds: trees are exact before they are cheap.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lmstate.errors import PendingError, StateError
from lmstate.state.validate import whole_number


class Forkable(Protocol):
    """A batch of rows that can be copied and rearranged; `lmstate.State` is one."""

    @property
    def rows(self) -> int: ...

    @property
    def removed(self) -> frozenset[int]: ...

    def select(self, rows: Sequence[int | None]) -> None: ...


Batch = TypeVar("Batch", bound=Forkable)


@dataclass(frozen=True)
class TreePath:
    """The path from a row's last token to one leaf of its tree."""

    row: int
    nodes: tuple[int, ...]


@dataclass
class PendingTree(Generic[Batch]):
    """A tree that ran and awaits its verdict: `state` has a row for each branch."""

    counts: tuple[int, ...]  # nodes of each row
    parents: tuple[tuple[int, ...], ...]
    branches: tuple[TreePath, ...]
    state: Batch

    @property
    def waits(self) -> bool:
        """Whether nothing else can come before a verdict: one of no tokens needs none, as any other step."""
        return any(self.counts)

    def tokens(self, ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Of each branch, the tokens of its nodes."""
        return [[ids[branch.row][node] for node in branch.nodes] for branch in self.branches]

    def gather(self, logits: Tensor) -> Tensor:
        """Logits [branches, depth, V] -> [rows, nodes, V], right-padded with zeros."""
        width = max(self.counts, default=0)
        out = torch.zeros(len(self.counts), width, logits.shape[-1], dtype=logits.dtype, device=logits.device)
        for index, branch in enumerate(self.branches):
            if branch.nodes:
                out[branch.row, list(branch.nodes)] = logits[index, : len(branch.nodes)]
        return out

    def chosen(self, paths: Sequence[Sequence[int]]) -> list[int]:
        """For each row, the branch that begins with its path. Raises `PendingError` for anything but a path."""
        if len(paths) != len(self.counts):
            raise PendingError(f"commit_path was given {len(paths)} paths for {len(self.counts)} rows; give one each")
        found = []
        for row, path in enumerate(paths):
            nodes = tuple(whole_number(node, "a node") for node in path)
            fits = (
                index
                for index, branch in enumerate(self.branches)
                if branch.row == row and branch.nodes[: len(nodes)] == nodes
            )
            index = next(fits, None)
            if index is None:
                raise PendingError(
                    f"{list(nodes)} is not a path in the tree of row {row}, whose parents are "
                    f"{list(self.parents[row])}: begin at a node of parent -1, and go on with a child each time"
                )
            found.append(index)
        return found


def grow(state: Batch, ids: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> PendingTree[Batch]:
    """Fork a state, whose backlog is computed, into the branches of a tree. The state is not changed.

    parents: for each token, the index of its parent in the row's tokens, -1 for one that follows the row's last token.
    Raises `StateError` where these make no tree.
    """
    checked = tuple(tuple(whole_number(parent, "a parent") for parent in row) for row in parents)
    if len(checked) != len(ids):
        raise StateError(f"parents were given for {len(checked)} rows, and tokens for {len(ids)}")
    branches: list[TreePath] = []
    for row, (tokens, above) in enumerate(zip(ids, checked)):
        if len(above) != len(tokens) or any(not -1 <= parent < node for node, parent in enumerate(above)):
            raise StateError(
                f"the parents of row {row} are {list(above)} for {len(tokens)} tokens; give one for each token: -1, or "
                "the index of a token before it"
            )
        leaves = [node for node in range(len(tokens)) if node not in above]
        branches += [TreePath(row, _path(above, leaf)) for leaf in leaves] or [TreePath(row, ())]
    forked = copy.deepcopy(state)
    idle = {row for row in state.removed if not ids[row]}  # others are refused, as in any step
    forked.select([None if branch.row in idle else branch.row for branch in branches])
    return PendingTree(tuple(map(len, ids)), checked, tuple(branches), forked)


def _path(parents: Sequence[int], node: int) -> tuple[int, ...]:
    path = []
    while node != -1:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))
