"""Playing a trace: through an engine, which counts what it computes, or through any server of token ids."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import lmstate
from bench.traces import Turn, trace
from lmstate.engine.prefix.tree import shared

Ask = Callable[[list[int], int], Callable[[], list[int]]]
"""`ask(prompt, count)()`: the answer, of so many tokens; nothing is waited for by the first call."""


def words(count: int, vocab: int, dice: random.Random) -> list[int]:
    return [dice.randrange(10, vocab) for _ in range(count)]


@dataclass(frozen=True)
class Traced:
    """A trace at one budget. `computed / new` is 1.0 where nothing is computed twice.

    `held`: bytes of the prefix store at the end; `rows`: the most that rows took beside it; `longest`: bytes of the
    longest request by itself.
    """

    trace: str
    memory: int
    held: int
    rows: int
    longest: int
    prompt_tokens: int
    new: int
    computed: int
    seconds: float


@dataclass(frozen=True)
class Message:
    """Message of the user in a history, as a chat template would have it, and the answer to it."""

    begin: int
    text: list[int]
    end: int
    answer: list[int]

    def ids(self) -> list[int]:
        return [self.begin, *self.text, self.end, self.begin, *self.answer, *([self.end] if self.answer else [])]


def flat(history: Sequence[Message]) -> list[int]:
    return [token for message in history for token in message.ids()]


def follow(turn: Turn, base: list[Message], vocab: int, end: int, dice: random.Random) -> list[Message]:
    """The history that a turn asks about: its last message has no answer yet."""
    text = words(turn.new, vocab, dice)
    if turn.cut < 1.0:
        before = flat(base)
        return [Message(before[0], [*before[1 : round(turn.cut * len(before))], *text], end, [])]
    if turn.back:
        text = [*base[-turn.back].text[: turn.same], *text]
    return [*base[: len(base) - turn.back], Message(9, text, end, [])]


def play(name: str, vocab: int, end: int, ask: Ask, number: int = 0) -> tuple[int, float]:
    """(tokens of prompts that nobody had computed, seconds in all). `end`: the token that ends a message.

    Another `number` has other texts of the same lengths, so that one who remembers those before knows none of them.
    """
    dice = random.Random(f"{name}{number or ''}")
    histories: dict[str | None, list[Message]] = {None: []}
    known: list[list[int]] = []  # what was computed by anybody: prompts, and answers but for their last token
    new = 0
    asked: list[tuple[Turn, list[Message], Callable[[], list[int]]]] = []

    def finish() -> int:
        fresh = 0
        for turn, history, answer in asked:
            tokens, ids = answer(), flat(history)
            fresh += len(ids) - min(max((shared(text, ids) for text in known), default=0), len(ids) - 1)
            known.append([*ids, *tokens][:-1])
            if turn.save is not None:
                histories[turn.save] = [*history[:-1], replace(history[-1], answer=tokens)]
        asked.clear()
        return fresh

    begin = perf_counter()
    turns = trace(name)
    for wave in sorted({turn.wave for turn in turns}):
        for turn in [turn for turn in turns if turn.wave == wave]:
            if any(other.save == turn.base for other, _, _ in asked):
                new += finish()
            history = follow(turn, histories[turn.base], vocab, end, dice)
            asked.append((turn, history, ask(flat(history), turn.answer)))
        new += finish()
    return new, perf_counter() - begin


def run_trace(model: lmstate.Model, name: str, memory: int | str, number: int = 0, stall: float = 3.0) -> Traced:
    longest = 0
    with lmstate.Engine(model, rows=8, memory=memory, stall=stall) as engine:

        def ask(ids: list[int], count: int) -> Callable[[], list[int]]:
            nonlocal longest
            longest = max(longest, engine._cost(len(ids) + count))
            request = engine.submit(ids, max_new_tokens=count, ignore_eos=True)
            return lambda: request.result().tokens[0]

        new, seconds = play(name, model.config.vocab_size, min(model.eos_ids, default=1), ask, number)
        stats = engine.stats()
    return Traced(
        trace=name,
        memory=engine._reuse.memory,
        held=int(stats["prefix_bytes"]),
        rows=int(stats["row_bytes_peak"]),
        longest=longest,
        prompt_tokens=int(stats["prompt_tokens"]),
        new=new,
        computed=int(stats["computed_tokens"]),
        seconds=seconds,
    )


def run_budgets(model: lmstate.Model, name: str, parts: Sequence[int] = (1, 2, 4, 8)) -> list[Traced]:
    """A trace with memory for all of it, and with these parts of that; twice the longest request always has room."""
    whole = run_trace(model, name, "16GiB")
    needed, least = whole.rows + whole.held, 2 * whole.longest
    return [whole if part == 1 else run_trace(model, name, max(needed // part, least)) for part in parts]
