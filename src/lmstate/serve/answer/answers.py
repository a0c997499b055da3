"""Answers in the making: pieces of the engine become text, reasoning and calls, the same for every protocol."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from lmstate.generation.stopping import StopScanner
from lmstate.serve.tools import CallArguments, CallStart, Event, Reasoning, Text
from lmstate.serve.tools.reader import Parse, Parser, Reader
from lmstate.serve.wire.ids import new_id
from lmstate.text.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:
    from lmstate.engine import Piece, TokenLogprob


@dataclass
class AnsweredCall:
    """A call in an answer. `arguments` is JSON if the answer was not cut off in it."""

    id: str
    name: str
    arguments: str = ""

    @property
    def whole(self) -> bool:
        """Whether the answer was not cut off in it."""
        try:
            json.loads(self.arguments)
        except (ValueError, RecursionError):
            return False
        return True


@dataclass
class Passage:
    """Text or reasoning of an answer, up to where something else comes."""

    kind: type[Text] | type[Reasoning]
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the tokens of a text, where they were asked for


class UntoldTokens:
    """Tokens in turn, each with its text, until the events come that have that text.

    Parsers leave out what marks the parts of an answer: which tokens an event is of is found by its text.
    """

    def __init__(self) -> None:
        self._tokens: deque[tuple[str, TokenLogprob]] = deque()
        self._told: TokenLogprob | None = None  # the last one that was

    def push(self, text: str, logprob: TokenLogprob) -> None:
        self._tokens.append((text, logprob))

    def take(self, event: Event) -> list[TokenLogprob]:
        """The tokens that the text of an event is of, but for one whose beginning was told of before."""
        if isinstance(event, CallStart):
            return []
        whole = "".join(text for text, _ in self._tokens)
        start = whole.rfind(event.text)
        if start < 0:  # it was written again from the start
            start, end = 0, len(whole)
        else:
            end = start + len(event.text)
        self._pass(start)
        found = [one for one in self._pass(end - start) if one is not self._told]
        if found and isinstance(event, Text):
            self._told = found[-1]  # what is left of its text is no other token
        return found

    def _pass(self, count: int) -> list[TokenLogprob]:
        """Pass over `count` characters. A token without characters waits for the next: a character can span tokens."""
        passed = []
        while count > 0 and self._tokens:
            text, logprob = self._tokens.popleft()
            passed.append(logprob)
            if len(text) > count:
                self._tokens.appendleft((text[count:], logprob))
            count -= len(text)
        return passed


class MarkedText:
    """Text of tokens, special ones left out but for the markers that a parser needs.

    `before` are the tokens of a text that they go on with: some tokenizers drop a space at the beginning of one.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[str], before: Iterable[int] = ()) -> None:
        ids = {tokenizer.id_of(marker): marker for marker in markers}
        self._markers = {id: marker for id, marker in ids.items() if id is not None and id in tokenizer.special_ids}
        self._stream: TextStream = tokenizer.stream()
        self._stream.follow(before)

    def push(self, token: int) -> str:
        if token in self._markers:
            return self._stream.flush() + self._markers[token]
        return self._stream.push(token)

    def flush(self) -> str:
        return self._stream.flush()


