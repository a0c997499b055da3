"""The trees of a prefix store, with the bytes that they hold: a block counts once, however many nodes hold it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from torch import Tensor

from lmstate.engine.prefix.parts import Layers
from lmstate.engine.prefix.tree import Carry, Node
from lmstate.ops.types.block_table import KVBlock

Tree: TypeAlias = tuple[int, str]
"""(`Snapshot.frequency_key`, salt) of the texts of a tree."""


class CountedTrees:
    """A tree of nodes for each `Snapshot.frequency_key` and salt."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.block_nbytes = 0  # of them, those of blocks, which rows may hold too
        self._holders: Counter[KVBlock] = Counter()  # of each block, how many nodes hold it
        self._roots: dict[Tree, Node] = {}

    def nodes(self, salt: str | None = None) -> Iterator[tuple[Tree, Node]]:
        """(tree, node), those above first; with `salt`, of its trees alone."""
        for tree, root in self._roots.items():
            for node in root.below() if salt in (None, tree[1]) else ():
                if node is not root:
                    yield tree, node

    def counted(self) -> int:
        """`nbytes`, by counting."""
        nodes = [node for _, node in self.nodes()]
        blocks = {id(block): block for node in nodes for block in node.blocks()}
        return sum(node.own_nbytes for node in nodes) + sum(block.nbytes for block in blocks.values())

    def holds(self, block: KVBlock) -> bool:
        """Whether a node holds a block."""
        return block in self._holders

    def _root(self, tree: Tree) -> Node:
        """The root of a tree. Where it is new, empty ones go: some models have a key for every length."""
        if tree not in self._roots:
            self._roots = {key: root for key, root in self._roots.items() if root.children}
            self._roots[tree] = Node(array("q"), 0)
        return self._roots[tree]

    def _split(self, node: Node, at: int) -> Node:
        self._count(node, -1)
        upper = node.split(at)
        self._count(node, 1)
        self._count(upper, 1)
        return upper

    def _set(self, node: Node, *, run: Layers | None = None, carry: Carry | None = None) -> None:
        """Have a node hold these in memory too."""
        self._count(node, -1)
        node.run, node.carry = run or node.run, carry or node.carry
        self._count(node, 1)

    def _drop(self, node: Node, *, run: bool = False) -> None:
        """Have a node hold no carry in memory any more, and with `run` nothing."""
        self._count(node, -1)
        node.carry, node.run = None, None if run else node.run
        self._count(node, 1)

    def _count(self, node: Node, times: int) -> None:
        """Count a node, or with -1 no more: a block counts once, however many nodes hold it."""
        self.nbytes += times * node.own_nbytes
        for block in node.blocks():
            before = self._holders[block]
            if (now := before + times) == 0:
                del self._holders[block]
            else:
                self._holders[block] = now
            if not (before and now):
                self.nbytes += times * block.nbytes
                self.block_nbytes += times * block.nbytes

    def _fresh_bytes(self, coming: Iterable[KVBlock | Tensor]) -> int:
        """Bytes of blocks and tensors of which nothing is held yet."""
        each = {id(one): one for one in coming}.values()
        return sum(one.nbytes for one in each if not (isinstance(one, KVBlock) and one in self._holders))

    def _freed_by(self, node: Node) -> int:
        """Bytes that go with a node: blocks that another one holds too stay."""
        return node.own_nbytes + sum(block.nbytes for block in node.blocks() if self._holders[block] == 1)
