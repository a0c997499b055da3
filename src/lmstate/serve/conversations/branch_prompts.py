"""Branches of a conversation as what the engine takes: tokens as they were sampled, with their pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lmstate.engine.session_record import Moment, Record
from lmstate.errors import StateError
from lmstate.serve.answer.messages import Chat
from lmstate.serve.answer.service import Service
from lmstate.serve.conversations.store import ConversationStore
from lmstate.serve.conversations.tree import Conversation, MessageNode
from lmstate.serve.wire.errors import ApiError
from lmstate.vision.reader import PicturePrompt, file_part


@dataclass(frozen=True)
class PromptPlan:
    """The prompt of an answer, whose first `base` tokens are those of the answer before it."""

    base: int
    prompt: PicturePrompt


class BranchPrompts:
    """Prompts and records of branches. For any thread: they read the store, and the vision tower runs."""

    def __init__(self, service: Service, store: ConversationStore) -> None:
        self._service, self._store = service, store

    def plan(self, conversation: Conversation, user: MessageNode, system: str, new: Mapping[str, bytes]) -> PromptPlan:
        """The prompt of a message: the tokens of the conversation as they were sampled, then what is new."""
        before = conversation.answer_before(user)
        known = conversation.tokens(before)
        self._service.refuse_long(user.text)
        if not self._service.engine.chats:
            if conversation.pictures(user):
                raise ApiError("this model has no chat template, and takes no pictures", param="pictures")
            added = self._service.tokenizer.encode(user.text, add_special_tokens=not known)
            return PromptPlan(len(known), PicturePrompt([*known, *added]))
        chat = Chat(conversation.messages(user, system))
        renderer = self._service.renderer.seeing(chat, self._fetch(conversation, new))
        tokens = None
        if before is not None and known and before.system == system:
            tokens = renderer.after(chat, len(chat.messages) - 1, known, before.end)
        if tokens is not None and tokens[: len(known)] == known:
            with suppress(StateError):  # the model sampled the mark of a picture
                return PromptPlan(len(known), renderer.pictured(tokens))
        return PromptPlan(0, renderer.prompt(chat).pictured)

    def prompt(self, conversation: Conversation, answer: MessageNode) -> PicturePrompt:
        """All tokens up to the end of an answer, with their pictures. Raises `ApiError` for one that is lost."""
        tokens = conversation.tokens(answer)
        asked = tokens[: answer.start]
        if not asked:
            return PicturePrompt(tokens)
        chat = Chat(conversation.messages(answer, ""))
        renderer = self._service.renderer.seeing(chat, self._fetch(conversation, {}))
        return replace(renderer.pictured(asked), tokens=tokens)

    def picture(self, conversation: Conversation, name: str) -> bytes:
        """The file of a picture. Raises `ApiError` for one that is lost."""
        if (content := self._store.picture(conversation.id, name)) is None:
            raise ApiError(
                "a picture of this conversation is no longer in the store: edit its message, or go on from an answer "
                "above it",
                409,
                code="picture_lost",
            )
        return content

    def _fetch(self, conversation: Conversation, new: Mapping[str, bytes]) -> Callable[[str], bytes]:
        """A reader of the pictures of one branch, which together have at most the bytes that a body may have."""
        most, held = self._service.settings.max_body, 0

        def fetch(name: str) -> bytes:
            nonlocal held
            content = new[name] if name in new else self.picture(conversation, name)
            if (held := held + len(content)) > most:
                raise ApiError(
                    f"the pictures of this branch have {held} bytes and more; together they may have {most}: begin "
                    "another conversation, or send smaller ones",
                    413,
                )
            return content

        return fetch

    def record(self, conversation: Conversation, answer: MessageNode) -> Record:
        """A branch as a session's record, without its pictures. Its messages tell where each answer's tokens are."""
        messages: list[dict[str, Any]] = []
        if answer.system:
            messages.append({"role": "system", "content": answer.system})
        turns, length = [Moment(0, 0)], 0
        for node in conversation.path(answer):
            message: dict[str, Any] = {"role": node.role, "content": node.text}
            if node.role == "assistant":
                whole = node.base == length
                length = node.base + len(node.added)
                message["lmstate"] = {"start": node.start, "stop": length, "end": node.end, "whole": whole}
            messages.append(message)
            if node.role == "assistant":
                turns.append(Moment(length, len(messages)))
        tokens = conversation.tokens(answer)
        turns = [turn for turn in turns[:-1] if turn.tokens <= len(tokens)]
        return Record(tokens, messages, turns)

    def whole_record(self, conversation: Conversation, answer: MessageNode) -> Record:
        """`record` with its pictures, for a file. Raises `ApiError` for one that is lost."""
        record, path = self.record(conversation, answer), conversation.path(answer)
        record.media = list(self.prompt(conversation, answer).media)
        for node, message in zip(path, record.messages[-len(path) :]):
            if node.pictures:
                shown = [file_part(self.picture(conversation, name)) for name in node.pictures]
                message["content"] = [*shown, {"type": "text", "text": node.text}]
        return record
