"""The engine over two ranks that are threads: the answers, stores and files of one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmstate
from lmstate.distributed.blocks import RankBlocks
from lmstate.distributed.model import ParallelModel
from lmstate.models.model import Model
from tests.distributed.helpers import Meeting, one_process, over_threads, saved
from tests.engine.test_batching import KINDS, prompt
from tests.engine.test_prefixes import ask
from tests.engine.test_schedules import SETTINGS, check_schedules, no_collection  # noqa: F401
from tests.waiting import wait_until

Both = tuple[Model, ParallelModel, Meeting]


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A model in one process, and over two ranks."""
    folder = saved(KINDS[request.param], tmp_path_factory.mktemp("model"))
    with over_threads(folder, "float32", 2) as (model, meeting):
        yield one_process(folder, "float32"), model, meeting


@pytest.mark.parametrize("setting", SETTINGS)
def test_any_schedule_gives_each_request_what_it_gets_alone(
    both: Both, setting: str, request: pytest.FixtureRequest
) -> None:
    one, two, _ = both
    check_schedules(two, SETTINGS[setting], request.config.getoption("--interleavings") // 160, one)


def test_a_store_moves_between_one_process_and_two(both: Both, tmp_path: Path) -> None:
    """What either writes is of the same names and bits, and found by the other."""
    text = prompt(90, 1)
    for turn in range(4):
        with lmstate.Engine(both[turn % 2], store=tmp_path) as engine:
            got = ask(engine, text)
            if turn:
                assert got.usage.reuse.tier == "folder" and got.usage.prompt - got.usage.reused <= 10
            assert engine.stats()["folder_failed"] == 0
        with lmstate.Engine(both[0]) as other:
            assert ask(other, text).tokens == got.tokens
        text = [*text, *got.tokens[0], *prompt(9, 2 + turn)]


def test_a_session_moves_between_one_process_and_two(both: Both, tmp_path: Path) -> None:
    files = []
    for number, model in enumerate(both[:2]):
        with lmstate.Engine(model) as engine:
            session = engine.session("a")
            session.send(prompt(100, 1), max_new_tokens=5).result(600)
            session.save(tmp_path / str(number))
            files.append((tmp_path / str(number)).read_bytes())
    assert files[0] == files[1]
    for model in both[:2]:
        with lmstate.Engine(model) as engine:
            session = engine.load_session("a", tmp_path / "1")
            got = session.send(prompt(9, 2), max_new_tokens=5).result(600)
            assert got.usage.prompt - got.usage.reused <= 10
            assert engine.session("a").tokens[-len(got.tokens[0]) :] == got.tokens[0]


def test_blocks_stay_with_their_ranks(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is gathered to keep a prefix or to go on from it, and all ranks let go of a block at the same time."""
    _, two, meeting = both
    two([[1]])  # all are there
    held = meeting.followers[0].blocks._blocks
    monkeypatch.setattr(RankBlocks, "__getitem__", None)
    with lmstate.Engine(two) as engine:
        text = prompt(200, 1)
        text += ask(engine, text).tokens[0]
        assert ask(engine, [*text, 5]).usage.reused >= 200
        kept = blocks_of(engine)
        wait_until(lambda: all(number in held for number in kept))
    del engine
    gc.collect()
    two([[1]])  # the next command says it
    wait_until(lambda: not any(number in held for number in kept))


def blocks_of(engine: lmstate.Engine) -> set[int]:
    """The numbers of all blocks in the prefix store of an engine over ranks."""
    ranks = engine.model.ranks  # type: ignore[attr-defined]
    return {ranks.blocks.of(block) for _, node in engine._reuse.prefixes.nodes() for block in node.blocks()}
