"""The prefix store: keeps what was computed within a budget of bytes, and finds it again by its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from torch import Tensor

from lmstate.engine.prefix.counted import CountedTrees, Tree
from lmstate.engine.prefix.parts import Layers, Split, cut, held, nbytes, pieces
from lmstate.engine.prefix.tree import NODE_BYTES, Carry, Node, Stored, walk
from lmstate.engine.tiers import Entry, Tier
from lmstate.state import Snapshot

SLICE = 0.02  # of the budget that is made free at once


@dataclass(frozen=True)
class Match:
    """Longest stored prefix of a text: a snapshot can be made of its first `length` tokens."""

    length: int
    matched: int  # tokens that agree with something stored; more than `length` where a carry is missing
    node: Node | None = None  # where that snapshot comes from
    frequency_key: int = 0
    tier: str | None = None


class PrefixStore(CountedTrees):
    """A tree for each `Snapshot.frequency_key` and salt. `limit` is in bytes, of everything held in memory.

    A common prefix is reused up to any token where layers keep an entry a token, else up to the carries that were kept.
    Evicts the lowest seconds saved per byte first, discounted by idle time. The needs of a pinned text go last, and
    only for rows that have no other room.
    A text finds what was kept under its own salt alone.
    """

    def __init__(
        self, split: Split, fingerprint: str, limit: int, tier: Tier | None = None, opening: Sequence[int] = ()
    ) -> None:
        """`tier`: where all that is kept is written too, and found again after a restart. `opening`: the numbers of
        learned positions in front of every text, see `lmstate.state.opening`: callers do not count them."""
        super().__init__()
        self.split = split
        self.opening = list(opening)
        self.tier = tier
        self.fingerprint = fingerprint
        self.limit = limit
        self.seconds_per_token = 1e-3  # measured by the engine
        self.counts = {"stored": 0, "refused": 0, "evicted": 0}
        self._clock = count(1)
        if tier is not None:
            self._recall(tier)

    # ---- finding

    def match(
        self,
        tokens: Sequence[int],
        logits: bool = True,
        only_memory: bool = False,
        key: int | None = None,
        salt: str = "",
    ) -> Match:
        """The longest part of `tokens` that needs not be computed.

        With `logits`, those after the last token are needed: a text that is stored whole without them gives one less.
        `key`: the frequency key of the text that they are read for; None: any.
        """
        best, tokens, ahead = Match(0, 0), self.whole(tokens), len(self.opening)
        for (frequency_key, own), root in self._roots.items():
            if own != salt or key not in (None, frequency_key):
                continue
            node, matched = walk(root, tokens)
            node, matched = self._held(node, matched, only_memory)
            found = self._usable(node, matched, len(tokens), logits, only_memory)
            if found is not None and found[0] < ahead:
                found = None
            length, matched = 0 if found is None else found[0] - ahead, max(0, matched - ahead)
            if (length, matched) > (best.length, best.matched) or (found is not None and best.node is None):
                best = Match(length, matched, found and found[1], frequency_key, found and self._where(*found))
        return best

    def whole(self, tokens: Sequence[int]) -> Sequence[int]:
        """A text with the opening in front of it, as the tree has it."""
        return [*self.opening, *tokens] if self.opening else tokens

    def missing(self, match: Match) -> dict[str, Callable[[Layers], Layers]]:
        """The keys of what has to be read from the tier before a snapshot of the match can be made.

        With each, what makes of what was read what `fill` takes, for any thread to call; it raises SnapshotError for
        what no store of such states has written, and RuntimeError where there is no memory for it.
        """
        if match.node is None:
            return {}
        end = match.node.end if self.split.needs_carry else len(self.opening) + match.length
        runs = [(part, part.stored_run) for part in match.node.path() if part.run is None and part.start < end]
        wanted: dict[str, Callable[[Layers], Layers]] = {
            run.key: partial(self.split.run_of, start=part.start - run.offset) for part, run in runs if run is not None
        }
        if match.node.carry is None and self.split.needs_carry and (stored := match.node.stored_carry) is not None:
            wanted[stored.key] = self.split.carry_of
        return wanted

    def fill(self, match: Match, made: Mapping[str, Layers]) -> bool:
        """Put what was read for a match in its place. False if there is no room, or if some of it is unusable.

        `made`: of keys that were `missing`. A run that is too short is forgotten; all else stays.
        """
        if match.node is None or match.node.parent is None:
            return False
        made = {key: made[key] for key in self.missing(match) if key in made}
        carried = match.node.stored_carry if match.node.carry is None else None
        for part in match.node.path():
            stored = part.stored_run if part.run is None else None
            if stored is not None and any(piece.stop < part.end for piece in pieces(made.get(stored.key, ()))):
                self._refuse(stored.key)
                return False
        if not self._make_room(sum(map(nbytes, made.values())), needed=match.node):
            return False
        before: Layers = ()
        for part in match.node.path():
            if part.run is None:
                if (run := part.stored_run) is None or run.key not in made:
                    return False
                own = cut(made[run.key], run.offset, run.offset + len(part.tokens))
                for piece, earlier in zip(pieces(own), pieces(before)):
                    piece.follow(earlier)
                self._set(part, run=own)
            assert part.run is not None
            before = part.run
        if carried is not None and carried.key in made:
            self._set(match.node, carry=Carry(*_without_logits(made[carried.key])))
        return not self.missing(match)

    def discard(self, match: Match) -> None:
        """Forget a match that proved damaged, and all that goes on from it."""
        if (node := match.node) is not None and node.parent is not None:
            for stored in (node.stored_run, node.stored_carry):
                if stored is not None:
                    self._refuse(stored.key)
            self._remove(node)

    def forget_stored(self, keys: Iterable[str]) -> None:
        """These could not be read, or were unusable: never ask for them again."""
        gone = set(keys)
        for _, node in self.nodes():
            if node.stored_run is not None and node.stored_run.key in gone:
                node.stored_run = None
            if node.stored_carry is not None and node.stored_carry.key in gone:
                node.stored_carry = None

    def snapshot(self, match: Match) -> Snapshot | None:
        """The snapshot of a match; it may be of some tokens more, to be rewound. None if it is gone."""
        node = match.node
        if node is None or self.missing(match):
            return None
        ahead = len(self.opening)
        length = max(ahead + match.length, node.end) if self.split.needs_carry else ahead + match.length
        path = node.path()
        carry = node.carry if length == node.end else None
        runs: list[Layers] = []
        now = next(self._clock)
        for part in path:
            part.used = now
            assert part.run is not None
            runs.append(part.run if part.end <= length else cut(part.run, 0, length - part.start))
        layers = self.split.join(runs, None if carry is None else carry.layers)
        tokens, logits = tuple(node.all_tokens()[ahead:length]), None if carry is None else carry.logits
        return Snapshot(tokens, length, match.frequency_key, logits, layers, self.fingerprint, opening=ahead)

    # ---- keeping

    def put(self, snapshot: Snapshot, salt: str = "") -> bool:
        """Keep a snapshot, as far as it shares nothing with what is kept. False if there is no room for it."""
        length = snapshot.cached
        if length == 0:
            return False
        tokens = self.whole(snapshot.identities)[:length]
        logits = snapshot.logits if length == len(self.opening) + snapshot.length else None
        node, matched = walk(self._root(tree := (snapshot.frequency_key, salt)), tokens)
        now = next(self._clock)
        carry = Carry(self.split.carry(snapshot), logits)
        fresh = length - matched
        first = min([matched, *(part.start for part in node.path() if part.run is None)])
        coming = [*carry.held, *held(self.split.run(snapshot, first, length))]
        for _ in range(2):  # to make room, blocks may go that were to be shared
            need = fresh * 8 + 2 * NODE_BYTES + self._fresh_bytes(coming)
            if not self._make_room(need, needed=node):
                self.counts["refused"] += 1
                return False
        if matched < node.end:
            node = self._split(node, matched - node.start)
        if fresh:
            leaf = Node(array("q", tokens[matched:]), matched, node)
            node.children[tokens[matched]] = leaf
            self._count(leaf, 1)
            node = leaf
        path = node.path()
        for part in path:
            part.used = now
            if part.run is None:  # new, or once in memory and then only in a tier
                self._set(part, run=self.split.run(snapshot, part.start, part.end))
        known = node.carry is not None and (node.carry.logits is not None or logits is None)
        if carry.held and not known:
            self._set(node, carry=carry)
        self.counts["stored"] += 1
        if self.tier is not None:
            self._write(self.tier, tree, path)
        return True

    def pin(self, tokens: Sequence[int], salt: str = "") -> Node | None:
        """Keep what going on from the end of a text needs, however seldom it is asked for; None if there is nothing.

        To be undone by `unpin` with what it returned.
        """
        node = self.match(tokens, logits=False, salt=salt).node
        if node is not None:
            node.pins += 1
        return node

    def unpin(self, node: Node) -> None:
        node.pins -= 1

    def clear(self, salt: str | None = None) -> None:
        """Forget everything but what is pinned; with `salt`, of what was kept under it."""
        needed = {part for _, node in self.nodes() if node.pins for part in node.path()}
        for _, node in [*self.nodes(salt)]:
            if node.parent is not None and node not in needed:  # else it went with another
                self._remove(node)

    def shrink(self, limit: int) -> None:
        """Hold at most this many bytes from now on; if nothing else is left to go, pinned entries go too."""
        self.limit = limit
        if not self._make_room(0):
            self._make_room(0, pinned=True)

    # ---- the parts of it

    def _held(self, node: Node, matched: int, only_memory: bool) -> tuple[Node, int]:
        """A match that ends in `node`, as far as what its tokens left is still somewhere."""
        for part in node.path():
            if part.run is None and (only_memory or not self._stored(part.stored_run)):
                return part.parent or part, part.start
        return node, matched

    def _stored(self, where: Stored | None) -> bool:
        return where is not None and self.tier is not None and self.tier.has(where.key)

    def _carries(self, node: Node, only_memory: bool) -> bool:
        return node.carry is not None or (not only_memory and self._stored(node.stored_carry))

    def _where(self, length: int, node: Node) -> str:
        """The farthest tier that something of a match comes from."""
        parts = [part.run for part in node.path() if part.start < length]
        absent = None in parts or (self.split.needs_carry and node.carry is None)
        return "memory" if not absent or self.tier is None else self.tier.name

    def _usable(
        self, node: Node, matched: int, length: int, logits: bool, only_memory: bool
    ) -> tuple[int, Node] | None:
        """The longest usable part of a match that ends in `node`, and the node that its snapshot comes from."""
        if node.carry is not None:
            known = node.carry.logits is not None or not logits
        else:
            stored = node.stored_carry
            known = self._carries(node, only_memory) and self.split.needs_carry and stored is not None and stored.logits
        if known and matched == length == node.end:
            return length, node
        reached = min(matched, length - 1 if logits else length)
        if self.split.needs_carry and (near := self._just_below(node, reached, only_memory)) is not None:
            return reached, near
        while node.parent is not None and (node.end > reached or not self._carries(node, only_memory)):
            if not self.split.needs_carry and node.start < reached:
                return reached, node
            node = node.parent
        return (node.end, node) if node.parent is not None else None

    def _just_below(self, node: Node, to: int, only_memory: bool) -> Node | None:
        """A carry at most `slack` tokens behind a position, from which a row goes back there at no cost."""
        if not self.split.slack or not to:
            return None
        waiting = [node]
        while waiting:
            other = waiting.pop()
            near = 0 <= other.end - to <= self.split.slack
            if near and self._carries(other, only_memory) and self._held(other, other.end, only_memory)[0] is other:
                return other
            if other.end - to < self.split.slack:
                waiting += other.children.values()
        return None

    # ---- the tier

    def _refuse(self, key: str) -> None:
        """Forget what was read and is damaged: it is written again once it was computed again."""
        self.forget_stored([key])
        if self.tier is not None:
            self.tier.refuse(key)

    def _write(self, tier: Tier, tree: Tree, path: list[Node]) -> None:
        """Have what is new of a path written."""
        frequency_key, salt = tree
        tokens = path[-1].all_tokens()
        above: list[str] = []

        def kept(where: Stored | None) -> bool:  # not so if its write failed, or the tier has let it go
            return where is not None and tier.keeps(where.key)

        for part in path:
            if part.run is not None and not kept(part.stored_run):
                key = tier.put(Entry("run", frequency_key, part.start, tokens[: part.end], salt), part.run, above)
                part.stored_run = None if key is None else Stored(key)
            if part.stored_run is not None:
                above.append(part.stored_run.key)
        last = path[-1]
        if last.carry is not None and not kept(last.stored_carry) and (self.split.needs_carry or not last.children):
            layers = _with_logits(last.carry.layers, last.carry.logits)
            known = last.carry.logits is not None
            key = tier.put(Entry("end" if known else "carry", frequency_key, last.end, tokens, salt), layers, above)
            last.stored_carry = None if key is None else Stored(key, logits=known)

    def _recall(self, tier: Tier) -> None:
        """Grow the tree of what a tier has, without anything of it in memory."""
        self.learn(tier.all_entries())

    def learn(self, found: Iterable[tuple[str, Entry]]) -> None:
        """Have these entries of the tier found, as far as they hang on something."""
        # The parent of a run begins before it, but may end after it: a run that this one leaves on the way.
        for key, entry in sorted(found, key=lambda pair: (pair[1].start, pair[1].kind != "run")):
            node, matched = walk(self._root((entry.frequency_key, entry.salt)), entry.tokens)
            end = len(entry.tokens)
            if matched < node.end and (matched < end or entry.kind != "run"):
                node = self._split(node, matched - node.start)
            if entry.kind == "run" and entry.start <= matched < end:
                leaf = Node(entry.tokens[matched:], matched, node, stored_run=Stored(key, matched - entry.start))
                node.children[entry.tokens[matched]] = leaf
                self._count(leaf, 1)
            elif entry.kind != "run" and matched == end and node.parent is not None:
                node.stored_carry = Stored(key, logits=entry.kind == "end")
        self._make_room(0)

    # ---- room

    def _make_room(self, need: int, needed: Node | None = None, *, pinned: bool = False) -> bool:
        """Let things go until `need` more bytes fit. False if they cannot. `needed` and what it hangs on stay.

        Pinned entries go only with `pinned`.
        """
        if needed is not None:
            needed.pins += 1
            try:
                return self._make_room(need)
            finally:
                needed.pins -= 1
        if self.nbytes + need <= self.limit:
            return True
        fits = need <= self.limit  # else nothing goes for it, but what was too much already
        target = max(0, self.limit - int(self.limit * SLICE) - (need if fits else 0))
        while self.nbytes > target and (ranked := sorted(self._candidates(pinned), key=lambda pair: pair[0])):
            for _, node in ranked:
                if self.nbytes <= target:
                    break
                self._let_go(node)
        return self.nbytes + need <= self.limit

    def _candidates(self, pinned: bool) -> Iterator[tuple[float, Node]]:
        """(seconds that it saves a byte, aged; node) of all that can go; with `pinned`, also of pinned entries."""
        now = next(self._clock)
        needed = set() if pinned else {part for _, node in self.nodes() if node.pins for part in node.path()}
        for _, node in self.nodes():
            below = any(child.run is not None for child in node.children.values())
            if node in needed:
                continue
            if not below and (node.run is not None or not node.children):
                size, tokens = self._freed_by(node), len(node.tokens)
            elif node.carry is not None:
                size, tokens = (
                    sum(each.nbytes for each in node.carry.held),
                    self._since_carry(node) if self.split.needs_carry else 1,
                )
            else:
                continue
            saved = tokens * self.seconds_per_token * (1 + len(node.children))
            yield saved / max(size, 1) / (1 + now - node.used), node

    @staticmethod
    def _since_carry(node: Node) -> int:
        """Tokens since the nearest carry above."""
        above = node.parent
        while above is not None and above.carry is None:
            above = above.parent
        return node.end - (0 if above is None else above.end)

    def _let_go(self, node: Node) -> None:
        """The last run in memory of a text goes, or the carry inside one. Data that a tier has is found again there."""
        if node.parent is None:
            return  # it went with another
        self.counts["evicted"] += 1
        if any(child.run is not None for child in node.children.values()):
            self._drop(node)
        elif node.run is not None and self._stored(node.stored_run):
            self._drop(node, run=True)
        else:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        """Take a node out of the tree, all below it, and what above it was of use to it alone."""
        for part in [*node.below()][::-1]:
            self._count(part, -1)
            above = part.parent
            part.remove()
        while above is not None and above.parent is not None and not above.children and not above.pins:
            if not self.split.needs_carry or self._carries(above, only_memory=False):
                return
            self._count(above, -1)
            gone, above = above, above.parent
            gone.remove()


def _with_logits(layers: Layers, logits: Tensor | None) -> Layers:
    """The form in which a carry is written: its logits are one layer more."""
    return (*layers, {} if logits is None else {"logits": logits})


def _without_logits(layers: Layers) -> tuple[Layers, Tensor | None]:
    return layers[:-1], layers[-1].get("logits")