@dataclass
class Answer:
    """One of the answers to a request.

    `single`: it may have one call at most, and ends (`cut`) where the model begins another. `only_calls`: it has no
    text. Of its first `min_tokens` no stop string ends it.
    """

    index: int
    source: MarkedText
    parser: Parser
    stops: StopScanner
    call_id: Callable[[], str]
    single: bool = False
    only_calls: bool = False
    min_tokens: int = 0
    cut: bool = False
    text: str = ""
    reasoning: str = ""
    calls: list[AnsweredCall] = field(default_factory=list)
    parts: list[Passage | AnsweredCall] = field(default_factory=list)  # all of it in turn
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    certain: int = 0  # as many of the tokens begin in the text, before any stop string that is cut off
    reasoning_tokens: int = 0
    finished: str | None = None
    _untold: UntoldTokens = field(default_factory=UntoldTokens, init=False)

    def push(self, piece: Piece) -> list[Event]:
        """The events of one more piece; after the last one, of all that was held back too."""
        if self.cut:
            return []
        events: list[Event] = []
        for count, (token, logprob) in enumerate(zip_longest(piece.tokens, piece.logprobs or ()), len(self.tokens) + 1):
            text = self.source.push(token)
            if logprob is not None:
                self._untold.push(text, logprob)
            found = self.parser.push(self.stops.push(text, count > self.min_tokens))
            self.reasoning_tokens += any(isinstance(event, Reasoning) for event in found)
            events += found
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs or []
        self.certain = len(self.tokens) if piece.certain is None else piece.certain
        if piece.finished is not None:
            self.finished = piece.finished
            rest = self.stops.push(self.source.flush(), len(self.tokens) > self.min_tokens)
            events += self.parser.push(rest + ("" if self.stops.cut is not None else self.stops.flush()))
            held = self.parser.finish()
            calls = self.only_calls or self.calls or any(isinstance(event, CallStart) for event in events)
            # The text held back is the beginning of a call, where the answer was cut off in it.
            events += [event for event in held if piece.finished == "eos" or not (calls and isinstance(event, Text))]
        kept: list[Event] = []
        for event in events:
            if isinstance(event, CallStart):
                if self.single and self.calls:
                    self.cut, self.finished = True, "stop"
                    break
                event = CallStart(event.name, self.call_id())
            elif piece.logprobs is not None and (told := self._untold.take(event)) and isinstance(event, Text):
                event = replace(event, logprobs=tuple(told))
            self._keep(event)
            kept.append(event)
        return kept

    def _keep(self, event: Event) -> None:
        if isinstance(event, CallStart):
            self.calls.append(AnsweredCall(event.id or "", event.name))
            self.parts.append(self.calls[-1])
            return
        if isinstance(event, CallArguments):
            self.calls[-1].arguments += event.text
            return
        if isinstance(event, Text):
            self.text += event.text
        else:
            self.reasoning += event.text
        if not event.text:
            return
        last = self.parts[-1] if self.parts else None
        if not isinstance(last, Passage) or not isinstance(event, last.kind):
            last = Passage(type(event))
            self.parts.append(last)
        last.text += event.text
        if isinstance(event, Text):
            last.logprobs += event.logprobs


@dataclass(frozen=True)
class AnswerMaker:
    """Makes the `Answer` of each index of a request."""

    tokenizer: Tokenizer
    parse: Callable[[Reader], Parse[None]]
    markers: tuple[str, ...]
    stops: tuple[str, ...]
    call_prefix: str = "call_"
    single: bool = False
    only_calls: bool = False
    min_tokens: int = 0
    before: tuple[int, ...] = ()
    include_stop: bool = False

    def answers(self, count: int) -> list[Answer]:
        return [
            Answer(
                index,
                MarkedText(self.tokenizer, self.markers, self.before),
                Parser(self.parse),
                StopScanner(self.stops, self.include_stop),
                lambda: new_id(self.call_prefix),
                self.single,
                self.only_calls,
                self.min_tokens,
            )
            for index in range(count)
        ]


def usage_details(usage: Any) -> dict[str, Any]:
    """Usage that no protocol has a place for: where the prompt's tokens came from, and why not more of them; times."""
    reuse = usage.reuse
    return {
        "reused_tokens": usage.reused,
        "computed_tokens": usage.prompt - usage.reused,
        "matched_tokens": reuse.matched,
        "tier": reuse.tier,
        "differs_at": reuse.differs_at,
        "differs": reuse.differs,
        "forced_by": reuse.forced_by,
        "pictures_ms": round(usage.pictures * 1000, 3),
        "queued_ms": round(usage.queued * 1000, 3),
        "prefill_ms": round(usage.prefill * 1000, 3),
        "decode_ms": round(usage.decode * 1000, 3),
    }
