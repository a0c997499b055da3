"""A model over processes: the bits of one, and what happens when one of them dies or hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch

import lmstate
from lmstate.cluster.replica import EngineReplica, ReplicaSpec
from lmstate.distributed import given
from lmstate.distributed.channel import RankChannel
from lmstate.distributed.identity import identity
from lmstate.distributed.model import ParallelModel
from lmstate.engine import EngineClosed
from lmstate.errors import ModelError, RanksError
from tests.distributed.helpers import same, saved
from tests.real_model import smollm2
from tests.state.test_other_device import IDS, story
from tests.waiting import wait_until

TIMEOUT = 4.0
"""Seconds that the ranks wait for each other here."""
LONG = 25.0  # within which the ranks are gone, on a busy machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("model"))


def opened(folder: Path, ranks: int = 2, kind: str = "float32", timeout: float = TIMEOUT) -> ParallelModel:
    model = lmstate.load(folder, weights=kind, parallel=ranks, parallel_timeout=timeout)
    assert isinstance(model, ParallelModel)
    return model


def followers(of: int | None = None) -> list[int]:
    """Ids of the processes that follow this one, or another."""
    parent, found = of or os.getpid(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            line, fields = (entry / "cmdline").read_bytes(), (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"lmstate.distributed.follower" in line and fields[0] != "Z" and (int(fields[1]) == parent):
            found.append(int(entry.name))
    return found


def gone(processes: list[int]) -> bool:
    """Whether all of these processes end in time."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        if not any(Path(f"/proc/{process}").exists() and not _is_zombie(process) for process in processes):
            return True
        time.sleep(0.05)
    return False


