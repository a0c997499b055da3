"""A front's answers are those of one engine, whatever happens to its replicas meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, chain, combinations, pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import lmstate
from lmstate.cluster.front import Front
from lmstate.cluster.handle import Listener, LocalReplica, Told, Work, tell
from lmstate.cluster.moving import MOST_LOST, MovingRequest
from lmstate.engine import Drained, Engine, EngineClosed, EngineError, QueueFull, Request
from lmstate.engine.delivery import Delivery
from lmstate.engine.results import Piece
from lmstate.generation.logprobs import TokenLogprob
from lmstate.vision.reader import PicturePrompt
from tests.engine.test_batching import paused, prompt
from tests.zoo import ours

GIVEN: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 1.2, "seed": 7, "n": 2}


class Mortal(LocalReplica):
    """Is lost at the first news of which `when(told, tokens so far)` is true. `last`: the news still comes."""

    def __init__(
        self, engine: Engine, rank: int, when: Callable[[Told, int], bool] = lambda *_: False, last: bool = True
    ) -> None:
        super().__init__(engine, rank)
        self.when, self.last, self.taken = when, last, 0

    def submit(self, work: Work, answered: list[list[int]], listener: Listener) -> Request:
        self.taken += 1
        tokens = 0

        def news(told: Told, delivery: Delivery) -> None:
            nonlocal tokens
            tokens += sum(len(piece.tokens) for piece in told.pieces)
            dies = not self._lost and self.when(told, tokens)
            if self.last or not dies:
                listener(told, delivery)
            if dies:
                self.lose()

        return super().submit(work, answered, news)


def check(request: Request, whole: Request) -> None:
    """The answer is the whole one, and each token of it was told once and in its place."""
    expected, got = whole.result(600), request.result(600)
    assert (got.tokens, got.texts, got.finished) == (expected.tokens, expected.texts, expected.finished)
    pieces = list(request)
    for index, tokens in enumerate(expected.tokens):
        told: list[int] = []
        for piece in (piece for piece in pieces if piece.index == index):
            assert piece.start == len(told)
            told += piece.tokens
        assert told == tokens
        assert "".join(piece for piece in pieces if piece.index == index) == expected.texts[index]
        ends = [piece.finished for piece in pieces if piece.index == index and piece.finished]
        assert ends == [expected.finished[index]]


MOMENTS: dict[str, Callable[[Told, int], bool]] = {
    "prefill": lambda told, tokens: told.reused is not None,
    "first token": lambda told, tokens: tokens > 0,
    "mid-stream": lambda told, tokens: tokens > 15,
    "the end of one of two": lambda told, tokens: any(piece.finished for piece in told.pieces),
    "the outcome": lambda told, tokens: told.outcome is not None,
}


def once(when: Callable[[Told, int], bool]) -> Callable[[Told, int], bool]:
    """True only for the first of all replicas."""
    deaths: list[Told] = []

    def dies(told: Told, tokens: int) -> bool:
        if deaths or not when(told, tokens):
            return False
        deaths.append(told)
        return True

    return dies


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("case", ["llama", "qwen3_next-dense"])
def test_an_answer_outlives_its_replica(case: str, moment: str) -> None:
    model, ids = ours(case), prompt(90, 1)
    with Engine(model) as engine:
        first, second = engine.submit(ids, **GIVEN).result(600).tokens
    ends = next(token for token in first[4:] if token not in second)  # one of the two answers, before the other
    given = {**GIVEN, "stop_token_ids": [ends]}
    for last in (False, True):
        dies = once(MOMENTS[moment])
        engines = [Engine(model, rows=4) for _ in range(2)]
        with Front([Mortal(engine, rank, dies, last) for rank, engine in enumerate(engines)], model) as front:
            answer = front.submit(ids, **given)
            answer.result(600)
            whole = engines[0].submit(ids, **given)
            check(answer, whole)
            moved = not (last and moment == "the outcome")
            assert isinstance(answer, MovingRequest) and answer.moves == moved
            assert front.submit(ids, **given).result(600).tokens == whole.result(600).tokens
            assert len(front.replicas) == 1
        for engine in engines:
            engine.close()


def test_answers_that_wait_outlive_their_replica() -> None:
    model = ours("llama")
    engines = [Engine(model, rows=2) for _ in range(2)]
    with Front([LocalReplica(engine, rank) for rank, engine in enumerate(engines)], model) as front:
        go = [paused(engine) for engine in engines]
        texts = [prompt(70, seed) for seed in range(6)]
        answers = [front.submit(text, **GIVEN) for text in texts]
        waiting = [engine.load().waiting for engine in engines]
        assert sum(waiting) == 6 and min(waiting) > 0, "both have some"
        lost = front.replicas[0]
        assert isinstance(lost, LocalReplica)
        lost.lose()
        for event in go:
            event.set()
        for text, answer in zip(texts, answers):
            answer.result(600)
            check(answer, engines[1].submit(text, **GIVEN))
        assert front.stats()["replicas_lost"] == 1
    engines[0].close()


@pytest.mark.parametrize("after", [0, 1, 9])
def test_a_replica_that_is_drained_hands_its_answers_on(after: int, tmp_path: Path) -> None:
    model, ids = ours("llama"), prompt(150, 3)
    given = {**GIVEN, "max_new_tokens": 120}
    engines = [Engine(model, store=tmp_path / str(rank)) for rank in range(2)]
    with Front([LocalReplica(engine, rank) for rank, engine in enumerate(engines)], model) as front:
        go = [paused(engine) for engine in engines]
        answer = front.submit(ids, **given)
        home = next(replica for replica in front.replicas if replica.load().waiting)
        if after:
            for event in go:
                event.set()
            pieces = iter(answer)
            for _ in range(after):
                next(pieces)
        draining = Thread(target=front.drain_replica, args=(home.id,))
        draining.start()
        for event in go:
            event.set()
        answer.result(600)
        draining.join(600)
        whole = next(engine for engine, replica in zip(engines, front.replicas) if replica is not home)
        check(answer, whole.submit(ids, **given))
        assert front.submit(ids, max_new_tokens=1).result(600), "it goes to the other one"
        with pytest.raises(ValueError, match="unknown replica 'x'; expected one of"):
            front.drain_replica("x")


def test_an_answer_outlives_two_lost_replicas_and_no_more() -> None:
    model = ours("llama")
    replicas = [Mortal(Engine(model), rank, lambda told, tokens: tokens > 2) for rank in range(MOST_LOST + 2)]
    with Front(replicas, model) as front:
        answer = front.submit(prompt(20, 1), **{**GIVEN, "n": 1})
        with pytest.raises(EngineError, match=f"{MOST_LOST + 1} replicas were lost with this answer"):
            answer.result(600)
        assert sum(replica.taken for replica in replicas) == MOST_LOST + 1
        assert answer.generated == 3 * (MOST_LOST + 1)
    for replica in replicas:
        replica.engine.close()


def test_nobody_is_left() -> None:
    model = ours("llama")
    replica = Mortal(Engine(model), 0, lambda told, tokens: tokens > 2)
    with Front([replica], model) as front:
        with pytest.raises(EngineClosed, match="no replica takes requests"):
            front.submit([1, 2], max_new_tokens=9, ignore_eos=True).result(600)
        with pytest.raises(EngineClosed, match="no replica"):
            front.submit([1, 2])
    with pytest.raises(EngineClosed, match="front was closed"):
        front.submit([1, 2])
    replica.engine.close()


def test_a_cancelled_answer_is_cancelled_where_it_went() -> None:
    model, dies = ours("llama"), once(lambda told, tokens: tokens > 2)
    engines = [Engine(model) for _ in range(2)]
    with Front([Mortal(engine, rank, dies) for rank, engine in enumerate(engines)], model) as front:
        answer = front.submit(prompt(20, 1), **{**GIVEN, "n": 1, "max_new_tokens": 100_000})
        pieces = iter(answer)
        for _ in range(5):  # the first replica is lost after three
            next(pieces)
        answer.cancel()
        assert answer.result(600).finished == ["cancelled"]
    for engine in engines:
        engine.close()


def test_a_turn_whose_replica_ends_after_its_commit_is_in_the_session_once(tmp_path: Path) -> None:
    model, store = ours("llama"), "file://" + str(tmp_path)
    dies = once(MOMENTS["the outcome"])
    engines = [Engine(model, store=store) for _ in range(2)]
    with Front([Mortal(engine, rank, dies, False) for rank, engine in enumerate(engines)], model) as front:
        first = front.submit([5, 6, 7], session="one", max_new_tokens=6, ignore_eos=True)
        completion = first.result(600)
        assert isinstance(first, MovingRequest) and first.moves == 1
        assert [token for piece in first for token in piece.tokens] == completion.tokens[0]
        second = front.submit([8], session="one", max_new_tokens=2, ignore_eos=True).result(600)
        (left,) = (replica for replica in front.replicas if isinstance(replica, LocalReplica))
        session = left.engine.session("one")
        assert session.tokens == [5, 6, 7, *completion.tokens[0], 8, *second.tokens[0]]
        assert session.generation == 2
    for engine in engines:
        engine.close()


def test_a_full_replica_is_passed_over() -> None:
    model = ours("llama")
    with Front([LocalReplica(Engine(model, rows=1, queue=2), rank) for rank in range(2)], model) as front:
        go = [paused(replica.engine) for replica in front.replicas if isinstance(replica, LocalReplica)]
        answers = [front.submit([1, 2, seed], max_new_tokens=1) for seed in range(4)]
        with pytest.raises(QueueFull):
            front.submit([1, 2, 9])
        assert front.load().waiting == 4 and front.rows == 2
        for event in go:
            event.set()
        assert all(answer.result(600) for answer in answers)


def test_replicas_of_another_namespace_are_refused() -> None:
    with Engine(ours("llama")) as one, Engine(ours("llama"), kv=lmstate.kv.Quantized(8)) as other:
        with pytest.raises(ValueError, match="mean nothing to the other"):
            Front([LocalReplica(one, 0), LocalReplica(other, 1)], one.model)
        with pytest.raises(ValueError, match="already"):
            Front([LocalReplica(one, 0), LocalReplica(one, 0)], one.model)
        with pytest.raises(ValueError, match="without replicas"):
            Front([], one.model)


def heard_request() -> tuple[MovingRequest, list[Listener]]:
    """A request, and the listeners of the replicas that it was sent to."""
    heard: list[Listener] = []

    def send(work: Work, answered: list[list[int]], listener: Listener, tried: list[str]) -> Request:
        heard.append(listener)
        return Request([1], lambda: None, Delivery())

    request = MovingRequest(
        Work(PicturePrompt([1]), lmstate.SamplingParams()),
        [1],
        send,
        lambda function, seconds: function(),
        lambda: None,  # type: ignore[arg-type, return-value]
    )
    request.start()
    return request, heard


def test_pieces_that_do_not_follow_are_refused() -> None:
    """A replica that goes on with other tokens or another text, or leaves some out, ends the request."""
    wrong = {
        "within a piece": [Piece("x", 0, [3, 4], start=1)],
        "another token": [Piece("x", 0, [4], start=0)],
        "tokens left out": [Piece("x", 0, [9], start=3)],
        "another text": [Piece("axc", 0, [1, 2, 3], start=0)],
        "another token later": [Piece("a", 0, [1], start=0), Piece("b", 0, [4, 3], start=1)],
        "tokens left out later": [Piece("a", 0, [1], start=0), Piece("c", 0, [3], start=2)],
        "from the beginning again": [Piece("ab", 0, [1, 2], start=0), Piece("abc", 0, [1, 2, 3], start=0)],
    }
    for case, pieces in wrong.items():
        request, heard = heard_request()
        tell(heard[0], Told([Piece("ab", 0, [1, 2])], 1, 0))
        tell(heard[0], Told([], 1, 0, Drained([[1, 2]], 0)))
        assert request.moves == 1
        tell(heard[0], Told([Piece("c", 0, [3], start=2)], 1, 0))  # of the first one, too late
        tell(heard[1], Told(pieces, 1, 0))
        with pytest.raises(EngineError, match="the replica"):
            request.result(1)
        assert request.generated == 2, case


TEXTS = ["", "a", "a", "a", "abcd", "abcdef"]  # with the first tokens: three have one character, one has three
ANSWER = list(range(1, len(TEXTS)))
LOGPROBS = [TokenLogprob(token, -float(token)) for token in ANSWER]


def cuts(start: int, stop: int) -> Iterator[list[Piece]]:
    """The tokens of the answer from `start` on, before `stop`, in every division into pieces."""
    inner = range(start + 1, stop)
    for edges in chain.from_iterable(combinations(inner, count) for count in range(len(inner) + 1)):
        yield [
            Piece(TEXTS[to][len(TEXTS[at]) :], 0, ANSWER[at:to], LOGPROBS[at:to], start=at)
            for at, to in pairwise([start, *edges, stop])
            if at < to
        ]


def test_an_answer_goes_on_exactly_however_it_is_cut() -> None:
    """Every division of what was told, and of what the next replica tells from any of its edges on."""
    for stop in range(len(TEXTS)):
        for told in cuts(0, stop):
            for start in {0, *(piece.start for piece in told), stop}:
                for again in cuts(start, len(ANSWER)):
                    request, heard = heard_request()
                    tell(heard[0], Told(told, 1, 0))
                    tell(heard[0], Told([], 1, 0, Drained([ANSWER[:stop]], 0)))
                    tell(heard[1], Told(again, 1, 0))
                    tell(heard[1], Told([Piece("!", 0, [], None, "length", start=len(ANSWER))], 1, 0))
                    pieces = request._pieces
                    assert [piece.start for piece in pieces] == [0, *accumulate(len(p.tokens) for p in pieces)][:-1]
                    assert [token for piece in pieces for token in piece.tokens] == ANSWER
                    assert [one for piece in pieces for one in piece.logprobs or []] == LOGPROBS
                    assert "".join(pieces) == TEXTS[-1] + "!" and pieces[-1].finished == "length"
                    assert all(piece.tokens or piece.text for piece in pieces)
