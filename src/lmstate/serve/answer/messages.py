"""Conversations as every protocol hands them over, and the prompt that they become."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lmstate.errors import ModelError, StateError
from lmstate.serve.answer.pictures import Fetch, PictureOpener, Pictures, without_marks
from lmstate.serve.answer.reasoning import reasoning_of
from lmstate.serve.tools import HERMES, Tool, ToolFormat, format_of
from lmstate.serve.wire.body import MAX_DEPTH
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.picture_sources import picture_bytes
from lmstate.serve.wire.tenants import caller
from lmstate.text.control_tokens import ControlTokens
from lmstate.text.nesting import is_deeper
from lmstate.text.replay import THOUGHT, RendersChats, Replay, chain
from lmstate.text.tokenizer import Tokenizer
from lmstate.vision.reader import PicturePrompt

WORD = re.compile(r"\w+")
FEW_WORDS = 200  # of a text that a template writes in another way
# Claude Code begins its system prompt with a line that changes with every request: no prefix would ever be reused.
VOLATILE = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)

TOOL_PROMPT = """\
You may call functions. These are they, as JSON:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON between tags, and nothing after them:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


@dataclass(frozen=True)
class Call:
    """A call in an earlier answer. `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One turn. `role` is system, user, assistant or tool; `pictures` has the URLs of those that `content` marks."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None  # of a tool's answer
    name: str | None = None
    pictures: tuple[str, ...] = ()

    def canonical(self) -> list[Any]:
        """The message without what clients write in other ways when they send it back."""
        calls = [[call.name, _whole_numbers(loads(call.arguments))] for call in self.calls]
        return [
            self.role,
            self.content.strip(),
            self.reasoning.strip(),
            calls,
            self.name if self.role == "tool" else "",
        ]


@dataclass(frozen=True)
class Chat:
    """A conversation to be answered. `thinking` None: the template's way; `continued`: the last answer goes on."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    continued: bool = False
    control_tokens: bool = False  # whether `<|im_end|>` in a message ends a turn, instead of being text
    generation: bool = True  # whether the template begins an answer after the messages

    def key(self) -> bytes:
        """Digest of everything besides the messages that the prompt depends on."""
        tools = [tool.described() for tool in self.tools]
        return json.dumps([tools, self.thinking, self.variables, self.control_tokens], sort_keys=True).encode()


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation, whose last answer goes on if `continued`. `chain` identifies it, for `Replay`."""

    pictured: PicturePrompt
    text: str
    chain: bytes
    continued: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.pictured.tokens


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
        """A conversation whose last answer goes on behind its reasoning. Raises `ApiError` if that has no place."""
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
        """The same conversation with the calls of earlier answers as text behind them."""
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


def left_out(text: str, messages: Sequence[Message]) -> str | None:
    """The first part of the messages that a rendered text does not have, by its path; None if it has all.

    Thoughts of earlier answers do not count: templates leave them out on purpose.
    """
    for index, message in enumerate(messages):
        content = without_marks(message.content)
        content = content.rpartition(THOUGHT)[2] if message.role == "assistant" else content
        if not is_written(text, content):
            return f"messages[{index}].content"
        for number, call in enumerate(message.calls):
            if not all(is_written(text, value) for value in [*_texts(loads(call.arguments))] or [call.name]):
                return f"messages[{index}].tool_calls[{number}].function"
    return None


def is_written(text: str, part: str) -> bool:
    """Whether a text has a part of it: as it stands, escaped as in JSON, or line by line, or by its first words."""

    def has(piece: str) -> bool:
        return piece in text or json.dumps(piece, ensure_ascii=False)[1:-1] in text or json.dumps(piece)[1:-1] in text

    part = part.strip()
    if has(part) or all(has(line.strip()) for line in part.splitlines()):
        return True
    return all(has(word) for word in WORD.findall(part)[:FEW_WORDS])


def _texts(value: Any) -> Iterator[str]:
    """The names and the strings of a JSON value."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, str):
        yield value


def joined(messages: Sequence[Message], leading: bool) -> list[Message]:
    """System messages as one at the beginning: those that lead, or all of them."""
    count = 0
    while count < len(messages) and messages[count].role == "system":
        count += 1
    others = [message for message in messages[count:] if leading or message.role != "system"]
    system = [*messages[:count], *(m for m in messages[count:] if not leading and m.role == "system")]
    text = "\n\n".join(message.content for message in system)
    return [*([Message("system", text)] if system else []), *others]


def alternating(messages: Sequence[Message]) -> list[Message]:
    """Messages of the user, or of the assistant without calls, that follow each other as one."""
    turns: list[Message] = []
    for message in messages:
        if turns and _goes_on(turns[-1], message):
            texts = [[one.content, one.reasoning] for one in (turns[-1], message)]
            content, reasoning = ("\n\n".join(filter(None, both)) for both in zip(*texts, strict=True))
            turns[-1] = replace(turns[-1], content=content, reasoning=reasoning)
        else:
            turns.append(message)
    return turns


def _goes_on(last: Message, message: Message) -> bool:
    return last.role == message.role and message.role in ("user", "assistant") and not (last.calls or message.calls)


def parted(messages: Sequence[Message]) -> list[Message]:
    """Each call in a message of its own, followed by its result; results without an id go in the order of the calls."""
    turns: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.calls) < 2:
            turns.append(message)
            continue
        results = []
        while at < len(messages) and messages[at].role == "tool":
            results.append(messages[at])
            at += 1
        for index, call in enumerate(message.calls):
            turns.append(replace(message, calls=(call,)) if not index else Message("assistant", calls=(call,)))
            own = [one for one in results if one.call_id == call.id] or [one for one in results if not one.call_id][:1]
            turns += own
            results = [one for one in results if not any(one is other for other in own)]
        turns += results
    return turns


def without_system(messages: Sequence[Message]) -> list[Message]:
    """The system message in front of the first message, as a text of the user."""
    return alternating([replace(one, role="user") if one.role == "system" else one for one in messages])


def spoken(messages: Sequence[Message]) -> list[Message]:
    """The text beside calls in a message of its own before them."""
    turns: list[Message] = []
    for message in messages:
        if message.calls and message.content.strip():
            turns.append(replace(message, calls=()))
            message = replace(message, content="", reasoning="")
        turns.append(message)
    return turns


def forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Ways to write the same conversation, the one that changes the least first; each once."""
    given: list[list[Message]] = []
    for calls in (list(messages), parted(messages), spoken(messages), spoken(parted(messages))):
        system = [joined(calls, leading=True), joined(calls, leading=False)]
        for form in (*system, *map(alternating, system), without_system(system[1])):
            if form not in given:
                given.append(form)
                yield form


def _whole_numbers(value: Any) -> Any:
    """A JSON value with 1.0 as 1: languages that have one kind of number write it so."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_numbers(one) for key, one in value.items()}
    return [_whole_numbers(one) for one in value] if isinstance(value, list) else value


def without_volatile(text: str) -> str:
    """A system prompt without lines that change with every request."""
    return VOLATILE.sub("", text)


def loads(text: str) -> Any:
    """The value of a JSON text; the text itself where it is not JSON, or nested deeper than a body may be."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if is_deeper(value, MAX_DEPTH) else value
