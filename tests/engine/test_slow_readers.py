"""Answers that nobody reads give their rows up, and go on, to the bit, where their readers go on reading."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmstate.cluster.front import Front
from lmstate.engine import Engine, Piece, Request
from tests.engine.alone import alone
from tests.engine.test_batching import KINDS, prompt
from tests.waiting import GUARD, wait_until
from tests.zoo import ours

UNREAD, COUNT = 4, 40


def begun(engine: Engine | Front, seed: int, **options: int) -> tuple[Request, Iterator[Piece], list[Piece]]:
    """A request of whose answers one piece is read."""
    request = engine.submit(prompt(20, seed), max_new_tokens=COUNT, ignore_eos=True, **options)
    request.max_unread = UNREAD
    pieces = iter(request)
    return request, pieces, [next(pieces)]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_rest_while_nobody_reads_them_and_go_on_to_the_bit(kind: str) -> None:
    model = ours(KINDS[kind])
    with Engine(model, rows=2) as engine:
        slow = [begun(engine, seed) for seed in range(4)]
        wait_until(lambda: (stats := engine.stats())["set_aside"] == 4 and stats["decoding"] == 0)
        quick = engine.submit(prompt(20, 9), max_new_tokens=COUNT, ignore_eos=True)
        (tokens,) = quick.result(GUARD).tokens
        assert tokens == alone(model, prompt(20, 9), COUNT, ends=frozenset(), guess=tokens)[0]
        assert engine.stats()["rested"] == 4
        for seed, (request, pieces, read) in enumerate(slow):
            assert not request.done
            read += pieces
            (tokens,) = request.result(GUARD).tokens
            expected = alone(model, prompt(20, seed), COUNT, ends=frozenset(), guess=tokens)[0]
            assert tokens == expected
            assert [token for piece in read for token in piece.tokens] == expected


def test_an_answer_that_rests_goes_on_at_half_of_what_may_be_unread() -> None:
    with Engine(ours("llama"), rows=1) as engine:
        request, pieces, _ = begun(engine, 1)
        wait_until(lambda: engine.stats()["rested"] == 1)
        made = request.generated
        next(pieces)
        engine.call(lambda _: None).result(GUARD)
        engine.call(lambda _: None).result(GUARD)
        assert request.generated == made, "one piece is read, which is not enough to go on"
        for _ in range(UNREAD):
            next(pieces)
        wait_until(lambda: engine.stats()["rested"] == 2)
        assert request.generated > made
        request.cancel()
        assert request.result(GUARD).finished == ["cancelled"]


def test_several_answers_rest_together_and_one_that_rests_ends_at_its_deadline() -> None:
    with Engine(ours("llama"), rows=2) as engine:
        request, pieces, read = begun(engine, 1, n=3)
        wait_until(lambda: (stats := engine.stats())["set_aside"] == 3 and stats["decoding"] == 0)
        read += pieces
        assert [len(tokens) for tokens in request.result(GUARD).tokens] == [COUNT] * 3
        request, _, _ = begun(engine, 2, deadline=1)
        assert request.result(GUARD).finished == ["deadline"]


def test_only_who_iterates_can_be_too_slow() -> None:
    with Engine(ours("llama"), rows=1) as engine:
        request = engine.submit(prompt(20, 1), max_new_tokens=COUNT, ignore_eos=True)
        request.max_unread = 0
        assert len(request.result(GUARD).tokens[0]) == COUNT
        assert engine.stats()["rested"] == 0