def _is_zombie(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_two_processes_give_the_bits_of_one(folder: Path, tmp_path: Path) -> None:
    two = opened(folder, kind="int8", timeout=60)
    assert "1 of 2 processes; 3 of 3 layers" in repr(two)
    assert same(story(two, tmp_path), story(lmstate.load(folder, weights="int8"), tmp_path))
    (other,) = followers()
    two.close()
    assert gone([other])
    with pytest.raises(RanksError, match="closed"):
        two([IDS])


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_a_real_model_gives_the_same_bits(kind: str, tmp_path: Path) -> None:
    """With matrices that are packed, and 3 kv heads for 2 ranks."""
    file = smollm2()
    two = opened(file, kind=kind, timeout=60)
    assert same(story(two, tmp_path), story(lmstate.load(file, weights=kind), tmp_path))
    two.close()


@pytest.mark.soak
def test_three_processes_and_two_kv_heads(folder: Path, tmp_path: Path) -> None:
    three = opened(folder, 3, timeout=60)
    assert "0 of 3 layers" in repr(three)
    assert same(story(three, tmp_path), story(lmstate.load(folder, weights="float32"), tmp_path))
    three.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs_ends_the_model(folder: Path, how: signal.Signals) -> None:
    model = opened(folder)
    state = model.new_state()
    model([IDS[:5]], state)
    (other,) = followers()
    os.kill(other, how)
    start = time.monotonic()
    with pytest.raises(RanksError, match="over 2 processes was lost"):
        model([IDS[5:9]], state)
    assert time.monotonic() - start < LONG
    assert gone([other])
    for later in (lambda: model([IDS]), lambda: state.rewind(0, 1), lambda: model.new_state()):
        with pytest.raises(RanksError, match="load it again"):
            later()


def test_an_engine_gives_the_answers_of_one_process(folder: Path, tmp_path: Path) -> None:
    """Several at a time, with drafts, from a store too."""
    two, one = opened(folder, timeout=60), lmstate.load(folder, weights="float32")
    said: list[list[list[int]]] = []
    for model in (two, one, two):
        with lmstate.Engine(model, rows=3, store=tmp_path) as engine:
            requests = [engine.submit(IDS[:9] * (2 + n), max_new_tokens=20, ignore_eos=True, n=2) for n in range(4)]
            said.append([tokens for request in requests for tokens in request.result(300).tokens])
    assert said[0] == said[1] == said[2]
    two.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_ends_with_a_process_of_its_model(folder: Path, how: signal.Signals) -> None:
    """Every request gets the same error, those that wait too, and no later one begins."""
    model = opened(folder)
    with lmstate.Engine(model, rows=2) as engine:
        requests = [engine.submit(IDS[:9], max_new_tokens=400, ignore_eos=True) for _ in range(5)]
        next(iter(requests[0]))
        (other,) = followers()
        os.kill(other, how)
        errors = []
        for request in requests:
            with pytest.raises(RanksError, match="over 2 processes was lost") as caught:
                request.result(LONG)
            errors.append(str(caught.value))
        assert len(set(errors)) == 1
        assert gone([other])
        for later in (lambda: engine.submit([1]), lambda: engine.session("a"), lambda: engine.tree()):
            with pytest.raises(EngineClosed, match="load it again, and make another engine"):
                later()


def test_an_engine_that_rests_notices_that_a_process_has_died(folder: Path) -> None:
    with lmstate.Engine(opened(folder)) as engine:
        (other,) = followers()
        os.kill(other, signal.SIGKILL)
        wait_until(lambda: "closed" in repr(engine))
        with pytest.raises(EngineClosed, match="over 2 processes was lost"):
            engine.submit([1])


def test_a_replica_over_processes_is_not_healthy_without_one(folder: Path) -> None:
    spec = ReplicaSpec(str(folder), weights="float32", parallel=2)
    replica = EngineReplica(0, msgspec.json.encode(spec))
    replica.check_health()
    os.kill(followers()[0], signal.SIGKILL)
    wait_until(lambda: replica.engine.failure is not None)
    with pytest.raises(EngineClosed):
        replica.check_health()


def test_the_others_end_with_rank_0(folder: Path) -> None:
    code = (
        "import lmstate, sys, time\n"
        f"model = lmstate.load({str(folder)!r}, weights='float32', parallel=2)\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "ready\n"
        (other,) = followers(first.pid)
        first.kill()
    assert gone([other])


def test_what_cannot_be_loaded_leaves_no_process(folder: Path) -> None:
    for options in ({"device": ["cpu", "meta"]}, {"trainable": True}, {"heads": folder}):
        with pytest.raises((ModelError, ValueError)):
            lmstate.load(folder, parallel=2, **options)
    for wrong in (0, 1000):
        with pytest.raises(ValueError, match=f"parallel={wrong}"):
            lmstate.load(folder, parallel=wrong)
    (folder / "damaged").mkdir()
    (folder / "damaged" / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises((ModelError, OSError)):
        lmstate.load(folder / "damaged", parallel=2)
    assert not followers()


def test_ranks_that_are_given_end_when_one_of_them_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(given, "_store", lambda: store)
    monkeypatch.setattr(given, "_told", False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with ThreadPoolExecutor(1) as threads, ExitStack() as ends:
        leading = threads.submit(given.lead, 3, 5.0)
        told = json.loads(store.get(given.MEETING))
        made = {}
        for rank, purpose in product((1, 2), (given.COMMANDS, given.TENSORS)):
            made[rank, purpose] = ends.enter_context(socket.socket(socket.AF_UNIX))
            made[rank, purpose].connect(told["at"])
            made[rank, purpose].sendall(bytes.fromhex(told["secret"]) + bytes((rank, purpose)))
            made[rank, purpose].settimeout(5)
        RankChannel(made[1, given.COMMANDS]).send("here", identity())
        made[2, given.COMMANDS].close()
        with pytest.raises(RanksError, match="process 2 of 3 did not start"):
            leading.result(60)
        assert made[1, given.TENSORS].recv(1) == b""  # it is told to end, while somebody may hold the error
        channel = RankChannel(made[1, given.COMMANDS])
        begun = channel.receive()
        assert begun is not None and begun[0] == "begin" and channel.receive() is None


def test_a_connection_without_the_secret_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another program, on the network of several machines say. One with another version ends the ranks."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(given, "_store", lambda: store)
    monkeypatch.setattr(given, "_told", False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.3")):
        monkeypatch.setenv(name, value)
    with ThreadPoolExecutor(1) as threads, ExitStack() as ends:
        leading = threads.submit(given.lead, 2, 5.0)
        told = json.loads(store.get(given.MEETING))
        assert told["at"][0] == "127.0.0.3"
        for begin in (bytes(given.SECRET) + b"\1\0", bytes.fromhex(told["secret"]) + b"\7\0"):
            stranger = ends.enter_context(socket.create_connection(told["at"], 5))
            stranger.sendall(begin)
            assert stranger.recv(1) == b""
        for purpose in (given.COMMANDS, given.TENSORS):
            rank = ends.enter_context(socket.create_connection(told["at"], 5))
            rank.sendall(bytes.fromhex(told["secret"]) + bytes((1, purpose)))
            if purpose == given.COMMANDS:
                RankChannel(rank).send("here", "lmstate 0.0.1 with avx2")
        with pytest.raises(RanksError, match=r"process 1 of 2 is lmstate 0\.0\.1 with avx2 and process 0 is"):
            leading.result(60)
