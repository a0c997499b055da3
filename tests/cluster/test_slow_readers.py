"""An answer that its reader leaves unread gives up its row at the replica too, and goes on to the bit."""

from __future__ import annotations

import asyncio

import pytest

from lmstate.cluster.front import Front
from lmstate.cluster.handle import LocalReplica
from lmstate.cluster.wire import WireNote, pack
from lmstate.engine import Engine, Request
from tests.cluster.helpers import fleet
from tests.cluster.test_front import check
from tests.engine.test_batching import prompt
from tests.engine.test_slow_readers import COUNT, UNREAD, begun
from tests.waiting import GUARD, wait_until
from tests.zoo import ours


def rested(*engines: Engine) -> int:
    """Answers that are set aside now, where no other one is decoded."""
    stats = [engine.stats() for engine in engines]
    return 0 if any(one["decoding"] for one in stats) else int(sum(one["set_aside"] for one in stats))


@pytest.mark.parametrize("wire", [True, False])
@pytest.mark.parametrize("case", ["llama", "qwen3_next-dense"])
def test_answers_rest_at_their_replica_while_nobody_reads_them(case: str, wire: bool) -> None:
    model = ours(case)
    engines = [Engine(model, rows=2) for _ in range(2)]
    replicas = [LocalReplica(engine, rank) for rank, engine in enumerate(engines)]
    with Engine(model) as alone, fleet(*engines) as (cluster, _), Front(replicas, model) as local:
        front = cluster.front if wire else local
        slow = [begun(front, seed, n=2) for seed in range(4)]
        wait_until(lambda: rested(*engines) == 8)
        quick = front.submit(prompt(20, 9), max_new_tokens=COUNT, ignore_eos=True)
        check(quick, alone.submit(prompt(20, 9), max_new_tokens=COUNT, ignore_eos=True))
        for seed, (request, pieces, read) in enumerate(slow):
            assert not request.done
            read += pieces
            check(request, alone.submit(prompt(20, seed), max_new_tokens=COUNT, ignore_eos=True, n=2))
            assert read == list(request)


def test_an_answer_that_rests_moves_when_its_replica_dies_and_rests_there() -> None:
    model = ours("llama")
    engines = [Engine(model, rows=2) for _ in range(2)]
    with Engine(model) as alone, fleet(*engines) as (cluster, channels):
        request, pieces, read = begun(cluster.front, 1)
        wait_until(lambda: rested(*engines) == 1)
        assert request.generated < COUNT
        home = next(channel for channel in channels if channel.taken)
        other = next(channel for channel in channels if channel is not home)
        home.dies_after = 0
        while not other.taken:
            read.append(next(pieces))
        wait_until(lambda: other.served.engine.stats()["rested"] > 0)
        assert request.generated < COUNT
        read += pieces
        check(request, alone.submit(prompt(20, 1), max_new_tokens=COUNT, ignore_eos=True))
        assert read == list(request)


def test_notes_of_a_reader_arrive_in_any_order_and_once_the_way_is_there() -> None:
    model = ours("llama")
    with fleet(Engine(model, rows=1)) as (cluster, (channel,)):
        request, pieces, _ = begun(cluster.front, 1)
        wait_until(lambda: rested(channel.served.engine) == 1)
        (remote,) = channel.served._requests
        asyncio.run(channel.served.note(pack(WireNote(remote, read=-3, max_unread=UNREAD))))
        channel.deaf = True
        for _ in range(UNREAD):
            next(pieces)
        channel.deaf = False
        wait_until(lambda: channel.served.engine.stats()["rested"] == 2)
        request.cancel()
        assert request.result(GUARD).finished == ["cancelled"]


def test_only_a_reader_makes_an_answer_rest() -> None:
    with fleet(Engine(ours("llama"), rows=1)) as (cluster, (channel,)):
        request: Request = cluster.front.submit(prompt(20, 1), max_new_tokens=COUNT, ignore_eos=True)
        request.max_unread = 0
        assert len(request.result(GUARD).tokens[0]) == COUNT
        assert channel.served.engine.stats()["rested"] == 0
