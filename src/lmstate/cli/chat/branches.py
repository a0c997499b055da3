"""The branches of a conversation, drawn: each is a session, which knows the one that it was forked from."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten

from lmstate.cli.chat.messages import Message, shown
from lmstate.engine import Session
from lmstate.generation.conversation import common_prefix

FIRST = "main"
TREE_WIDTH = 48  # characters of a question in the tree


def drawn(branches: Mapping[str, Session], current: str) -> str:
    """The branches by name, each with its tokens and how many of them it shares with the one it came from."""
    return "\n".join(_lines(branches, current, FIRST, "", ""))


def _lines(branches: Mapping[str, Session], current: str, name: str, lead: str, below: str) -> list[str]:
    branch = branches[name]
    parent = None if branch.parent is None else branches[branch.parent]
    question = _question(branch.messages, [] if parent is None else parent.messages)
    text = f"{lead}{name}{question}: {len(branch.tokens)} tokens"
    if parent is not None:
        text += f", {common_prefix(branch.tokens, parent.tokens)} shared with {branch.parent}"
    lines = [text + (" (here)" if name == current else "")]
    children = [child for child, other in branches.items() if other.parent == name]
    for child in children:
        last = child == children[-1]
        lead = below + ("└─ " if last else "├─ ")
        lines += _lines(branches, current, child, lead, below + ("   " if last else "│  "))
    return lines


def _question(messages: list[Message], parent: list[Message]) -> str:
    """The beginning of the first question that the parent does not have, in quotes; empty if there is none."""
    own = messages[common_prefix(messages, parent) :]
    question = next((shown(message) for message in own if message["role"] == "user"), None)
    return "" if question is None else f' "{shorten(question, TREE_WIDTH, placeholder="...")}"'
