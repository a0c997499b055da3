"""The program over processes: those that it starts, and those that torchrun does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest

import lmstate
from tests.distributed.test_processes import LONG, followers, gone
from tests.serve.running import save_tiny

HOWS = ["spawned", "torchrun"]
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def command(how: str, *arguments: str) -> list[str]:
    """`lmstate` over two processes."""
    ran = [sys.executable, "-m"]
    if how == "torchrun":
        ran += ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    return [*ran, "lmstate", *arguments, "--parallel", "2", "--weights", "float32"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@contextmanager
def serving(how: str, tiny: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client, list[int]]]:
    """A server, a client of it, and the ids of its other processes."""
    asked = command(how, "serve", str(tiny), "--port", "0", "--threads", "1", *options)
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = ""
            while " at http://" not in line:
                line = server.stderr.readline()
                assert line, "the server ended"
            url = line.partition(" at ")[2].split()[0]
            others = followers(server.pid) if how == "spawned" else workers(server.pid)
            with httpx.Client(base_url=url, timeout=LONG) as client:
                yield server, client, others
        finally:
            server.terminate()  # torchrun ends its processes then
            try:
                server.wait(LONG)
            except subprocess.TimeoutExpired:
                server.kill()


def workers(agent: int) -> list[int]:
    """Ids of the processes of torchrun that are not rank 0."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            given = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == agent and b"RANK=1" in given:
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize("how", HOWS)
def test_a_server_answers_as_one_process_and_ends_whole(how: str, tiny: Path, tmp_path: Path) -> None:
    """What a server of two processes stored, one of one process goes on with."""
    with serving(how, tiny, "--store", str(tmp_path)) as (server, client, others):
        assert len(others) == 1 and client.get("/health").json() == {"status": "ok"}
        said = client.post("/v1/chat/completions", json=ASKED).raise_for_status().json()
        server.send_signal(signal.SIGTERM)
        server.wait(LONG)
        assert gone(others)
    with lmstate.Engine(lmstate.load(tiny, weights="float32"), store=tmp_path) as engine:
        got = engine.submit(ASKED["messages"], max_new_tokens=12, ignore_eos=True).result(LONG)
    assert got.texts == [said["choices"][0]["message"]["content"]]
    assert got.usage.reuse.tier == "folder"


@pytest.mark.parametrize("how", HOWS)
def test_a_server_ends_with_a_process_of_its_model(how: str, tiny: Path) -> None:
    with serving(how, tiny) as (server, _, others):
        os.kill(others[0], signal.SIGKILL)
        assert server.stderr is not None
        told = server.stderr.read()
        assert server.wait(LONG) != 0
        assert how == "torchrun" or "lmstate: the model over 2 processes was lost" in told


GENERATE = ["-n", "8", "--ignore-eos", "--weights", "float32"]


@pytest.fixture(scope="module")
def said_by_one(tiny: Path) -> str:
    asked = [sys.executable, "-m", "lmstate", "generate", str(tiny), "Hello", *GENERATE]
    ran = subprocess.run(asked, capture_output=True, timeout=100, input="", text=True)
    assert ran.returncode == 0 and len(ran.stdout) > 3, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("how", HOWS)
def test_generate_says_what_one_process_says(how: str, tiny: Path, said_by_one: str) -> None:
    asked = command(how, "generate", str(tiny), "Hello", *GENERATE)
    ran = subprocess.run(asked, capture_output=True, timeout=100, input="", text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == said_by_one


def test_mode_sum_has_other_snapshots(tiny: Path, tmp_path: Path) -> None:
    """Those of one process are refused, with the mode in the message."""
    asked, row = command("spawned", "generate", str(tiny), "Hello", "-n", "4"), str(tmp_path / "row")
    ran = subprocess.run([*asked, "--parallel-mode", "sum", "--save-state", row], timeout=100, input=b"")
    assert ran.returncode == 0
    ran = subprocess.run([*asked, "--state", row], stderr=subprocess.PIPE, timeout=100, input=b"")
    assert ran.returncode == 1 and b"parallel is sum:2 there and not set here" in ran.stderr, ran.stderr


def test_other_ranks_than_were_asked_for_are_refused(tiny: Path) -> None:
    asked = [sys.executable, "-m", "lmstate", "generate", str(tiny), "Hello", "--parallel", "2"]
    given = {**os.environ, "RANK": "0", "WORLD_SIZE": "3"}
    ran = subprocess.run(asked, env=given, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 1 and "gives 3 ranks" in ran.stderr, ran.stderr


def of_each_rank(asked: list[str], **environment: str) -> list[tuple[int, str, str]]:
    """The exit code, output and messages of `lmstate` in each of two ranks, which no launcher watches."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", **environment}
    ranks = []
    for rank in "01":
        given = {**os.environ, **environment, "RANK": rank}
        command = [sys.executable, "-m", "lmstate", *asked, "--parallel", "2"]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, env=given, text=True, **pipes))
    said = [rank.communicate(timeout=100) for rank in ranks]
    return [(rank.returncode, *told) for rank, told in zip(ranks, said, strict=True)]


def free_port() -> int:
    """A port that no program listens at."""
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_the_others_end_with_the_reason_where_rank_0_cannot_begin(how: str, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    begin = monotonic()
    ended = of_each_rank(["generate", str(tmp_path if how == "damaged" else tmp_path / "none"), "Hello"])
    assert monotonic() - begin < 60 and all(code == 1 for code, *_ in ended)
    why = "could not load the model: " if how == "damaged" else "ended before it led a model"
    assert f"lmstate: rank 0 {why}" in ended[1][2], ended


def test_ranks_of_several_machines_say_what_one_process_says(tiny: Path, said_by_one: str) -> None:
    """They meet at an address, each the only one of its machine."""
    ended = of_each_rank(["generate", str(tiny), "Hello", *GENERATE], MASTER_ADDR="127.0.0.2", LOCAL_WORLD_SIZE="1")
    assert [code for code, *_ in ended] == [0, 0], ended
    assert [said for _, said, _ in ended] == [said_by_one, ""]


@pytest.mark.soak
def test_launchers_of_several_machines_say_what_one_process_says(tiny: Path, said_by_one: str) -> None:
    launchers, port = [], free_port()
    for node in (0, 1):
        how = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", "127.0.0.2"]
        how += ["--master-port", str(port), "--local-addr", f"127.0.0.{2 + node}", "-m"]
        asked = ["lmstate", "generate", str(tiny), "Hello", "--parallel", "2", *GENERATE]
        launchers.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *how, *asked],
                stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
            )
        )  # fmt: skip
    assert [each.communicate(timeout=100)[0] for each in launchers] == [said_by_one, ""]
    assert [each.returncode for each in launchers] == [0, 0]
