"""A radix tree over token ids: a node is a run of tokens, what they left, and what is known at its end."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lmstate.engine.prefix.parts import Layers, cut, held
from lmstate.ops.types.block_table import KVBlock

NODE_BYTES = 1024  # what Python keeps for a node beside its tensors and tokens, about


@dataclass(eq=False)
class Carry:
    """Carries and logits at a node's end, which a row needs beside the per-token tensors to go on."""

    layers: Layers
    logits: Tensor | None

    @property
    def held(self) -> list[KVBlock | Tensor]:
        """Blocks that others may hold too, and tensors."""
        return [*held(self.layers), *([] if self.logits is None else [self.logits])]


@dataclass(frozen=True)
class Stored:
    """Location in a tier outside memory: the tokens from `offset` on of the entry under a key."""

    key: str
    offset: int = 0
    logits: bool = False  # of a carry, whether its last logits are with it


@dataclass(eq=False)
class Node:
    """`tokens` follow the parent's. `run` has the entries they left, `carry` what was known after the last of them.

    Either may be in memory, in a tier outside (`stored_run`, `stored_carry`), in both, or in neither.
    """

    tokens: array[int]
    start: int  # the position of its first token
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    run: Layers | None = None
    carry: Carry | None = None
    stored_run: Stored | None = None
    stored_carry: Stored | None = None
    pins: int = 0  # sessions that are here
    used: int = 0  # when it was last of use, in the store's own time

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def own_nbytes(self) -> int:
        """Bytes in memory of what it does not share with others: all but blocks."""
        tensors = sum(each.nbytes for each in self._held() if not isinstance(each, KVBlock))
        return NODE_BYTES + self.tokens.itemsize * len(self.tokens) + tensors

    def blocks(self) -> list[KVBlock]:
        """Blocks of its run and of its carry; a block at a border is also a neighbor's."""
        return [each for each in self._held() if isinstance(each, KVBlock)]

    def _held(self) -> list[KVBlock | Tensor]:
        return [*held(self.run), *([] if self.carry is None else self.carry.held)]

    def path(self) -> list[Node]:
        """From the root's child down to itself."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def below(self) -> Iterator[Node]:
        """Itself and all under it, those above first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def all_tokens(self) -> array[int]:
        tokens = array("q")
        for node in self.path():
            tokens += node.tokens
        return tokens

    def split(self, count: int) -> Node:
        """Make its first `count` tokens a node of their own, above it, and return that one. Nothing is lost."""
        assert 0 < count < len(self.tokens) and self.parent is not None
        upper = Node(self.tokens[:count], self.start, self.parent, used=self.used)
        upper.stored_run = self.stored_run
        if self.run is not None:
            upper.run, self.run = cut(self.run, 0, count), cut(self.run, count)
        if self.stored_run is not None:
            self.stored_run = Stored(self.stored_run.key, self.stored_run.offset + count)
        self.parent.children[self.tokens[0]] = upper
        self.tokens, self.start, self.parent = self.tokens[count:], self.start + count, upper
        upper.children = {self.tokens[0]: self}
        return upper

    def remove(self) -> None:
        assert self.parent is not None and not self.children
        del self.parent.children[self.tokens[0]]
        self.parent = self.run = self.carry = None  # a session that stood here may hold the node for long


def walk(root: Node, tokens: Sequence[int]) -> tuple[Node, int]:
    """(the node in which the longest common prefix ends, its length). The root and 0 where nothing agrees."""
    if not isinstance(tokens, array):  # two of them are compared in no time
        tokens = array("q", tokens)
    node, at = root, 0
    while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
        same = shared(child.tokens, tokens, at)
        node, at = child, at + same
        if same < len(child.tokens):
            break
    return node, at


def shared(run: Sequence[int], tokens: Sequence[int], at: int = 0) -> int:
    """Number of leading tokens of `run` that agree with `tokens` from `at` on."""
    most = min(len(run), len(tokens) - at)
    if most == len(run) and run == tokens[at : at + most]:
        return most
    return next((i for i in range(most) if run[i] != tokens[at + i]), most)
