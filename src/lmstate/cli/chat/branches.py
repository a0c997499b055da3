"""The branches of a conversation: each a list of messages and a snapshot of the state that has read them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from lmstate.cli.chat.messages import Message, is_message, shown
from lmstate.generation.conversation import common_prefix
from lmstate.state import Snapshot, State
from lmstate.vision.stored import to_json, with_bytes

FIRST = "main"
TREE_WIDTH = 48  # characters of a question in the tree


@dataclass
class Branch:
    """`snapshot` None: the branch that the conversation's state is on."""

    parent: str | None
    messages: list[Message]
    tokens: list[int]
    snapshot: Snapshot | None = None


class Branches:
    """All branches of a conversation by name, and which one it is on."""

    def __init__(self) -> None:
        self.known: dict[str, Branch] = {FIRST: Branch(None, [], [])}
        self.current = FIRST

    def copy(self) -> Branches:
        """The same branches; what happens to one copy does not show in the other."""
        other = Branches()
        other.known = {name: dataclasses.replace(branch) for name, branch in self.known.items()}
        other.current = self.current
        return other

    def fork(self, messages: list[Message], state: State, name: str) -> None:
        """Begin a branch here and go on in it. Raises ValueError for a name that is taken or empty."""
        if not name or name in self.known:
            raise ValueError(f"there is a branch {name!r} already" if name else "a branch needs a name: /fork NAME")
        self._leave(messages, state)
        self.known[name] = Branch(self.current, list(messages), state.tokens(0))
        self.current = name

    def switch(self, messages: list[Message], state: State, name: str) -> list[Message]:
        """Go to another branch: restores `state`, returns its messages. Raises ValueError if there is none."""
        if name not in self.known:
            raise ValueError(f"there is no branch {name!r}; there are {', '.join(self.known)}")
        if name == self.current:
            raise ValueError(f"the conversation is on {name!r} already")
        branch = self.known[name]
        assert branch.snapshot is not None
        self._leave(messages, state)
        state.restore(0, branch.snapshot)
        branch.snapshot, self.current = None, name
        return list(branch.messages)

    def tree(self, messages: list[Message], state: State) -> str:
        """The branches, drawn, each with its tokens and how many of them it shares with the one it came from."""
        here = self.known[self.current]
        here.messages, here.tokens = list(messages), state.tokens(0)
        return "\n".join(self._lines(FIRST, "", ""))

    def _lines(self, name: str, lead: str, below: str) -> list[str]:
        branch = self.known[name]
        parent = self.known.get(branch.parent or "", Branch(None, [], []))
        text = f"{lead}{name}{_question(branch.messages, parent.messages)}: {len(branch.tokens)} tokens"
        if branch.parent is not None:
            text += f", {common_prefix(branch.tokens, parent.tokens)} shared with {branch.parent}"
        lines = [text + (" (here)" if name == self.current else "")]
        children = [child for child, other in self.known.items() if other.parent == name]
        for child in children:
            last = child == children[-1]
            lines += self._lines(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))
        return lines

    def _leave(self, messages: list[Message], state: State) -> None:
        snapshot = state.snapshot(0)
        branch = self.known[self.current]
        branch.messages, branch.tokens, branch.snapshot = list(messages), list(snapshot.tokens), snapshot


def _question(messages: list[Message], parent: list[Message]) -> str:
    """The beginning of the first question that the parent does not have, in quotes; empty if there is none."""
    own = messages[common_prefix(messages, parent) :]
    question = next((shown(message) for message in own if message["role"] == "user"), None)
    return "" if question is None else f' "{shorten(question, TREE_WIDTH, placeholder="...")}"'


def save(messages: list[Message], state: State, path: Path, force: bool = False) -> Snapshot:
    """Write the state and the messages of the current branch.

    Raises OSError where the file cannot be written, FileExistsError where there is one and `force` does not ask to
    replace it.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file in it")
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists; /save --force {path} replaces it")
    snapshot = with_messages(state.snapshot(0), messages)
    snapshot.save(path)
    return snapshot


def load(state: State, path: Path) -> tuple[Snapshot, list[Message]]:
    """Restore `state` to a saved conversation, in the place of the current branch.

    Raises `SnapshotError` (a ValueError) for files that are damaged or of another model, ValueError for a snapshot that
    no chat wrote; the conversation is then as it was.
    """
    snapshot = Snapshot.load(path)
    messages = messages_of(snapshot)
    if messages is None:
        raise ValueError(f"{path} is a snapshot, but of no conversation: it has no messages")
    state.restore(0, snapshot)
    return snapshot, messages


def with_messages(snapshot: Snapshot, messages: list[Message]) -> Snapshot:
    """The snapshot with a conversation's messages in its notes, where `messages_of` and `Engine.load_session` find
    them."""
    record = {"messages": messages, "turns": [], "marks": []}  # as `lmstate.engine.session_record` writes it
    return dataclasses.replace(snapshot, notes=json.dumps(record, default=to_json))


def messages_of(snapshot: Snapshot) -> list[Message] | None:
    """The messages in a snapshot's notes; None if it is of no conversation."""
    try:
        messages = list(map(with_bytes, json.loads(snapshot.notes)["messages"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return messages if all(map(is_message, messages)) else None
