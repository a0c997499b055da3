"""A prefix store from outside: its runs of tokens as values and as text, and the names of what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lmstate.engine.prefix.digests import beginnings
from lmstate.engine.prefix.store import PrefixStore, Tree
from lmstate.engine.prefix.tree import Node, walk

WIDTH = 48  # characters of a run's text that are shown


@dataclass(frozen=True)
class Prefix:
    """A run of tokens in the store, and what is known of it.

    `start`, `count` of its tokens; `depth` in the tree; `text`: its beginning, escaped. `memory`, `tier`: whether its
    keys and values are in memory, and the tier outside that has them. `carry`, `logits`: whether what layers remember
    of all tokens is kept at its end, and the last logits. `pins`: sessions that are there. `branch`: whether the
    tokens that were asked about run through it. `shared`: whether other texts do too. `nbytes`: of memory.
    """

    start: int
    count: int
    depth: int
    text: str
    memory: bool
    tier: str | None
    carry: bool
    logits: bool
    pins: int
    branch: bool
    shared: bool
    nbytes: int

    @property
    def flags(self) -> str:
        """`M` keys and values in memory, `D` in a tier, `C` a carry, `L` last logits, `P` a session is here."""
        known = {"M": self.memory, "D": self.tier, "C": self.carry, "L": self.logits, "P": self.pins}
        return "".join(letter for letter, is_so in known.items() if is_so)


def prefixes(
    store: PrefixStore,
    decode: Callable[[Sequence[int]], str],
    tokens: Sequence[int] = (),
    salt: str | None = None,
) -> Iterator[Prefix]:
    """The runs of the store, those above first; `tokens` are those asked about. With `salt`, those under it alone."""
    tier = None if store.tier is None else store.tier.name
    through: dict[Tree, set[Node]] = {}
    nodes = list(store.nodes(salt))
    shared: set[Node] = set()
    for _, node in reversed(nodes):  # those below first
        if len(node.children) > 1 or any(child in shared for child in node.children.values()):
            shared.add(node)
    for tree, node in nodes:
        path = node.path()
        if tree not in through:
            assert path[0].parent is not None
            through[tree] = set(walk(path[0].parent, store.whole(tokens))[0].path())
        text = decode(list(node.tokens[:WIDTH])).encode("unicode_escape").decode()
        yield Prefix(
            start=node.start,
            count=len(node.tokens),
            depth=len(path) - 1,
            text=text[:WIDTH],
            memory=node.run is not None,
            tier=None if node.stored_run is None else tier,
            carry=node.carry is not None or node.stored_carry is not None,
            logits=node.carry is not None and node.carry.logits is not None,
            pins=node.pins,
            branch=node in through[tree],
            shared=node in shared,
            nbytes=node.own_nbytes + sum(block.nbytes for block in node.blocks()),
        )


def picture(store: PrefixStore, decode: Callable[[Sequence[int]], str], salt: str | None = None) -> str:
    """A line a run, indented by depth: its tokens, their number, and what is known at its end; see `Prefix.flags`.

    With `salt`, of the runs under it alone.
    """
    shown = prefixes(store, decode, salt=salt)
    runs = (f"{'  ' * one.depth}{one.start}+{one.count} [{one.flags}] {one.text}" for one in shown)
    return "\n".join((f"{store.nbytes:,} of {store.limit:,} bytes", *runs))


def resident(prefixes: PrefixStore, limit: int) -> list[str]:
    """The digests of the beginnings that memory has, of the texts that were last used first; the longest first."""
    found: dict[str, None] = {}
    leaves = [(salt, node) for (_, salt), node in prefixes.nodes() if not node.children]
    for salt, leaf in sorted(leaves, key=lambda pair: pair[1].used, reverse=True):
        if len(found) >= limit:
            break
        held = 0
        for node in leaf.path():
            if node.run is None:
                break
            held = node.end
        found.update(dict.fromkeys([*beginnings(leaf.all_tokens()[:held], salt)][::-1]))
    return list(found)[: max(0, limit)]
