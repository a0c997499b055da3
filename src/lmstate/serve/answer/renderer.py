"""Conversations in a model's own chat template, and the tokens that they become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from lmstate.errors import ModelError, StateError
from lmstate.serve.answer.message_forms import forms, is_written, left_out
from lmstate.serve.answer.messages import Call, Chat, Message, Prompt, loads
from lmstate.serve.answer.pictures import Fetch, PictureOpener, Pictures
from lmstate.serve.answer.reasoning import reasoning_of
from lmstate.serve.tools import HERMES, Tool, ToolFormat, format_of
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.picture_sources import picture_bytes
from lmstate.serve.wire.tenants import caller
from lmstate.text.control_tokens import ControlTokens
from lmstate.text.replay import RendersChats, Replay, chain
from lmstate.text.tokenizer import Tokenizer
from lmstate.vision.reader import PicturePrompt

TOOL_PROMPT = """\
You may call functions. These are they, as JSON:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON between tags, and nothing after them:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


class Renderer:
    """Renders conversations with a model's own template, whatever roles and tools it knows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        replay: Replay,
        open_pictures: PictureOpener | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        """`open_pictures`: gives the model's reader of pictures; `hosts`: those that pictures may come from."""
        template = tokenizer.template_for(tools=True)
        self.replay = replay
        self.format: ToolFormat = format_of(template) or HERMES
        self.reasoning = reasoning_of(tokenizer.template_source) or reasoning_of(template)
        self._tokenizer = tokenizer
        self._writer: RendersChats = tokenizer  # what writes conversations, with their pictures if they have some
        self._pictures: Pictures | None = None
        self._open_pictures, self._fetch = open_pictures, partial(picture_bytes, hosts=hosts)
        self._knows_tools = template is not None and "tools" in template

    def prompt(self, chat: Chat, tokens: list[int] | None = None) -> Prompt:
        """Render a conversation. Raises `ApiError` for one that the template refuses, or whose pictures are not read.

        `tokens`: those of the prompt, where they are known already.
        """
        return self.seeing(chat)._prompt(chat, tokens)

    def seeing(self, chat: Chat, fetch: Fetch | None = None) -> Renderer:
        """One that renders this conversation with its pictures, if it has some. `fetch`: reads them in another way."""
        urls = [url for message in chat.messages for url in message.pictures]
        if not urls or self._pictures is not None:
            return self
        if self._open_pictures is None:
            raise ApiError("this model reads text only", param="messages")
        contents = (message.content for message in chat.messages)
        seeing = copy(self)
        seeing._pictures = Pictures(urls, contents, self._open_pictures, fetch or self._fetch)
        seeing._writer = seeing._pictures.texts
        return seeing

    def _prompt(self, chat: Chat, tokens: list[int] | None) -> Prompt:
        links = chain(caller().salt().encode() + chat.key(), [message.canonical() for message in chat.messages])
        chat, control = self._hidden(chat)
        text = self._text(chat, chat.messages)
        if tokens is None and not chat.continued:
            tokens = self._replayed(chat, text, links, control)
        if tokens is None:
            tokens = self._encode(text, control)
        try:
            pictured = self.pictured(tokens)
        except StateError:  # in an earlier answer the model sampled the mark of a picture: its text has none
            pictured = self.pictured(self._encode(text, control))
        return Prompt(pictured, control.show(text), links[-1], chat.continued)

    def pictured(self, tokens: list[int]) -> PicturePrompt:
        """The tokens of the conversation that it sees, with the pictures of it.

        Raises `StateError` where they have other places than the pictures take.
        """
        return PicturePrompt(tokens) if self._pictures is None else self._pictures.texts.prompt(tokens)

    def _hidden(self, chat: Chat) -> tuple[Chat, ControlTokens]:
        """The conversation with control tokens in its texts hidden from the template and the tokenizer."""
        control = self._writer.control_tokens()
        if chat.control_tokens:
            return chat, control
        messages = tuple(_hidden(message, control) for message in chat.messages)
        tools = tuple(Tool(**control.hide(vars(tool))) for tool in chat.tools)
        return replace(chat, messages=messages, tools=tools), control

    def _replayed(self, chat: Chat, text: str, links: list[bytes], control: ControlTokens) -> list[int] | None:
        """The prompt with the tokens that the model sampled, for the last answer in it that was given here."""
        for index in reversed(range(len(chat.messages) - 1)):
            if chat.messages[index].role == "assistant" and (known := self.replay.get(links[index])):
                try:
                    before = self._text(chat, chat.messages[: index + 1], generation=False)
                except ApiError:  # a template may refuse calls without their results
                    return None
                return self._resume(list(known.tokens), known.end, before, text, control)
        return None

    def _resume(
        self, tokens: list[int], end: int | None, before: str, text: str, control: ControlTokens
    ) -> list[int] | None:
        """`tokens`, which the template writes as `before`, and what `text` has after that; None if it does not fit.

        `end` is the token that ended them, which the template may follow with more (a line break).
        """
        if not text.startswith(before):
            return None
        ends = sorted(self._tokenizer.eos_ids) if end is None else [end]
        marks = [self._tokenizer.decode([id], skip_special_tokens=False) for id in ends]
        at, mark = max(((before.rfind(mark), mark) for mark in marks if mark), default=(-1, ""))
        if at < 0:
            return None
        rest = text[at + len(mark) :] if end is not None else text[at:]
        return [*tokens, *([] if end is None else [end]), *self._encode(rest, control)]

    def after(self, chat: Chat, answered: int, tokens: list[int], end: int | None) -> list[int] | None:
        """The tokens of `chat` whose first `answered` messages are exactly `tokens`."""
        seeing = self.seeing(chat)
        chat, control = seeing._hidden(chat)
        before = seeing._text(chat, chat.messages[:answered], generation=False)
        return seeing._resume(tokens, end, before, seeing._text(chat, chat.messages), control)

    def template_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages in the form that the template takes by itself, with nothing tried and nothing merged."""
        shown = messages if self._knows_tools else self._told(messages, ())
        ways = [[self._template_message(message, as_text) for message in shown] for as_text in (False, True)]
        for given in ways:
            try:
                self._tokenizer.chat_text(given)
            except ModelError:
                continue
            return given
        return ways[0]

    def _encode(self, text: str, control: ControlTokens) -> list[int]:
        try:
            return self._writer.encode_rendered(text, control)
        except ValueError as error:
            raise ApiError(str(error), param="messages") from None

    def _text(self, chat: Chat, messages: Sequence[Message], generation: bool = True) -> str:
        """A conversation in the first form in which the template writes all of it. Raises `ApiError` if there is none.

        Templates disagree on arguments as text or as an object. Some refuse a second system message, any system
        message, two messages of one role in a row or two calls in one. Some leave out a late system message, the calls
        of earlier answers, or the text beside a call.
        """
        last = messages[-1] if generation and chat.continued else None
        begun = generation and (chat.generation or chat.continued)
        given = messages[:-1] if last is not None else messages
        tools: list[Any] | None = [tool.described() for tool in chat.tools] or None
        variables = dict(chat.variables)
        if chat.thinking is not None:
            variables |= {"enable_thinking": chat.thinking, "thinking": chat.thinking}
        shown: list[Sequence[Message]] = [given, self._with_calls_as_text(given), self._told(given, ())]
        if not self._knows_tools:
            shown, tools = [self._told(given, chat.tools)], None
        variables["tools"] = tools
        refused: ModelError | None = None
        lost = ""
        for way in shown if any(message.calls for message in given) else shown[:1]:
            for form in forms(way):
                for as_text in (False, True):
                    written = [self._template_message(message, as_text) for message in form]
                    try:
                        text = self._writer.chat_text(written, add_generation_prompt=begun, **variables)
                    except ModelError as error:
                        refused = refused or error
                        continue
                    missing = left_out(text, given)
                    if missing is None:
                        return text if last is None else self._continued(text, written, last, variables)
                    lost = lost or missing
        if lost:
            raise ApiError(
                f"the model's chat template leaves out {lost}, in every form that it takes: send it in another message",
                param="messages",
            )
        raise ApiError(str(refused), param="messages")

    def _continued(self, text: str, written: list[dict[str, Any]], last: Message, variables: dict[str, Any]) -> str:
        """A conversation whose last answer goes on after its reasoning. Raises `ApiError` if that has no place."""
        if not last.reasoning:
            return text + last.content
        with suppress(ModelError):
            messages = [*written, self._template_message(last, False)]
            whole = self._writer.chat_text(messages, add_generation_prompt=False, **variables)
            at = whole.rfind(last.content.strip())
            if last.content.strip() and is_written(whole[:at], last.reasoning):
                return whole[:at] + last.content.lstrip()
        if self.reasoning is None:
            raise ApiError(
                "the model's chat template has no place for the reasoning of the answer that is to be continued",
                param="messages",
            )
        opened = text if text.rstrip().endswith(self.reasoning.start) else f"{text}{self.reasoning.start}\n"
        closed = f"\n{self.reasoning.end}\n\n{last.content}" if last.content else ""
        return opened + last.reasoning + closed

    def _template_message(self, message: Message, arguments_as_text: bool) -> dict[str, Any]:
        pictures = self._pictures
        content = message.content if pictures is None else pictures.parts(message.content)
        given: dict[str, Any] = {"role": message.role, "content": content}
        if message.reasoning:
            given |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
        if message.name:
            given["name"] = message.name
        if message.call_id is not None:
            given["tool_call_id"] = self.format.call_id(message.call_id)
        if message.calls:
            given["tool_calls"] = [
                {
                    "id": self.format.call_id(call.id),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if arguments_as_text else loads(call.arguments),
                    },
                }
                for call in message.calls
            ]
        return given

    def _with_calls_as_text(self, messages: Sequence[Message]) -> list[Message]:
        """The same conversation with the calls of earlier answers as text after them."""
        shown = []
        for message in messages:
            if message.calls:
                written = self.format.written([(call.name, call.arguments) for call in message.calls])
                message = Message("assistant", f"{message.content}\n{written}".strip(), message.reasoning)
            shown.append(message)
        return shown

    def _told(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The same conversation for a template that knows no tools: they are described in the system message."""
        told = [
            Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
            if message.role == "tool"
            else message
            for message in self._with_calls_as_text(messages)
        ]
        if not tools:
            return told
        lines = "\n".join(json.dumps(tool.described(), ensure_ascii=False) for tool in tools)
        return [Message("system", TOOL_PROMPT.format(tools=lines)), *told]


def _hidden(message: Message, control: ControlTokens) -> Message:
    """The message with control tokens in its texts hidden."""
    hidden = ("content", "reasoning", "call_id", "name")
    texts = {key: control.hide(value) for key, value in vars(message).items() if key in hidden}
    return replace(message, **texts, calls=tuple(_hidden_call(call, control) for call in message.calls))


def _hidden_call(call: Call, control: ControlTokens) -> Call:
    """The call with control tokens hidden, also those that its JSON writes with escapes."""
    values = loads(call.arguments)
    hidden = control.hide(values)
    arguments = call.arguments if hidden == values else json.dumps(hidden, ensure_ascii=False)
    if values == call.arguments:  # no JSON
        arguments = hidden
    return Call(control.hide(call.id), control.hide(call.name), arguments)
