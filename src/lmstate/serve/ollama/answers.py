"""`POST /api/chat` and `POST /api/generate`: lines of JSON, or one object."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import perf_counter_ns
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve.answer.answers import AnsweredCall, AnswerMaker
from lmstate.serve.answer.handlers import json_response, log
from lmstate.serve.answer.messages import Chat, Message, Prompt
from lmstate.serve.answer.pictures import picture_mark
from lmstate.serve.answer.sampling import check_ids, sampling_params, stops
from lmstate.serve.answer.service import ChatTask, Service, ToolUse
from lmstate.serve.anthropic import as_object
from lmstate.serve.openai import fields
from lmstate.serve.openai.completions import prompt_ids
from lmstate.serve.openai.tools import read_tools
from lmstate.serve.tools import Reasoning, Text
from lmstate.serve.tools.base import plain_text
from lmstate.serve.wire.errors import ApiError, as_api_error
from lmstate.serve.wire.schema.chat import ChatMessage, Content, ContentPart
from lmstate.serve.wire.schema.common import Draws, Sampling
from lmstate.serve.wire.schema.ollama import (
    OllamaAnswered,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
)
from lmstate.serve.wire.sse import EventStream, dumps, unless_gone
from lmstate.text.grammars.constraint import Constraint
from lmstate.text.grammars.lark import json_object
from lmstate.vision.reader import PicturePrompt

NDJSON = {"content-type": "application/x-ndjson"}


@dataclass(frozen=True)
class OllamaAnswer:
    """An answer in Ollama's form: of `chat` a message, of others a text, at the end with its `context` of token ids."""

    service: Service
    task: ChatTask
    model: str
    chat: bool
    logprobs: bool = False
    context: bool = False
    begun: int = field(default_factory=perf_counter_ns)

    def whole(self) -> dict[str, Any]:
        answer = self.task.answers[0]
        told = self._told(answer.text, answer.reasoning, answer.calls)
        if self.logprobs:
            told["logprobs"] = fields.token_logprobs(self.service, answer.logprobs[: answer.certain])
        return {**told, **self._end()}

    async def lines(self) -> AsyncIterator[bytes]:
        """The stream. A call comes whole, when it ends."""
        answer, calls = self.task.answers[0], 0
        try:
            async for _, _, events in self.task.events():
                for event in events:
                    if isinstance(event, Text):
                        told = self._told(event.text)
                        if self.logprobs and event.logprobs:
                            told["logprobs"] = fields.token_logprobs(self.service, event.logprobs)
                        yield _line({**told, "done": False})
                    elif isinstance(event, Reasoning):
                        yield _line({**self._told(thinking=event.text), "done": False})
                ended = len(answer.calls) if answer.finished is not None else len(answer.calls) - 1
                if ended > calls:
                    yield _line({**self._told(calls=answer.calls[calls:ended]), "done": False})
                    calls = ended
            if self.chat:
                self.service.remember_answers(self.task)
            yield _line({**self._told(), **self._end()})
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            yield _line({"error": as_api_error(error).message})

    def _told(self, text: str = "", thinking: str = "", calls: list[AnsweredCall] | None = None) -> dict[str, Any]:
        head: dict[str, Any] = {"model": self.model, "created_at": now()}
        thought = {"thinking": thinking} if thinking else {}
        if not self.chat:
            return {**head, "response": text, **thought}
        message: dict[str, Any] = {"role": "assistant", "content": text, **thought}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": as_object(call.arguments)}}
                for call in calls
            ]
        return {**head, "message": message}

    def _end(self) -> dict[str, Any]:
        completion, answer = self.task.completion, self.task.answers[0]
        assert completion is not None
        usage, nanoseconds = completion.usage, 1_000_000_000
        end = {
            "done": True,
            "done_reason": "stop" if answer.finished in ("eos", "stop") else "length",
            "total_duration": perf_counter_ns() - self.begun,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": int(usage.prefill * nanoseconds),
            "eval_count": usage.generated,
            "eval_duration": int(usage.decode * nanoseconds),
        }
        if not self.context:
            return end
        by = completion.stopped_by[0]
        ended = [by] if answer.finished == "eos" and isinstance(by, int) else []
        return {**end, "context": [*self.task.prompt.tokens, *completion.tokens[0], *ended]}


async def chat(service: Service, request: Request, body: OllamaChatBody) -> ASGIApp:
    if not body.messages:
        return json_response({**_loaded(body), "message": {"role": "assistant", "content": ""}})
    use = ToolUse(read_tools(body.tools or (), wrapped=True))
    thinking, variables = _thinking(body)
    asked = Chat(read_messages(body.messages), use.tools, thinking, variables)
    task = await _answered(service, request, body, asked, use)
    return await _respond(service, body, OllamaAnswer(service, task, body.model, True, bool(body.logprobs)))


