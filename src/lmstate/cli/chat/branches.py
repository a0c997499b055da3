"""The branches of a conversation: each a list of messages and a snapshot of the state that has read them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmstate.state import Snapshot

if TYPE_CHECKING:
    from lmstate.cli.chat.conversation import Conversation, Message

FIRST = "main"
ROLES = ("system", "user", "assistant")


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

    def fork(self, conversation: Conversation, name: str) -> None:
        """Begin a branch here and go on in it. Raises ValueError for a name that is taken or empty."""
        if not name or name in self.known:
            raise ValueError(f"there is a branch {name!r} already" if name else "a branch needs a name: /fork NAME")
        self._leave(conversation)
        self.known[name] = Branch(self.current, list(conversation.messages), conversation.state.tokens(0))
        self.current = name

    def switch(self, conversation: Conversation, name: str) -> int:
        """Go to another branch. Returns the tokens that its next answer must recompute."""
        if name not in self.known:
            raise ValueError(f"there is no branch {name!r}; there are {', '.join(self.known)}")
        if name == self.current:
            raise ValueError(f"the conversation is on {name!r} already")
        branch = self.known[name]
        assert branch.snapshot is not None
        self._leave(conversation)
        conversation.state.restore(0, branch.snapshot)
        conversation.messages = list(branch.messages)
        branch.snapshot, self.current = None, name
        return conversation.state.rewind_cost(0, conversation.state.lengths[0])

    def tree(self, conversation: Conversation) -> str:
        """The branches, drawn, each with its tokens and how many of them it shares with the one it came from."""
        here = self.known[self.current]
        here.messages, here.tokens = list(conversation.messages), conversation.state.tokens(0)
        return "\n".join(self._lines(FIRST, "", ""))

    def _lines(self, name: str, lead: str, below: str) -> list[str]:
        branch = self.known[name]
        text = f"{lead}{name}: {len(branch.tokens)} tokens"
        if branch.parent is not None:
            text += f", {shared(branch.tokens, self.known[branch.parent].tokens)} shared with {branch.parent}"
        lines = [text + (" (here)" if name == self.current else "")]
        children = [child for child, other in self.known.items() if other.parent == name]
        for child in children:
            last = child == children[-1]
            lines += self._lines(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))
        return lines

    def _leave(self, conversation: Conversation) -> None:
        snapshot = conversation.state.snapshot(0)
        branch = self.known[self.current]
        branch.messages, branch.tokens, branch.snapshot = list(conversation.messages), list(snapshot.tokens), snapshot


def shared(a: list[int], b: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def save(conversation: Conversation, path: Path) -> Snapshot:
    """Write the state and the messages of the branch that the conversation is on. Raises OSError where it cannot be."""
    notes = json.dumps({"messages": conversation.messages})
    snapshot = dataclasses.replace(conversation.state.snapshot(0), notes=notes)
    try:
        snapshot.save(path)
    except OSError as error:  # which names the temporary file that becomes this one
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    return snapshot


def load(conversation: Conversation, path: Path) -> Snapshot:
    """Go on from a saved conversation, in the place of the branch that this one is on.

    Raises `SnapshotError` (a ValueError) for files that are damaged or of another model, ValueError for a snapshot that
    no chat wrote; the conversation is then as it was.
    """
    snapshot = Snapshot.load(path)
    messages = _messages(snapshot.notes, path)
    conversation.state.restore(0, snapshot)
    conversation.messages = messages
    return snapshot


def _messages(notes: str, path: Path) -> list[Message]:
    try:
        messages = json.loads(notes)["messages"]
        sound = all(
            set(message) == {"role", "content"} and message["role"] in ROLES and isinstance(message["content"], str)
            for message in messages
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise ValueError(f"{path} is a snapshot, but of no conversation: it has no messages")
    return list(messages)
