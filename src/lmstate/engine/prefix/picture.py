"""A prefix store as text, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmstate.engine.prefix.store import PrefixStore
from lmstate.engine.prefix.tree import Node

WIDTH = 48  # characters of a run's text that are shown


def picture(store: PrefixStore, decode: Callable[[Sequence[int]], str]) -> str:
    """A line a node, indented by depth: its tokens, their number, and what is known at its end.

    `C` a carry, `L` last logits, `M` keys and values in memory, `D` in a tier, `P` a session stands here.
    """
    lines = [f"{store.nbytes:,} of {store.limit:,} bytes"]
    for _, node in store.nodes():
        text = decode(list(node.tokens[:WIDTH]))
        shown = text.encode("unicode_escape").decode()[:WIDTH]
        depth = len(node.path()) - 1
        lines.append(f"{'  ' * depth}{node.start}+{len(node.tokens)} [{_known(node)}] {shown}")
    return "\n".join(lines)


def _known(node: Node) -> str:
    logits = node.carry is not None and node.carry.logits is not None
    flags = {
        "M": node.run is not None,
        "D": node.stored_run is not None,
        "C": node.carry is not None or node.stored_carry is not None,
        "L": logits,
        "P": node.pins > 0,
    }
    return "".join(letter for letter, is_so in flags.items() if is_so)
