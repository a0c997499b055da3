"""Replicas behind a wire answer as an engine here does, and what is wrong on the wire is an error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lmstate
from lmstate.audio.speech import OneOf, SpeechGrammar
from lmstate.cluster.handle import ReplicaLost, Work
from lmstate.cluster.moving import MovingRequest
from lmstate.cluster.replica import EngineReplica, ReplicaSpec
from lmstate.cluster.served import ServedEngine
from lmstate.cluster.wire import (
    ERRORS,
    WireAnswer,
    WireHeard,
    WireNews,
    WireOneOf,
    WireQuestion,
    WireWork,
    error_of_wire,
    error_to_wire,
    pack,
    unpack,
    work_of_wire,
    work_to_wire,
)
from lmstate.engine import Drained, Engine, EngineClosed, QueueFull, SessionBusy
from lmstate.engine.results import NoReplica, SessionMoved
from lmstate.errors import RanksError, RewindError, UnsupportedError
from lmstate.vision.reader import PicturePrompt
from tests.audio.small import saved
from tests.cluster.helpers import fleet
from tests.cluster.test_front import GIVEN, check
from tests.engine.test_batching import prompt
from tests.serve.running import save_tiny
from tests.waiting import wait_until
from tests.zoo import ours

PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_k": st.integers(1, 50),
        "top_p": st.floats(0.1, 1),
        "seed": st.integers(0, 2**62),
        "repetition_penalty": st.floats(0.5, 2),
        "logit_bias": st.dictionaries(st.integers(0, 40), st.floats(-5, 5), max_size=3),
        "max_new_tokens": st.integers(0, 10**6),
        "n": st.integers(1, 4),
        "stop": st.lists(st.text(min_size=1), max_size=2),
        "stop_token_ids": st.sets(st.integers(0, 40), max_size=3),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 5),
        "max_thinking_tokens": st.integers(0, 9),
    },
)
PROMPTS = st.one_of(
    st.text(),
    st.builds(PicturePrompt, st.lists(st.integers(0, 40)), source=st.none() | st.lists(st.integers(0, 40)).map(tuple)),
    st.lists(st.dictionaries(st.text(), st.text(), min_size=1), min_size=1),
)


@given(prompt=PROMPTS, params=PARAMS, priority=st.integers(-3, 3), deadline=st.none() | st.floats(0.1, 9))
def test_a_request_comes_out_of_the_wire_as_it_went_in(prompt: Any, params: Any, priority: int, deadline: Any) -> None:
    work = Work(prompt, lmstate.SamplingParams(**params), priority, deadline, 20.0, "name", "key", "salt")
    told = unpack(pack(work_to_wire(work, [[1], [2]], "a", "b", "c")), WireWork)
    assert work_of_wire(told, lambda lark: pytest.fail("no grammar was given")) == work
    assert (told.answered, told.to, told.id, told.feed) == ([[1], [2]], "a", "b", "c")


def test_grammars_of_transcripts_come_out_of_the_wire(tmp_path: Path) -> None:
    saved(tmp_path)
    with Engine(lmstate.load(tmp_path, weights="float32")) as engine:
        speech, served = engine.model.listener().speech, ServedEngine(engine, 0)
        size = speech.vocab_size
        for grammar, begun in (
            (OneOf(size, [5, 9]), [9]),
            (SpeechGrammar(speech, True), [speech.first_time, 70, speech.first_time + 3]),
            (SpeechGrammar(speech, False), [70, 71]),
        ):
            work = Work("x", lmstate.SamplingParams(grammar=grammar))
            told = unpack(pack(work_to_wire(work, [], "a", "b", "c")), WireWork)
            made = work_of_wire(told, served._compiled).params.grammar
            assert made is not None
            for token in [*begun, None]:
                assert torch.equal(made.allowed(), grammar.allowed()) and made.complete == grammar.complete
                for each in (made, grammar):
                    if token is not None:
                        each.accept(token)
        for bad in ([size], [-1]):
            with pytest.raises(ValueError, match="the grammar"):
                served._compiled(WireOneOf(bad))
    with pytest.raises(UnsupportedError, match="replicas take those that the server compiles"):
        work_to_wire(Work("x", lmstate.SamplingParams(grammar=Anything())), [], "a", "b", "c")


class Anything:
    """A grammar of this process."""

    complete, ended = True, False

    def allowed(self) -> None: ...

    def accept(self, token: int) -> None: ...

    def rollback(self, count: int) -> None: ...

    def forced(self) -> tuple[int, ...]:
        return ()

    def copy(self) -> Anything:
        return self


@given(st.binary(max_size=200))
def test_what_is_no_message_is_refused(told: bytes) -> None:
    for kind in (WireWork, WireNews, WireHeard):
        try:
            unpack(told, kind)
        except ReplicaLost as error:
            assert "not a Wire" in str(error)


def test_errors_keep_their_class_and_no_other_text_leaves() -> None:
    for kind in ERRORS.values():
        told = error_of_wire(error_to_wire(kind("why")))
        assert type(told) is kind and str(told) == "why"
    drained, moved = error_of_wire(error_to_wire(Drained([[3]], 7))), error_of_wire(error_to_wire(SessionMoved("x", 4)))
    assert isinstance(drained, Drained) and (drained.answered, drained.seed) == ([[3]], 7)
    assert isinstance(moved, SessionMoved) and moved.generation == 4
    assert isinstance(error_of_wire(error_to_wire(RewindError("back"))), lmstate.StateError)
    assert isinstance(error_of_wire(error_to_wire(RanksError("a process ended"))), ReplicaLost)  # it goes on elsewhere
    assert "secret" not in str(error_of_wire(error_to_wire(KeyError("secret"))))


@pytest.mark.parametrize("case", ["llama", "qwen3_next-dense"])
def test_an_answer_goes_on_behind_the_wire(case: str) -> None:
    model, ids = ours(case), prompt(90, 1)
    given = {**GIVEN, "logprobs": 2}
    with Engine(model) as engine, fleet(Engine(model), Engine(model)) as (cluster, channels):
        whole = engine.submit(ids, **given)
        expected = whole.result(600)
        for channel in channels:
            channel.dies_after = 15
            answer = cluster.front.submit(ids, **given)
            assert isinstance(answer, MovingRequest)
            got = answer.result(600)
            check(answer, whole)
            assert got.logprobs == expected.logprobs or answer.moves
            if answer.moves:
                break
            channel.dies_after = -1
        assert answer.moves == 1 and sum(channel.dead for channel in channels) == 1
        assert len(cluster.status()) == 2 or len(cluster.front.replicas) == 1


def test_a_replica_that_comes_back_is_used_again() -> None:
    model = ours("llama")
    with fleet(Engine(model), Engine(model)) as (cluster, channels):
        channels[0].dead = True
        wait_until(lambda: len(cluster.status()) == 1)
        for seed in range(3):
            assert cluster.front.submit(prompt(20, seed), max_new_tokens=2).result(600)
        assert channels[0].taken == 0
        channels[0].dead = False
        wait_until(lambda: all(one.takes for one in cluster.status()) and len(cluster.status()) == 2)


def test_a_drained_replica_hands_its_answers_on() -> None:
    model, ids = ours("llama"), prompt(60, 2)
    given = {**GIVEN, "max_new_tokens": 150}
    with Engine(model) as engine, fleet(Engine(model), Engine(model)) as (cluster, channels):
        answer = cluster.front.submit(ids, **given)
        next(iter(answer))
        home = next(rank for rank, channel in enumerate(channels) if channel.taken)
        assert cluster.drain(home)
        check(answer, engine.submit(ids, **given))
        assert channels[1 - home].taken == 1
        with pytest.raises(RuntimeError, match="drained"):
            channels[home].served.check_health()
        channels[1 - home].served.check_health()
        with pytest.raises(ValueError, match="no replica of rank 7"):
            cluster.drain(7)


def test_a_replica_on_ray_is_replaced_once_it_was_drained_or_ended(tmp_path: Path) -> None:
    spec = ReplicaSpec(str(save_tiny(tmp_path)), weights="float32", memory="100MB")
    replica = EngineReplica(0, msgspec.json.encode(spec))

    def takes() -> bool:
        return replica.view().takes

    replica.check_health()
    assert takes()
    assert unpack(asyncio.run(replica.drain(pack(WireQuestion("drain")))), WireAnswer).read(bool)
    with pytest.raises(RuntimeError, match="a new one takes its place"):
        replica.check_health()
    replica._takes, replica._drained = True, False
    replica.engine.close()
    assert not takes()
    with pytest.raises(EngineClosed):
        replica.check_health()


@pytest.mark.parametrize("more", [{"adapter": "x"}, {"mmproj": "a/b/c.gguf"}, {"device": "cuda"}])
def test_what_a_replica_over_processes_has_not_is_refused_before_ray_starts(more: dict[str, Any]) -> None:
    ReplicaSpec("a/b", **more).check()
    with pytest.raises(ValueError, match="mmproj or a device: a model over several processes has none"):
        ReplicaSpec("a/b", parallel=2, threads=2, **more).check()


def test_refusals_pass_a_request_on() -> None:
    model = ours("llama")
    with fleet(*(Engine(model, rows=1, queue=1) for _ in range(2))) as (cluster, channels):
        long = {"max_new_tokens": 100_000, "ignore_eos": True}
        running = [cluster.front.submit(prompt(20, seed), **long) for seed in range(2)]
        for one in running:
            next(iter(one))
        waiting = [cluster.front.submit(prompt(20, seed), **long) for seed in range(2, 4)]
        wait_until(lambda: all(channel.served.engine.load().waiting for channel in channels))
        with pytest.raises(QueueFull):
            cluster.front.submit(prompt(20, 9)).result(600)
        for one in (*waiting, *running):
            one.cancel()
        assert running[0].result(600).finished == ["cancelled"]


def test_sessions_are_the_stores(tmp_path: Path) -> None:
    model, store = ours("llama"), f"file://{tmp_path}"
    engines = [Engine(model, store=store) for _ in range(2)]
    short = {"max_new_tokens": 5, "ignore_eos": True}
    with fleet(*engines, store=store) as (cluster, channels):
        front = cluster.front
        session = front.new_session("one", lmstate.engine.session.Record())
        first = session.send([5, 6, 7], **short).result(600)
        assert session.tokens == [5, 6, 7, *first.tokens[0]] and first.stored
        with pytest.raises(SessionBusy):
            slow = session.send([1], max_new_tokens=100_000, ignore_eos=True)
            session.send([2], **short)
        slow.cancel()
        slow.result(600)
        assert session.tokens == [5, 6, 7, *first.tokens[0]], "a turn that was cancelled is not kept"
        session.send([9], **short).result(600)
        session.undo()
        assert session.tokens == [5, 6, 7, *first.tokens[0]]
        other = session.fork("two")
        for channel in channels:
            if channel.taken:
                channel.dead = True
        second = other.send([8], **short).result(600)
        assert other.tokens == [*session.tokens, 8, *second.tokens[0]]
        with Engine(model) as alone:
            assert alone.submit([*session.tokens, 8], **short).result(600).tokens == second.tokens
        assert front.sessions() == ["one", "two"]
        session.close()
        assert front.find_session("one") is None and front.sessions() == ["two"]


def test_a_front_looks_into_its_replicas() -> None:
    model, ids = ours("llama"), prompt(130, 5)
    with fleet(Engine(model), Engine(model)) as (cluster, _):
        front = cluster.front
        front.submit(ids, max_new_tokens=2).result(600)
        assert front.explain(ids).reused > 100
        assert front.stats()["requests"] == 1 and front.resident() and front.at_work() == []
        assert front.tree().count("replica ") == 2 and front.prefixes(ids) and front.held(ids)
        assert front.draft_report().drafted == 0 or front.draft_report().verified
        front.clear_prefixes()
        assert front.explain(ids).reused == 0
        with pytest.raises(UnsupportedError, match="checkpoint folders"):
            front.model.pictures()
        with pytest.raises(UnsupportedError, match="share no store"):
            front.session("one")


def test_a_text_is_embedded_at_a_replica_that_lives() -> None:
    model, ids = ours("llama"), prompt(130, 5)
    with Engine(model) as alone, fleet(Engine(model), Engine(model)) as (cluster, channels):
        expected = alone.embed(ids, "last").result(60)
        for dead in (None, *channels):
            for channel in channels:
                channel.dead = channel is dead
            assert torch.equal(cluster.front.embed(ids, "last").result(60), expected)
        with pytest.raises(ValueError, match="unknown pooling"):
            cluster.front.embed(ids, "max").result(60)
        for channel in channels:
            channel.dead = True
        vector = cluster.front.embed(ids, "last")
        wait_until(lambda: not cluster.front.replicas)
        channels[0].served, channels[0].dead = ServedEngine(channels[0].served.engine, 0), False
        assert torch.equal(vector.result(60), expected)


@pytest.mark.parametrize("unreached", [0, 4])
def test_an_answer_waits_for_the_replica_that_replaces_the_last_one(unreached: int) -> None:
    """Replicas that it did not come to do not count as moves."""
    model, ids = ours("llama"), prompt(60, 2)
    with Engine(model) as alone, fleet(Engine(model)) as (cluster, (channel,)):
        channel.dies_after = 5
        answer = cluster.front.submit(ids, **GIVEN)
        wait_until(lambda: channel.dead)
        channel.served = ServedEngine(channel.served.engine, 0)  # another process at the same rank
        channel.unreached, channel.dies_after, channel.dead = unreached, -1, False
        check(answer, alone.submit(ids, **GIVEN))
        assert isinstance(answer, MovingRequest) and answer.moves == 1


def test_an_answer_waits_no_longer_than_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmstate.cluster.serving.PATIENCE", 0.5)
    with fleet(Engine(ours("llama"))) as (cluster, (channel,)):
        channel.dies_after = 5
        answer = cluster.front.submit(prompt(60, 2), **GIVEN)
        with pytest.raises(EngineClosed, match="no replica takes requests"):
            answer.result(600)


def test_new_requests_wait_for_the_replica_that_replaces_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmstate.cluster.front.MOST_WAITING", 2)
    model, ids, store = ours("llama"), prompt(60, 2), f"file://{tmp_path}"
    with Engine(model) as alone, fleet(Engine(model, store=store), store=store) as (cluster, (channel,)):
        front, channel.dead = cluster.front, True
        session = front.session("one")
        wait_until(lambda: not any(one.takes for one in front.replicas))
        answers = [front.submit(ids, **GIVEN), session.send(ids, max_new_tokens=5, ignore_eos=True)]
        with pytest.raises(NoReplica):
            front.submit(ids)
        assert not any(answer.done for answer in answers)
        channel.served, channel.dead = ServedEngine(channel.served.engine, 0), False
        check(answers[0], alone.submit(ids, **GIVEN))
        check(answers[1], alone.submit(ids, max_new_tokens=5, ignore_eos=True))
        assert session.tokens == [*ids, *answers[1].result(60).tokens[0]]
        assert front.submit(ids, **GIVEN).result(60).tokens == answers[0].result(60).tokens


@pytest.mark.parametrize(("waits", "seconds"), [(False, 0.0), (True, 0.0), (True, 0.6)])
def test_a_front_that_is_drained_ends_its_answers_as_an_engine_does(waits: bool, seconds: float) -> None:
    model, ids = ours("llama"), prompt(60, 2)
    given = {**GIVEN, "max_new_tokens": 150, "seed": 3}
    with Engine(model) as alone, fleet(Engine(model)) as (cluster, (channel,)):
        front = cluster.front
        answer = front.submit(ids, **given)
        next(iter(answer))
        if waits:
            channel.dead = True
            wait_until(lambda: not any(one.takes for one in front.replicas))
            answer.cancel()
            answer = front.submit(ids, **given)
        assert front.drain(seconds)  # longer than an answer that waits takes to look for a replica again
        channel.dead = False
        with pytest.raises(Drained) as drained:
            answer.result(60)
        told = drained.value
        assert told.seed == 3 and any(told.answered) != waits
        rest = alone.submit(ids, **given, answered=told.answered if any(told.answered) else ())
        assert rest.result(600).tokens == alone.submit(ids, **given).result(600).tokens
        seen = channel.calls["views"]
        wait_until(lambda: channel.calls["views"] > seen + 2)
        with pytest.raises(EngineClosed, match="is being drained"):
            front.submit(ids)
        engine = channel.served.engine
        wait_until(lambda: not engine.load().answering)
        assert engine.submit(ids, max_new_tokens=1).result(60), "the replica goes on"


def test_a_front_that_is_drained_lets_answers_end_that_end_in_time() -> None:
    with fleet(Engine(ours("llama"))) as (cluster, _):
        answer = cluster.front.submit(prompt(60, 2), **GIVEN)
        assert cluster.front.drain(60)
        assert answer.done and len(answer.result(1).tokens[0]) == GIVEN["max_new_tokens"]


@pytest.mark.parametrize("deadline", [None, 1.0])
def test_an_answer_that_waits_ends_when_it_is_cancelled_or_late(deadline: float | None) -> None:
    with fleet(Engine(ours("llama"))) as (cluster, (channel,)):
        channel.dies_after = 5
        answer = cluster.front.submit(prompt(60, 2), **GIVEN, deadline=deadline)
        wait_until(lambda: channel.dead and not cluster.front.replicas)
        if deadline is None:
            answer.cancel()
        with pytest.raises(EngineClosed):
            answer.result(30)  # and not when its patience ends


def test_an_answer_that_waits_ends_with_its_front() -> None:
    with fleet(Engine(ours("llama"))) as (cluster, (channel,)):
        channel.dies_after = 5
        answer = cluster.front.submit(prompt(60, 2), **GIVEN)
        wait_until(lambda: channel.dead and not cluster.front.replicas)
    with pytest.raises(EngineClosed):
        answer.result(60)
