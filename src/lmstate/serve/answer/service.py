"""The server's one engine, and the way of a request into it that all protocols share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from time import time
from typing import TYPE_CHECKING, Any

from starlette.types import Receive

from lmstate.engine.results import EngineError
from lmstate.errors import StateError
from lmstate.generation.params import SamplingParams
from lmstate.generation.row import CONTEXT
from lmstate.serve.answer.answers import Answer, AnswerMaker
from lmstate.serve.answer.grammar import Grammars
from lmstate.serve.answer.messages import Call, Chat, Message, Prompt
from lmstate.serve.answer.renderer import Renderer
from lmstate.serve.settings import Settings
from lmstate.serve.tools import Event, Tool
from lmstate.serve.wire.access_log import submitted
from lmstate.serve.wire.errors import ApiError, as_api_error
from lmstate.serve.wire.metrics import Metrics
from lmstate.serve.wire.sse import Disconnected, unless_gone
from lmstate.serve.wire.tenants import caller, current_sender
from lmstate.text.grammars.constraint import Constraint
from lmstate.text.replay import Replay, Sampled, link

if TYPE_CHECKING:
    from lmstate.engine import Completion, Piece, Request, Session
    from lmstate.engine.serving import ServingEngine

log = logging.getLogger("lmstate.serve")

BEGINNING = 16  # characters for each token of the context: four times as many as texts need


@dataclass(frozen=True)
class ToolUse:
    """Tools of a request and the tool choice: auto, none, required or the name of a tool.

    The template is shown all `tools` whatever the choice, so that a change of it costs no prefix. `only`: the names of
    those that the choice is among.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    named: bool = False
    parallel: bool = True
    only: frozenset[str] | None = None

    @property
    def allowed(self) -> tuple[Tool, ...]:
        """Tools that a call may name."""
        if self.named:
            return tuple(tool for tool in self.tools if tool.name == self.choice)
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.only is None or tool.name in self.only)

    @property
    def custom(self) -> frozenset[str]:
        """The names of tools whose input is a text."""
        return frozenset(tool.name for tool in self.tools if tool.custom)

    @property
    def required(self) -> bool:
        return bool(self.allowed) and (self.named or self.choice == "required")


@dataclass
class ChatTask:
    """A conversation that is being answered."""

    prompt: Prompt
    request: Request
    answers: list[Answer]
    receive: Receive
    completion: Completion | None = None
    created: int = field(default_factory=lambda: int(time()))

    async def events(self) -> AsyncIterator[tuple[Answer, Piece, list[Event]]]:
        """Each piece with its answer and the events that it brings. Closing it cancels the request."""
        try:
            async for piece in self.request:
                answer = self.answers[piece.index]
                yield answer, piece, answer.push(piece)
                if answer.cut and all(answer.cut for answer in self.answers):
                    self.request.cancel()
            self.completion = await self.request.wait()
        finally:
            self.request.cancel()

    async def finished(self) -> Completion:
        """Wait for all of it. Raises `Disconnected` when the client leaves first."""

        async def drain() -> None:
            async for _ in self.events():
                pass

        await unless_gone(self.receive, drain())
        assert self.completion is not None
        return self.completion

    def progress(self) -> str:
        """Progress of the prompt, as a comment line, which clients skip."""
        computed, total = self.request.progress
        return f"prompt {computed}/{total}" if computed < total else "ping"


