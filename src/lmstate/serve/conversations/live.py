"""A conversation that pages look at: its changes by version, and the answers that are being written in it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmstate.serve.conversations.markdown import render_blocks, typed_blocks
from lmstate.serve.conversations.tree import Conversation, MessageNode

if TYPE_CHECKING:
    from lmstate.engine import Request


UNSAVED = "This answer is not saved yet: the server could not write it, and tries again."


@dataclass
class Shown:
    """A message as HTML blocks, and the version at which it and each block last changed."""

    version: int = 0
    blocks: list[str] | None = None  # None: not rendered yet
    changed: list[int] = field(default_factory=list)

    def show(self, blocks: list[str]) -> None:
        self.blocks, self.changed = blocks, [self.version] * len(blocks)


def blocks_of(node: MessageNode) -> list[str]:
    """A message as HTML: an answer's Markdown, and what a person said as it was typed."""
    return typed_blocks(node.text) if node.role == "user" else render_blocks(node.text)


class Live:
    """An open conversation, with versions of its parts. For the event loop's thread alone."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.version = 1
        self.watchers = 0
        self.deleted = False
        self.running: dict[str, Request] = {}
        self.saving = asyncio.Lock()  # so that of two savings the later one counts
        self.unsaved: set[str] = set()  # messages that could not be saved yet
        self.adopted = 0  # records of other servers
        self.next_look = 0.0  # when they are looked for again
        self.tasks: set[asyncio.Task[None]] = set()
        self._shown = {id: Shown(1) for id in conversation.nodes}
        self._changed = asyncio.Event()

    @property
    def idle(self) -> bool:
        return not self.watchers and not self.tasks

    @property
    def written_elsewhere(self) -> bool:
        """Whether another server writes an answer."""
        nodes = self.conversation.nodes.values()
        return any(node.status == "running" and node.id not in self.running for node in nodes)

    async def adopt(self, there: Conversation, writer: str) -> None:
        """Take what other servers have stored. A message that this `writer` began last is newer here."""
        mine = self.conversation
        changed: dict[str, MessageNode] = {}
        for id, node in there.nodes.items():
            known = mine.nodes.get(id)
            if known is None or (known != node and (known.turn, known.writer) != (node.turn, writer)):
                changed[id] = node
        blocks = [await asyncio.to_thread(blocks_of, node) for node in changed.values()]
        nodes = mine.nodes | changed
        mine.nodes = {id: nodes[id] for id in dict.fromkeys((*there.nodes, *nodes))}
        if there.generation != mine.generation:
            mine.title, mine.settings, mine.updated = there.title, there.settings, there.updated
            mine.generation = there.generation
            self.adopted += 1
            self.touch()
        for node, shown in zip(changed.values(), blocks):
            self.grew(node, shown)

    def touch(self, *nodes: MessageNode) -> None:
        """Tell those who watch that the conversation, and these messages in it, changed."""
        self.version += 1
        for node in nodes:
            self._shown.setdefault(node.id, Shown()).version = self.version
        self._changed.set()
        self._changed = asyncio.Event()

    def grew(self, node: MessageNode, blocks: list[str], first: int = 0) -> None:
        """An answer has these blocks now, other ones than before from `first` on."""
        self.touch(node)
        shown = self._shown[node.id]
        shown.blocks = blocks
        shown.changed[first:] = [self.version] * (len(blocks) - first)

    async def wait(self, seen: int, seconds: float) -> bool:
        """Wait for a change after version `seen`; False if none came in time."""
        if self.version == seen and not self.deleted:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
        return self.version != seen or self.deleted

    def reading(self) -> list[MessageNode]:
        """Answers whose prompt is still being read."""
        nodes, progress = self.conversation.nodes, {id: request.progress for id, request in self.running.items()}
        return [nodes[id] for id, (read, total) in progress.items() if read < total and id in nodes]

    async def render(self) -> None:
        """Render what was not yet. Off the loop: an old conversation is long."""
        for id, shown in list(self._shown.items()):
            node = self.conversation.nodes[id]
            if shown.blocks is None and node.status != "running":
                blocks = await asyncio.to_thread(blocks_of, node)
                if shown.blocks is None:
                    shown.show(blocks)

    def since(self, seen: int) -> dict[str, Any]:
        """Changes since version `seen`, for a page that has that version."""
        told = self.conversation
        nodes = [self._told(node, seen) for node in told.nodes.values() if self._shown[node.id].version > seen]
        head = {"version": self.version, "title": told.title, "settings": told.settings, "adopted": self.adopted}
        return {**head, "nodes": nodes}

    def _told(self, node: MessageNode, seen: int) -> dict[str, Any]:
        shown = self._shown[node.id]
        if shown.blocks is None and node.status != "running":
            shown.show(blocks_of(node))
        blocks = shown.blocks or []
        whole: dict[str, Any] = {} if node.status == "running" else {"text": node.text}
        if (request := self.running.get(node.id)) is not None:
            whole["progress"] = request.progress
        return {
            "id": node.id,
            "parent": node.parent,
            "role": node.role,
            "pictures": node.pictures,
            "sounds": node.sounds,
            "status": node.status,
            "error": node.error or (UNSAVED if node.id in self.unsaved else ""),
            "reasoning": node.reasoning,
            "tokens": len(node.logprobs),
            "usage": node.usage,
            "blocks": [[at, html] for at, html in enumerate(blocks) if shown.changed[at] > seen],
            "count": len(blocks),
            **whole,
        }
