"""Failures that come together: full queues, senders that leave, sessions that change, replicas that only seem lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event, Timer
from threading import enumerate as running_threads
from typing import Any

import pytest
import torch

from lmstate.cluster import Cluster
from lmstate.cluster.front import Front
from lmstate.cluster.handle import LocalReplica, ReplicaLost, Told, Work
from lmstate.cluster.key import key_seed
from lmstate.cluster.moving import MovingRequest
from lmstate.cluster.serving import FrontFiles
from lmstate.cluster.wire import pack, work_to_wire
from lmstate.engine import Engine, QueueFull, Request
from lmstate.engine.results import NoReplica, SessionMoved
from lmstate.generation.params import SamplingParams
from lmstate.vision.reader import PicturePrompt
from tests.cluster.helpers import fleet
from tests.cluster.test_front import GIVEN, Mortal, check
from tests.engine.test_batching import paused, prompt
from tests.waiting import wait_until
from tests.zoo import ours

SHORT: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


def local(front: Front, rank: int) -> LocalReplica:
    (found,) = (replica for replica in front.replicas if replica.rank == rank)
    assert isinstance(found, LocalReplica)
    return found


def home(front: Front) -> int:
    """The rank of the only replica that has work."""

    def found() -> list[int]:
        loads = [(replica.rank, replica.load()) for replica in front.replicas]
        return [rank for rank, load in loads if load.waiting + load.reading + load.answering]

    wait_until(lambda: len(found()) == 1)
    return found()[0]


@pytest.mark.parametrize("lost", [True, False])
def test_answers_that_move_are_not_refused_by_a_full_queue(lost: bool) -> None:
    """One with tokens goes first; one without waits in the front until there is room. A new request is refused."""
    model = ours("llama")
    engines = [Engine(model, rows=1, queue=2) for _ in range(2)]
    replicas = [LocalReplica(engine, rank) for rank, engine in enumerate(engines)]
    with Front(replicas, model, patience=600) as front:
        moving = front.submit(prompt(40, 1), **{**GIVEN, "n": 1, "max_new_tokens": 200})
        next(iter(moving))
        left, other = home(front), 1 - home(front)
        go = paused(engines[left])
        waiting = front.submit(prompt(40, 1), **SHORT)  # it shares a beginning, so that it goes there too
        held = paused(engines[other])
        full = [engines[other].submit(prompt(30, seed), **SHORT) for seed in (5, 6)]
        with pytest.raises(QueueFull):
            engines[other].submit([1])
        ended: list[Request] = []
        for request in (moving, waiting, *full):
            request.when_done(ended.append)
        if lost:
            local(front, left).lose()
            go.set()
        else:
            go.set()
            front.drain_replica(local(front, left).id)
        wait_until(lambda: engines[other].load().waiting == 3)
        with pytest.raises(QueueFull):
            front.submit(prompt(30, 7), **SHORT)
        assert not (moving.done or waiting.done)
        held.set()
        for request in (moving, waiting, *full):
            request.result(600)
        check(moving, engines[other].submit(prompt(40, 1), **{**GIVEN, "n": 1, "max_new_tokens": 200}))
        check(waiting, engines[other].submit(prompt(40, 1), **SHORT))
        assert ended[0] is moving
    for engine in engines:
        engine.close()


def test_replicas_that_are_drained_do_not_count_as_lost() -> None:
    model = ours("llama")
    given = {**GIVEN, "max_new_tokens": 400}
    engines = [Engine(model) for _ in range(5)]
    with Front([LocalReplica(engine, rank) for rank, engine in enumerate(engines)], model) as front:
        answer = front.submit(prompt(40, 1), **given)
        assert isinstance(answer, MovingRequest)
        pieces = iter(answer)
        for _ in range(4):
            next(pieces)
            front.drain_replica(local(front, home(front)).id)
        check(answer, engines[home(front)].submit(prompt(40, 1), **given))
        assert answer.moves == 4
    for engine in engines:
        engine.close()


def test_an_answer_does_not_go_on_in_a_session_that_changed_meanwhile(tmp_path: Path) -> None:
    model, store = ours("llama"), f"file://{tmp_path}"
    engines = [Engine(model, store=store) for _ in range(2)]
    others: list[list[int]] = []

    def dies(told: Told, tokens: int) -> bool:
        if others or tokens < 4:
            return False
        free = next(engine for engine in engines if not engine.load().answering)
        others.append(free.session("one").send([9, 9], **SHORT).result(600).tokens[0])
        return True

    with Front([Mortal(engine, rank, dies) for rank, engine in enumerate(engines)], model) as front:
        with pytest.raises(SessionMoved, match="changed by another sender"):
            front.submit([5, 6, 7], session="one", **SHORT).result(600)
        again = front.submit([5, 6, 7], session="one", **SHORT).result(600)
        (left,) = front.replicas
        assert isinstance(left, LocalReplica)
        assert left.engine.session("one").tokens == [9, 9, *others[0], 5, 6, 7, *again.tokens[0]]
    for engine in engines:
        engine.close()


def test_a_turn_that_a_replica_stored_after_it_was_taken_for_lost_is_told_once(tmp_path: Path) -> None:
    """It moves, and the store refuses the second of the two; the sender gets the first."""
    model, store = ours("llama"), f"file://{tmp_path}"
    engines, held = [Engine(model, store=store) for _ in range(2)], list[Event]()

    def dies(told: Told, tokens: int) -> bool:
        if held or tokens < 4:
            return False
        held.append(paused(next(engine for engine in engines if not engine.load().answering)))
        return True

    with Front([Mortal(engine, rank, dies) for rank, engine in enumerate(engines)], model) as front:
        answer = front.submit([5, 6, 7], session="one", **{**SHORT, "max_new_tokens": 60})
        assert isinstance(answer, MovingRequest)
        wait_until(lambda: front.lost)
        (left,) = front.replicas
        assert isinstance(left, LocalReplica)
        (zombie,) = (engine for engine in engines if engine is not left.engine)
        wait_until(lambda: zombie.session("one").generation == 1)
        held[0].set()
        completion = answer.result(600)
        assert answer.moves == 2 and [token for piece in answer for token in piece.tokens] == completion.tokens[0]
        assert left.engine.session("one").tokens == [5, 6, 7, *completion.tokens[0]]
        assert left.engine.session("one").generation == 1
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("known", [True, False])
def test_a_turn_that_moved_with_another_front_is_told_whole(tmp_path: Path, known: bool) -> None:
    """This front knows none of its answer, or another part than the front that the turn moved with."""
    model, store = ours("llama"), f"file://{tmp_path}"
    drawn = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 1.0}
    given = {**drawn, "session": "one", "idempotency_key": "k"}
    with Engine(model) as alone, fleet(Engine(model, store=store), Engine(model, store=store), store=store) as two:
        cluster, channels = two
        with Cluster(channels, FrontFiles(), store) as other:
            asked = [other.front.submit([5, 6, 7], **given)]
            next(iter(asked[0]))
            home, left = sorted(channels, key=lambda channel: -channel.taken)
            go = paused(left.served.engine)
            if known:
                asked.append(cluster.front.submit([5, 6, 7], **given))
                next(iter(asked[1]))
            home.dies_after = 0
            wait_until(lambda: len(left.served._requests) == len(asked))
            if not known:
                asked.append(cluster.front.submit([5, 6, 7], **given))
                wait_until(lambda: len(left.served._requests) == 2)
            go.set()
            whole = alone.submit([5, 6, 7], seed=key_seed("one", "k"), **drawn)
            for request in asked:
                check(request, whole)
        assert left.served.engine.session("one").generation == 1 and left.served.engine.stats()["requests"] == 1


@pytest.mark.parametrize("leaves", [True, False])
def test_a_turn_that_is_sent_again_through_another_front_is_one_turn(tmp_path: Path, leaves: bool) -> None:
    """Both fronts tell all of it, and the first may end before it is over."""
    model, store = ours("llama"), f"file://{tmp_path}"
    given = {"session": "one", "idempotency_key": "k", "max_new_tokens": 80, "ignore_eos": True}
    with fleet(Engine(model, store=store), store=store) as (cluster, channels):
        engine = channels[0].served.engine
        other = Cluster(channels, FrontFiles(), store)
        first = other.front.submit([5, 6, 7], **given)
        next(iter(first))
        go = paused(engine)
        second = cluster.front.submit([5, 6, 7], **given)
        wait_until(lambda: len(channels[0].served._requests) == 2)
        if leaves:
            other.close()
            wait_until(lambda: len(channels[0].served._requests) == 1)
        go.set()
        answers = [second.result(600)] if leaves else [first.result(600), second.result(600)]
        for request, answer in zip([second] if leaves else [first, second], answers):
            assert answer.finished == ["length"] and [t for piece in request for t in piece.tokens] == answer.tokens[0]
        session = engine.session("one")
        assert session.generation == 1 and session.tokens == [5, 6, 7, *answers[0].tokens[0]]
        assert engine.stats()["requests"] == 1
        other.close()


def test_a_request_whose_sender_leaves_while_it_is_prepared_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet(Engine(ours("llama"))) as (_, (channel,)):
        served, begun, go = channel.served, Event(), Event()
        submit = served.engine.submit

        def slow(*given: Any, **options: Any) -> Request:
            begun.set()
            go.wait(600)
            return submit(*given, **options)

        monkeypatch.setattr(served.engine, "submit", slow)
        work = Work(PicturePrompt([1, 2]), SamplingParams(max_new_tokens=10**6, ignore_eos=True))
        told = pack(work_to_wire(work, [], served.id, "a", "b"))

        async def leave() -> None:
            asking = asyncio.ensure_future(anext(aiter(served.answer(told))))
            await asyncio.to_thread(begun.wait, 600)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            go.set()
            while served.engine.stats()["finished"] < 1:
                await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(leave(), 600))
        assert not served.engine.load().answering


def test_a_text_is_embedded_elsewhere_when_its_replica_hangs_or_has_ended() -> None:
    model, ids = ours("llama"), prompt(60, 2)
    engines = [Engine(model) for _ in range(3)]
    with Engine(model) as alone, fleet(*engines) as (cluster, channels):
        expected = alone.embed(ids).result(60)
        for channel in channels:
            channel.hangs.add("embed")
        vector = cluster.front.embed(ids)
        wait_until(lambda: any(channel.calls["embed"] for channel in channels))
        (hung,) = (rank for rank, channel in enumerate(channels) if channel.calls["embed"])
        ended, good = (channel for rank, channel in enumerate(channels) if rank != hung)
        ended.served.engine.close()
        for channel in (ended, good):
            channel.hangs.clear()
        (lost,) = (one for one in cluster.front.remote() if one.rank == hung)
        lost.lose(ReplicaLost("it is silent"))
        assert torch.equal(vector.result(60), expected)


def test_the_death_of_a_replica_without_answers_is_noticed_at_once() -> None:
    """Ray holds what is sent to it until another process has its rank."""
    model, ids = ours("llama"), prompt(60, 2)
    with Engine(model) as alone, fleet(Engine(model), Engine(model)) as (cluster, channels):
        for channel in channels:
            channel.hangs.add("answer")
        answer = cluster.front.submit(ids, **SHORT)
        wait_until(lambda: sum(len(one._listeners) for one in cluster.front.remote()) == 1)
        (held,) = (one.rank for one in cluster.front.remote() if one._listeners)
        channels[1 - held].hangs.clear()
        channels[held].dead = True
        check(answer, alone.submit(ids, **SHORT))


def test_few_texts_and_requests_wait_for_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmstate.cluster.front.MOST_WAITING", 2)
    model, ids = ours("llama"), prompt(60, 2)
    with fleet(Engine(model)) as (cluster, (channel,)):
        front, channel.dead = cluster.front, True
        wait_until(lambda: not any(one.takes for one in front.replicas))
        waiting = [front.embed(ids), front.submit(ids, **SHORT)]
        wait_until(lambda: front._texts_waiting == 1)
        with pytest.raises(NoReplica):
            front.embed(ids).result(60)
        with pytest.raises(NoReplica):
            front.submit(ids)
        assert sum(isinstance(thread, Timer) for thread in running_threads()) <= 1
        channel.dead = False
        assert all(one.result(60) is not None for one in waiting)
        assert front._texts_waiting == 0 and front.embed(ids).result(60) is not None


def test_a_lost_replica_does_not_hide_the_others() -> None:
    model, ids = ours("llama"), prompt(130, 5)
    with fleet(Engine(model), Engine(model)) as (cluster, channels):
        front = cluster.front
        front.submit(ids, **SHORT).result(600)
        homes = [channel for channel in channels if channel.taken]
        for channel in channels:
            channel.dead = channel not in homes
        assert front.stats()["requests"] == 1 and front.resident() and front.tree().count("replica ") == 1
        assert front.explain(ids).reused > 100 and front.load().waiting == 0
        front.clear_prefixes()
        assert front.explain(ids).reused == 0


def test_a_replica_that_could_not_be_drained_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(seconds: float) -> bool:
        raise ReplicaLost("it did not answer in time")

    with Front([LocalReplica(Engine(ours("llama")), 0)], ours("llama")) as front:
        monkeypatch.setattr(local(front, 0), "drain", fails)
        with pytest.raises(ReplicaLost):
            front.drain_replica("local-0")
        assert front.submit([1, 2], **SHORT).result(600)