class Service:
    """The engine with all that the routes need beside it."""

    def __init__(self, engine: ServingEngine, settings: Settings) -> None:
        self.engine = engine
        self.model = engine.model
        self.tokenizer = engine.model.tokenizer
        self.settings = settings
        self.vocab_size = engine.model.config.vocab_size
        self.grammars = Grammars(self.tokenizer, self.vocab_size)
        self.renderer = Renderer(self.tokenizer, Replay(), self.model.pictures, settings.picture_hosts)
        self.metrics = Metrics(engine, settings.model_name)
        self.created = int(time())
        self.running: set[Request] = set()
        self.draining = False

    @property
    def context(self) -> int | None:
        """Tokens that a sequence may have: what the model was made for, or was loaded for."""
        return self.model.context_size

    @property
    def sees(self) -> bool:
        """Whether messages may have pictures."""
        return self.engine.chats and self.model.sees

    @property
    def takes_sounds(self) -> bool:
        """Whether messages may have sounds."""
        return self.engine.chats and self.model.takes_sounds

    def submit(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        max_new_tokens: int | None,
        priority: int = 0,
        session: Session | None = None,
        length: int | None = None,
        idempotency_key: str | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """Queue a request of the caller, its length cut to the context. Raises `ApiError`.

        `prompt` is token ids, a `PicturePrompt`, or what a `session` goes on with; then `length` is how many tokens it
        comes to, and `idempotency_key` names the turn. Its prefixes are shared with the caller's others of the same
        `cache_salt`.
        """
        if self.draining:
            raise ApiError("the server is shutting down", 503, code="shutting_down", retry_after=5)
        if not prompt:
            raise ApiError("the prompt has no tokens: there is nothing to continue", param="prompt")
        room = self.room(len(prompt) if length is None else length)
        least = params.min_tokens
        if max_new_tokens is None:
            max_new_tokens = max(self.settings.max_new_tokens, least)
        elif max_new_tokens < least:
            raise ApiError(f"min_tokens is {least}, the answer has at most {max_new_tokens}", param="min_tokens")
        wanted = min(max_new_tokens, room)
        try:
            request = self.engine.submit(
                prompt,
                params=replace(params, max_new_tokens=wanted, min_tokens=min(least, wanted)),
                priority=min(priority, self.settings.max_priority),
                deadline=self.settings.request_timeout,
                session=session,
                idempotency_key=idempotency_key,
                salt=caller().salt(cache_salt) if session is None else "",
                sender=current_sender.get(),
            )
        except (StateError, EngineError) as error:
            raise as_api_error(error) from None
        except ValueError as error:
            raise ApiError(str(error)) from None
        request.max_unread = self.settings.max_unread
        self.running.add(request)
        if (made := submitted.get()) is not None:
            made.append(request)
        context = copy_context()  # what is logged at the end is told of this HTTP request
        request.when_done(lambda request: context.run(self._done, request))
        return request

    def refuse_long(self, text: str) -> None:
        """Raise `ApiError` for a text whose beginning alone is far too long: to tokenize all of it takes seconds a
        megabyte, and a hundred bytes of memory a token."""
        if self.context is None or len(text) <= 2 * (most := BEGINNING * self.context):
            return
        count = len(self.tokenizer.encode(text[:most], add_special_tokens=False))
        if count > 2 * self.context:
            self.room(count, f", in the first {most} of its {len(text)} characters alone")

    def refuse_long_chat(self, chat: Chat) -> None:
        """The same of a conversation, by the texts of its messages, before it is rendered."""
        self.refuse_long("".join(message.content for message in chat.messages))

    def beginning(self, text: str) -> str:
        """As much of a text that is cut to the context as tokens of it can come from."""
        return text if self.context is None else text[: 2 * BEGINNING * self.context]

    def room(self, length: int, counted: str = "") -> int:
        """Tokens that an answer to a prompt of this length may have. Raises `ApiError` if there is no room.

        `counted`: the number of tokens at each place of the prompt, if it was not read as a whole.
        """
        if self.context is None:
            return 2**31
        if length >= self.context:
            raise ApiError(
                # Clients tell an overflow, which they make room after, by words: Anthropic's, and OpenAI's.
                f"prompt is too long: {length} tokens > {self.context} maximum{counted}. This model's maximum context "
                f"length is {self.context} tokens: shorten the prompt",
                code="context_length_exceeded",
            )
        return self.context - length

    def _done(self, request: Request) -> None:
        try:
            self.metrics.observe(request.result(0))
        except Exception as error:
            self.metrics.failed()
            if not isinstance(error, StateError | EngineError):
                log.error("a request failed", exc_info=error)
        finally:
            self.running.discard(request)

    async def chat(
        self,
        receive: Receive,
        chat: Chat,
        params: SamplingParams,
        *,
        use: ToolUse,
        max_new_tokens: int | None,
        priority: int = 0,
        constraint: Constraint | None = None,
        call_prefix: str = "call_",
        tokens: list[int] | None = None,
        cache_salt: str | None = None,
    ) -> ChatTask:
        """Begin to answer a conversation. `tokens` stand for its rendered prompt where they are known already."""
        if use.required:
            params = replace(params, stop=())  # there is no text for it to end, and arguments are to be whole

        def prepare() -> tuple[Prompt, tuple[str, str] | None, AnswerMaker]:
            if tokens is None:
                self.refuse_long_chat(chat)
            prompt = self.renderer.prompt(chat, tokens)
            written = self._grammar(prompt, use, constraint)
            return prompt, written, self.maker(prompt, use, params, call_prefix)

        # Rendering, tokenizing and compiling take milliseconds for long texts: not on the loop that feeds all streams.
        prompt, written, maker = await asyncio.to_thread(prepare)
        grammar = None
        if written is not None:
            grammar = await unless_gone(receive, self.grammars.compile_checked(*written, use.allowed))
        if self.settings.log_prompts:
            log.info("prompt: %s", prompt.text)
        request = self.submit(
            prompt.pictured,
            replace(params, grammar=grammar),
            max_new_tokens=max_new_tokens,
            priority=priority,
            cache_salt=cache_salt,
        )
        return ChatTask(prompt, request, maker.answers(params.n), receive)

    def maker(
        self,
        prompt: Prompt,
        use: ToolUse,
        params: SamplingParams | None = None,
        call_prefix: str = "call_",
    ) -> AnswerMaker:
        """A parser that makes text, reasoning and tool calls of the tokens that follow a prompt."""
        format, reasoning = self.renderer.format, self.renderer.reasoning
        markers = format.markers

        def parse(reader: Any) -> Any:
            from lmstate.serve.tools.base import plain_text

            # Without tools, text that looks like a call is text; channels are not calls.
            tools = use.allowed
            return format.parse(reader, tools) if tools or format.channels else plain_text(reader)

        whole: Any = parse
        if reasoning is not None:
            whole = reasoning.parse(parse, reasoning.opened_by(prompt.text))
            markers = (*markers, reasoning.token or reasoning.start, reasoning.end)
        before = tuple(prompt.tokens[-CONTEXT:]) if prompt.continued else ()
        single = not use.parallel
        params = params or SamplingParams()
        return AnswerMaker(
            self.tokenizer,
            whole,
            markers,
            params.stops,
            call_prefix,
            single,
            use.required,
            params.min_tokens,
            before,
            params.include_stop_str_in_output,
        )

    def _grammar(self, prompt: Prompt, use: ToolUse, constraint: Constraint | None) -> tuple[str, str] | None:
        """(the grammar of the whole answer, reasoning included, the field that asks for it); None if anything goes."""
        grammars, format, tools = self.grammars, self.renderer.format, use.allowed
        lark, param = (None, "tools") if constraint is None else (constraint.lark, constraint.param)
        if use.required:
            lark = grammars.calls(format, tools, required=True, parallel=use.parallel)
            param = "tools"
        elif lark is not None:
            lark = f"start: {format.head(grammars.literal)} answered\n" + lark.replace("start:", "answered:", 1)
            if tools:
                called = grammars.calls(format, tools, required=True, parallel=use.parallel) or ""
                lark = lark.replace("\n", " | called\n", 1) + "\n" + called.replace("start:", "called:", 1)
        elif use.tools and not tools:
            lark = grammars.no_calls(format, use.tools)
        elif tools != use.tools or any(tool.strict for tool in tools):
            lark = grammars.calls(format, tools, required=False, parallel=use.parallel)
        if lark is None:
            return None
        lark = format.framed(lark, grammars.literal)
        reasoning = self.renderer.reasoning
        if reasoning is not None and not reasoning.closed_by(prompt.text):
            lark = grammars.with_reasoning(lark, reasoning, reasoning.opened_by(prompt.text))
        return lark, param

    def remember(self, task: ChatTask, answer: Answer, message: Message) -> Sampled | None:
        """Keep an answer's tokens, for when a client sends `message` back, in whatever words.

        Not those of an answer that was cut, or that a stop string ended: their tokens go on past the text that was
        sent.
        """
        assert task.completion is not None
        by = task.completion.stopped_by[answer.index]
        if answer.cut or isinstance(by, str):
            return None
        ended = by if task.completion.finished[answer.index] == "eos" and isinstance(by, int) else None
        sampled = Sampled([*task.prompt.tokens, *answer.tokens], ended)
        self.renderer.replay.put(link(task.prompt.chain, message.canonical()), sampled)
        if message.reasoning:  # which many clients leave out
            self.renderer.replay.put(link(task.prompt.chain, replace(message, reasoning="").canonical()), sampled)
        return sampled

    def remember_answers(self, task: ChatTask) -> None:
        """Keep what was sampled, for when a client sends the answers back as the messages that they are."""
        for answer in task.answers:
            calls = tuple(Call(call.id, call.name, call.arguments) for call in answer.calls)
            self.remember(task, answer, Message("assistant", answer.text, answer.reasoning, calls))

    def drain(self) -> None:
        """Refuse new requests."""
        self.draining = True

    def cancel_all(self) -> None:
        for request in list(self.running):
            request.cancel()


__all__ = ["ChatTask", "Disconnected", "Service", "ToolUse"]
