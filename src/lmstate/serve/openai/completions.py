"""`POST /v1/completions`: texts or token ids go on; `echo` with `logprobs` scores a prompt, as lm-eval asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive

from lmstate.serve.answer.handlers import json_response, log
from lmstate.serve.answer.sampling import check_ids, sampling_params, stops
from lmstate.serve.answer.service import Service
from lmstate.serve.openai import fields
from lmstate.serve.openai.token_places import TokenPlace, TokenPlaces, name_of
from lmstate.serve.wire.body import wrong
from lmstate.serve.wire.errors import ApiError, as_api_error
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.schema.common import Prompts
from lmstate.serve.wire.schema.completions import CompletionBody
from lmstate.serve.wire.sse import DONE, EventStream, comment, data, unless_gone

if TYPE_CHECKING:
    from lmstate.engine import Completion, Piece, TokenLogprob
    from lmstate.engine import Request as EngineRequest
    from lmstate.generation import SamplingParams

# Fill-in-the-middle tokens: (before the prefix, before the suffix, before the middle).
FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
)


@dataclass
class Listed:
    """The log probabilities of one choice in a stream."""

    places: TokenPlaces
    _count: int = 0
    _waiting: list[TokenLogprob] = field(default_factory=list)

    def fresh(self, piece: Piece) -> list[TokenLogprob]:
        """Those that a piece makes certain: the tokens of a stop string are never listed."""
        self._waiting += piece.logprobs or []
        count = len(self._waiting) if piece.certain is None else piece.certain - self._count
        fresh, self._waiting = self._waiting[:count], self._waiting[count:]
        self._count += len(fresh)
        return fresh


@dataclass
class Texts:
    """The answers to all prompts of a request: choice i of prompt p has index p * n + i."""

    service: Service
    model: str
    prompts: list[list[int]]
    requests: list[EngineRequest]
    n: int
    echo: bool
    logprobs: int | None
    keep: int  # best_of keeps n of more
    wants_ids: bool = False  # of tokens
    stream_usage: fields.StreamUsage | None = None
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=lambda: int(time()))
    _generated: int = field(default=0, init=False)  # tokens so far

    @cached_property
    def head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fields.system_fingerprint(self.service),
        }

    async def whole(self) -> dict[str, Any]:
        completions = [await request.wait() for request in self.requests]
        choices = [
            self._choice(number, completion, index, place)
            for number, completion in enumerate(completions)
            for place, index in enumerate(self._best(completion))
        ]
        return {**self.head, "choices": choices, "usage": usage_of(completions)}

    def _best(self, completion: Completion) -> list[int]:
        """The answers to give, of those that were made: the likeliest a token."""
        indices = list(range(len(completion.texts)))
        if self.keep == len(indices) or completion.logprobs is None:
            return indices[: self.keep]
        scores = [sum(entry.logprob for entry in told) / max(len(told), 1) for told in completion.logprobs]
        return sorted(indices, key=lambda index: -scores[index])[: self.keep]

    def _choice(self, number: int, completion: Completion, index: int, place: int) -> dict[str, Any]:
        prompt = self.prompts[number]
        text, tokens, told = completion.texts[index], completion.tokens[index], None
        said = self.service.tokenizer.decode(prompt) if self.echo else ""
        if self.logprobs is not None:
            certain = completion.certain[index]
            entries: list[TokenLogprob | None] = list((completion.logprobs or [[]] * (index + 1))[index][:certain])
            tokens = tokens[:certain]
            start = len(said) if self.echo else 0
            placed = self._placed(TokenPlaces(self.service.tokenizer, prompt, start), tokens)
            if self.echo:
                placed = [*self._placed(TokenPlaces(self.service.tokenizer), prompt), *placed]
                entries = [*(completion.prompt_logprobs or []), *entries]
            told = self.legacy(placed, entries)
        if self.echo:
            text = said + text
        reason = "stop" if completion.finished[index] in ("eos", "stop") else "length"
        choice = {"index": number * self.keep + place, "text": text, "logprobs": told, "finish_reason": reason}
        ids = {"prompt_token_ids": prompt, "token_ids": completion.tokens[index]}
        return {**choice, **ids} if self.wants_ids else choice

    def _placed(self, places: TokenPlaces, tokens: Sequence[int]) -> list[TokenPlace]:
        return [places.place(token, self.service.grammars.token_bytes(token)) for token in tokens]

    def legacy(self, placed: list[TokenPlace], entries: list[TokenLogprob | None]) -> dict[str, Any]:
        """The log probabilities of completions: parallel lists, the first of a prompt null."""
        return {
            "tokens": [place.name for place in placed],
            "token_logprobs": [None if entry is None else max(entry.logprob, -9999.0) for entry in entries],
            "top_logprobs": [
                None if entry is None else self._top(entry, place.name) for place, entry in zip(placed, entries)
            ],
            "text_offset": [place.offset for place in placed],
        }

    def _top(self, entry: TokenLogprob, name: str) -> dict[str, float]:
        """The best tokens by their text, the chosen one, by its `name`, among them. Of two with one text the better
        counts."""
        top = {name: max(entry.logprob, -9999.0)}
        for token, logprob in entry.top:
            other = name if token == entry.token else name_of(self.service.grammars.token_bytes(token))
            top[other] = max(top.get(other, -9999.0), logprob)
        return top

    async def chunks(self) -> AsyncIterator[bytes]:
        """The stream: pieces of all prompts as they come, then the usage."""
        try:
            echoed: set[int] = set()
            made: dict[int, Listed] = {}
            async with aclosing(pieces_of(self.requests)) as pieces:
                async for number, piece in pieces:
                    index = number * self.n + piece.index
                    self._generated += len(piece.tokens)
                    if self.echo and index not in echoed:
                        echoed.add(index)
                        yield self._chunk(index, self.service.tokenizer.decode(self.prompts[number]), None, None)
                    told = None
                    if self.logprobs is not None:
                        listed = made.get(index)
                        if listed is None:
                            prompt = self.prompts[number]
                            listed = made[index] = Listed(TokenPlaces(self.service.tokenizer, prompt))
                        if entries := listed.fresh(piece):
                            told = self.legacy(
                                self._placed(listed.places, [one.token for one in entries]), list(entries)
                            )
                    reason = None
                    if piece.finished is not None:
                        reason = "stop" if piece.finished in ("eos", "stop") else "length"
                    if piece.text or told or reason or self.wants_ids:
                        yield self._chunk(index, piece.text, told, reason, piece.tokens)
            if self.stream_usage is not None:
                completions = [await request.wait() for request in self.requests]
                yield data({**self.head, "choices": [], "usage": usage_of(completions)})
            yield DONE
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            yield data(as_api_error(error).openai())
        finally:
            self.cancel()

    def _chunk(
        self, index: int, text: str, told: dict[str, Any] | None, reason: str | None, tokens: Sequence[int] = ()
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": told, "finish_reason": reason}
        if self.wants_ids:
            choice["token_ids"] = list(tokens)
        chunk = {**self.head, "choices": [choice]}
        if self.stream_usage is not None:
            chunk |= self.stream_usage.shown(sum(map(len, self.prompts)), self._generated)
        return data(chunk)

    def cancel(self) -> None:
        for request in self.requests:
            request.cancel()

    def progress(self) -> bytes:
        computed, total = (sum(both) for both in zip(*(request.progress for request in self.requests)))
        return comment(f"prompt {computed}/{total}" if computed < total else "ping")


async def pieces_of(requests: Sequence[EngineRequest]) -> AsyncGenerator[tuple[int, Piece]]:
    """(number of the request, piece) of requests that are answered at a time. Raises the first error of one."""
    if len(requests) == 1:  # no task and no queue are woken for each token
        async for piece in requests[0]:
            yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(1)  # pieces that the client has no room for stay unread

    async def feed(number: int, request: EngineRequest) -> None:
        try:
            async for piece in request:
                await queue.put((number, piece))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.create_task(feed(number, request)) for number, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            number, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                running -= 1
            else:
                yield number, piece
    finally:
        for task in tasks:
            task.cancel()


async def completions(service: Service, request: Request, body: CompletionBody) -> ASGIApp:
    prompts = await asyncio.to_thread(read_prompts, service, body)
    n, echo, logprobs = body.n or 1, bool(body.echo), body.logprobs
    best_of = body.best_of or n
    if best_of < n:
        raise wrong("best_of", f"at least n, {n}", best_of)
    if body.stream and best_of > n:
        raise ApiError("best_of cannot be streamed: it is known at the end only", param="best_of")
    if body.stream and echo and logprobs is not None:
        raise ApiError("echo with logprobs cannot be streamed: ask without stream", param="stream")
    params = replace(
        sampling_params(body, service.vocab_size, service.model.defaults),
        stop=stops(body.stop),
        n=best_of,
        logprobs=0 if best_of > n and logprobs is None else logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    constraint = fields.read_constraint(body, body.response_format)
    longest = 16 if body.max_tokens is None else body.max_tokens
    requests: list[EngineRequest] = []
    texts = Texts(
        service,
        body.model or service.settings.model_name,
        prompts,
        requests,
        n,
        echo,
        logprobs,
        n,
        bool(body.return_token_ids),
        fields.StreamUsage.of(body),
    )
    try:
        for prompt in prompts:
            grammar = None
            if constraint is not None:
                grammar = await unless_gone(
                    request.receive, service.grammars.compile_checked(constraint.lark, constraint.param)
                )
            asked = replace(params, grammar=grammar)
            await queued(
                service,
                request.receive,
                requests,
                prompt,
                asked,
                longest,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
            )
        if body.stream:
            settings = service.settings
            return EventStream(
                texts.chunks(),
                texts.progress,
                settings.ping_interval,
                settings.write_timeout,
                {},
                closed=texts.cancel,
            )
        return json_response(await unless_gone(request.receive, texts.whole()))
    except BaseException:
        texts.cancel()
        raise


async def queued(
    service: Service,
    receive: Receive,
    requests: list[EngineRequest],
    prompt: list[int],
    params: SamplingParams,
    max_new_tokens: int,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
) -> None:
    """Submit one more of many requests: where more than may wait at a time are, after one of the others has ended."""
    while True:
        try:
            made = service.submit(
                prompt, params, max_new_tokens=max_new_tokens, priority=priority, cache_salt=cache_salt
            )
            requests.append(made)
            return
        except ApiError as error:
            earlier = next((one for one in requests if not one.done), None)
            if error.code != "queue_full" or earlier is None:
                raise
            await unless_gone(receive, earlier.wait())


def read_prompts(service: Service, body: CompletionBody) -> list[list[int]]:
    """`prompt`: a text, a list of texts, token ids, or a list of lists of ids. With `suffix`, to be filled in."""
    prompts = as_list(service, body.prompt, "prompt")
    return [prompt_ids(service, prompt, f"prompt[{i}]", body.suffix) for i, prompt in enumerate(prompts)]


def as_list(service: Service, given: Prompts, name: str) -> list[Any]:
    """The prompts of a field: one is a list of one."""
    prompts: list[Any] = [given] if isinstance(given, str) or (given and type(given[0]) is int) else given
    if not 0 < len(prompts) <= service.settings.max_inputs:
        most = service.settings.max_inputs
        raise wrong(name, f"a string, token ids, or a list of 1 to {most} of these", given)
    return prompts


def prompt_ids(service: Service, prompt: Any, name: str, suffix: str | None = None) -> list[int]:
    if suffix:
        return fill_in(service, prompt, suffix)
    if isinstance(prompt, str):
        service.refuse_long(prompt)
        tokens = service.tokenizer.encode(prompt)
    elif isinstance(prompt, list):
        tokens = check_ids(prompt, name, service.model.config.ids)
    else:
        raise ApiError(f"{name} must be a string or an array of token ids", param=name.partition("[")[0])
    if not tokens:
        raise ApiError(f"{name} has no tokens: there is nothing to read", param=name.partition("[")[0])
    return tokens


def fill_in(service: Service, prefix: Any, suffix: str) -> list[int]:
    """The prompt for the text between a prefix and a suffix."""
    if not isinstance(prefix, str):
        raise ApiError("suffix goes with a prompt that is a string", param="suffix")
    tokenizer = service.tokenizer
    for words in FILL_IN:
        marks = [tokenizer.id_of(word) for word in words]
        if all(mark is not None for mark in marks):
            before, after, middle = marks
            head = [] if tokenizer.bos_id is None else tokenizer.encode("")
            texts = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
            return [*head, *([before, *texts[0], after, *texts[1], middle])]  # type: ignore[list-item]
    raise ApiError("this model has no fill-in tokens: ask without suffix", param="suffix")


def usage_of(completions: list[Completion]) -> dict[str, Any]:
    """The usage of several requests as one."""
    prompt = sum(completion.usage.prompt for completion in completions)
    generated = sum(completion.usage.generated for completion in completions)
    reused = sum(completion.usage.reused for completion in completions)
    usage: dict[str, Any] = {
        **fields.token_counts(prompt, generated),
        "prompt_tokens_details": {"cached_tokens": reused, "cache_write_tokens": prompt - reused},
    }
    if len(completions) == 1:
        usage["lmstate"] = fields.usage_of(completions[0], [])["lmstate"]
    return usage