async def generate(service: Service, request: Request, body: OllamaGenerateBody) -> ASGIApp:
    pictures = _pictures(body.images)
    if not body.prompt and not pictures:
        return json_response({**_loaded(body), "response": ""})
    prompt = body.prompt or ""
    plain = body.raw or body.suffix or not service.engine.chats
    if plain and pictures:
        raise ApiError("images are given with raw or suffix, and no template has places for them", param="images")
    if plain:
        task = await _continued(service, request, body, prompt_ids(service, prompt, "prompt", body.suffix))
    else:
        thinking, variables = _thinking(body)
        messages = [Message("system", body.system)] if body.system else []
        content = "\n".join((*map(picture_mark, pictures), prompt))
        said = (*messages, Message("user", content, pictures=pictures))
        asked = Chat(said, thinking=thinking, variables=variables)
        task = await _answered(service, request, body, asked, ToolUse(), body.context)
    answer = OllamaAnswer(service, task, body.model, False, bool(body.logprobs), context=not body.raw)
    return await _respond(service, body, answer)


async def _respond(service: Service, body: OllamaAnswered, answer: OllamaAnswer) -> ASGIApp:
    settings, task = service.settings, answer.task
    if body.stream is not False:
        # Ollama's clients read every line as JSON: nothing is sent while they wait.
        return EventStream(
            answer.lines(), lambda: b"", settings.ping_interval, settings.write_timeout, NDJSON, task.request.cancel
        )
    await task.finished()
    if answer.chat:
        service.remember_answers(task)
    return json_response(answer.whole())


async def _answered(
    service: Service,
    request: Request,
    body: OllamaAnswered,
    asked: Chat,
    use: ToolUse,
    context: list[int] | None = None,
) -> ChatTask:
    """Begin to answer a conversation. `context`: token ids of what was said before it, as an answer gave them."""
    tokens = None
    if context:
        service.refuse_long_chat(asked)
        rendered = service.renderer.prompt(asked).tokens
        begin = [] if service.tokenizer.bos_id is None else [service.tokenizer.bos_id]
        new = rendered[len(begin) :] if rendered[: len(begin)] == begin else rendered
        tokens = [*_checked(service, context), *new]
    return await service.chat(
        request.receive,
        asked,
        _params(service, body),
        use=use,
        max_new_tokens=_limit(body.options),
        constraint=_constraint(body),
        tokens=tokens,
    )


async def _continued(service: Service, request: Request, body: OllamaAnswered, tokens: list[int]) -> ChatTask:
    """Begin to go on with a text as it is."""
    params, grammar = _params(service, body), None
    if (constraint := _constraint(body)) is not None:
        checked = service.grammars.compile_checked(constraint.lark, constraint.param)
        grammar = await unless_gone(request.receive, checked)
    made = service.submit(tokens, replace(params, grammar=grammar), max_new_tokens=_limit(body.options))
    maker = AnswerMaker(service.tokenizer, plain_text, (), params.stops, min_tokens=params.min_tokens)
    return ChatTask(Prompt(PicturePrompt(tokens), "", b""), made, maker.answers(1), request.receive)


def _params(service: Service, body: OllamaAnswered) -> Any:
    given = body.options or OllamaOptions()
    draws = {name: getattr(given, name) for name in Draws.__struct_fields__}
    sampling = Sampling(repetition_penalty=given.repeat_penalty, **draws)
    params = sampling_params(sampling, service.vocab_size, service.model.defaults)
    return replace(params, stop=stops(given.stop), logprobs=(body.top_logprobs or 0) if body.logprobs else None)


def _limit(options: OllamaOptions | None) -> int | None:
    most = None if options is None else options.num_predict
    return most if most is not None and most >= 0 else None


def _constraint(body: OllamaAnswered) -> Constraint | None:
    if body.format in (None, ""):
        return None
    return Constraint(json_object(), "format") if body.format == "json" else Constraint.of_schema(body.format, "format")


def _thinking(body: OllamaAnswered) -> tuple[bool | None, dict[str, Any]]:
    """(whether to think, variables of the template): `think` is true, false, or how hard to."""
    if isinstance(body.think, str):
        return True, {"reasoning_effort": body.think}
    return body.think, {}


def read_messages(given: list[OllamaMessage]) -> tuple[Message, ...]:
    """Messages as those of a chat; results of calls without ids are in the order of the calls."""
    return fields.read_messages(
        [
            ChatMessage(
                role=one.role,
                content=_content(one),
                name=one.tool_name,
                tool_calls=one.tool_calls,
                tool_call_id=one.tool_call_id or "",
                reasoning=one.thinking,
            )
            for one in given
        ]
    )


def _content(message: OllamaMessage) -> Content:
    """Its text, after its pictures if it has some."""
    text = message.content or ""
    if not (pictures := _pictures(message.images)):
        return text
    shown = [ContentPart(type="image_url", image_url=url) for url in pictures]
    return [*shown, ContentPart(type="text", text=text)]


def _pictures(images: list[str] | None) -> tuple[str, ...]:
    """The data URLs of pictures in base64. Their files say themselves of what kind they are."""
    return tuple(f"data:image/png;base64,{image}" for image in images or ())


def _checked(service: Service, context: list[int]) -> list[int]:
    return check_ids(context, "context", service.model.config.ids)


def _loaded(body: OllamaAnswered) -> dict[str, Any]:
    return {"model": body.model, "created_at": now(), "done": True, "done_reason": "load"}


def _line(value: dict[str, Any]) -> bytes:
    return dumps(value) + b"\n"


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
