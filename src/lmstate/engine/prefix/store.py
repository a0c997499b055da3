"""The prefix store: keeps what was computed within a budget of bytes, and finds it again by its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from lmstate.engine.prefix.parts import Layers, Split, cut, nbytes
from lmstate.engine.prefix.tree import Carry, Node, walk
from lmstate.state import Snapshot

SLICE = 0.02  # of the budget that is made free at once


@dataclass(frozen=True)
class Match:
    """What the store has for a text: a snapshot can be made of its first `length` tokens."""

    length: int
    matched: int  # tokens that agree with something stored; more than `length` where a carry is missing
    node: Node | None = None  # where that snapshot comes from
    regime: int = 0
    tier: str | None = None


class PrefixStore:
    """A tree for each regime of ropes (see `Snapshot.regime`). `limit` is in bytes, of everything held in memory.

    What a text agrees with is reused at any token where layers keep an entry a token, else at the carries that were
    kept. What goes first is what saves the least seconds a byte, the longer nobody asked for it the less; never what a
    pinned text needs.
    """

    def __init__(self, split: Split, fingerprint: str, limit: int) -> None:
        self.split = split
        self.fingerprint = fingerprint
        self.limit = limit
        self.seconds_per_token = 1e-3  # measured by the engine
        self.nbytes = 0
        self.counts = {"stored": 0, "refused": 0, "evicted": 0}
        self._roots: dict[int, Node] = {}
        self._clock = count(1)

    # ---- finding

    def match(self, tokens: Sequence[int], logits: bool = True) -> Match:
        """The longest part of `tokens` that needs not be computed.

        With `logits`, those after the last token are needed: a text that is stored whole without them gives one less.
        """
        best = Match(0, 0)
        for regime, root in self._roots.items():
            node, matched = walk(root, tokens)
            found = self._usable(node, matched, len(tokens), logits)
            length = 0 if found is None else found[0]
            if (length, matched) > (best.length, best.matched):
                best = Match(length, matched, found and found[1], regime, "memory" if found else None)
        return best

    def snapshot(self, match: Match) -> Snapshot | None:
        """The snapshot of a match; it may be of some tokens more, to be rewound. None if it is gone."""
        node = match.node
        if node is None:
            return None
        length = max(match.length, node.end) if self.split.needs_carry else match.length
        path = node.path()
        carry = node.carry if length == node.end else None
        runs: list[Layers] = []
        now = next(self._clock)
        for part in path:
            part.used = now
            assert part.run is not None
            runs.append(part.run if part.end <= length else cut(part.run, 0, length - part.start))
        layers = self.split.join(runs, None if carry is None else carry.layers)
        tokens = tuple(node.all_tokens()[:length])
        return Snapshot(tokens, length, match.regime, None if carry is None else carry.logits, layers, self.fingerprint)

    # ---- keeping

    def put(self, snapshot: Snapshot) -> bool:
        """Keep a snapshot, as far as it shares nothing with what is kept. False if there is no room for it."""
        length = snapshot.cached
        if length == 0:
            return False
        tokens = snapshot.tokens[:length]
        logits = snapshot.logits if length == snapshot.length else None
        root = self._roots.setdefault(snapshot.regime, Node(array("q"), 0))
        node, matched = walk(root, tokens)
        now = next(self._clock)
        carry = Carry(self.split.carry(snapshot), logits)
        fresh = length - matched
        need = carry.nbytes + 2 * Node(array("q"), 0).nbytes
        if fresh:
            need += fresh * (8 + sum(_token_bytes(snapshot, self.split)))
        node.pins += 1  # what it hangs on must not go while room is made for it
        try:
            if not self._make_room(need):
                self.counts["refused"] += 1
                return False
        finally:
            node.pins -= 1
        if matched < node.end:
            node = self._split(node, matched - node.start)
        if fresh:
            leaf = Node(array("q", tokens[matched:]), matched, node, run=self.split.run(snapshot, matched, length))
            node.children[tokens[matched]] = leaf
            self.nbytes += leaf.nbytes
            node = leaf
        if node.carry is None or (node.carry.logits is None and logits is not None):
            self._account(node, lambda: setattr(node, "carry", carry))
        for part in node.path():
            part.used = now
        self.counts["stored"] += 1
        return True

    def pin(self, tokens: Sequence[int]) -> Node | None:
        """Keep what going on from the end of a text needs, however seldom it is asked for; None if there is nothing.

        To be undone by `unpin` with what it returned.
        """
        node = self.match(tokens, logits=False).node
        if node is not None:
            node.pins += 1
        return node

    def unpin(self, node: Node) -> None:
        node.pins -= 1

    def shrink(self, limit: int) -> None:
        """Hold at most this many bytes from now on, as far as pins allow."""
        self.limit = limit
        self._make_room(0)

    # ---- what there is

    def nodes(self) -> Iterator[tuple[int, Node]]:
        """(regime, node), those above first."""
        for regime, root in self._roots.items():
            for node in root.below():
                if node is not root:
                    yield regime, node

    def counted(self) -> int:
        """`nbytes`, by counting."""
        return sum(node.nbytes for _, node in self.nodes())

    # ---- the parts of it

    def _usable(self, node: Node, matched: int, length: int, logits: bool) -> tuple[int, Node] | None:
        """The longest usable part of a match that ends in `node`, and the node that its snapshot comes from."""
        if matched == length == node.end and node.carry is not None and (node.carry.logits is not None or not logits):
            return length, node
        reached = min(matched, length - 1 if logits else length)
        if self.split.needs_carry and (near := self._just_below(node, reached)) is not None:
            return reached, near
        while node.parent is not None and (node.end > reached or node.carry is None):
            if not self.split.needs_carry and node.start < reached:
                return reached, node
            node = node.parent
        return (node.end, node) if node.parent is not None else None

    def _just_below(self, node: Node, to: int) -> Node | None:
        """A carry at most `slack` tokens behind a position, from which a row goes back there at no cost."""
        if not self.split.slack or not to:
            return None
        waiting = [node]
        while waiting:
            other = waiting.pop()
            if other.end >= to and other.end - to <= self.split.slack and other.carry is not None:
                return other
            if other.end - to < self.split.slack:
                waiting += other.children.values()
        return None

    def _split(self, node: Node, at: int) -> Node:
        before = node.nbytes
        upper = node.split(at)
        self.nbytes += upper.nbytes + node.nbytes - before
        return upper

    def _account(self, node: Node, change: Callable[[], None]) -> None:
        before = node.nbytes
        change()
        self.nbytes += node.nbytes - before

    def _make_room(self, need: int) -> bool:
        """Let things go until `need` more bytes fit. False if they cannot."""
        if self.nbytes + need <= self.limit:
            return True
        fits = need <= self.limit  # else nothing goes for it, but what was too much already
        target = max(0, self.limit - int(self.limit * SLICE) - (need if fits else 0))
        while self.nbytes > target and (ranked := sorted(self._candidates(), key=lambda pair: pair[0])):
            for _, node in ranked:
                if self.nbytes <= target:
                    break
                self._let_go(node)
        return self.nbytes + need <= self.limit

    def _candidates(self) -> Iterator[tuple[float, Node]]:
        """(seconds that it saves a byte, aged; node) of all that can go."""
        now = next(self._clock)
        for _, node in self.nodes():
            if node.pins:
                continue
            if not node.children:
                size, tokens = node.nbytes, len(node.tokens)
            elif node.carry is not None and self.split.needs_carry:
                size, tokens = node.carry.nbytes, self._since_carry(node)
            elif node.carry is not None and node.carry.logits is not None:
                size, tokens = node.carry.nbytes, 1
            else:
                continue
            saved = tokens * self.seconds_per_token * (1 + len(node.children))
            yield saved / size / (1 + now - node.used), node

    @staticmethod
    def _since_carry(node: Node) -> int:
        """Tokens since the nearest carry above."""
        above = node.parent
        while above is not None and above.carry is None:
            above = above.parent
        return node.end - (0 if above is None else above.end)

    def _let_go(self, node: Node) -> None:
        """A leaf goes whole, and with it what above it was of use to it alone; of others the carry."""
        self.counts["evicted"] += 1
        if node.children:
            self._account(node, lambda: setattr(node, "carry", None))
            return
        while True:
            parent = node.parent
            assert parent is not None
            self.nbytes -= node.nbytes
            node.remove()
            useless = self.split.needs_carry and parent.carry is None and not parent.pins
            if parent.parent is None or parent.children or not useless:
                return
            node = parent


def _token_bytes(snapshot: Snapshot, split: Split) -> Iterator[int]:
    """Bytes of one token in each tensor that has an entry a token."""
    for layer, names in zip(snapshot.layers, split.per_token):
        for name in names & layer.keys():
            yield nbytes(({name: layer[name][..., :1, :]},))
