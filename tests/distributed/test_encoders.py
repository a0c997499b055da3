"""Models with an encoder over two ranks: each has its part of the encoder, and of the keys and values of a source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate.errors import StateError
from lmstate.models.model import Model
from tests.distributed.helpers import one_process, over_threads, same, saved
from tests.sweeps import sampled
from tests.zoo import ENCODERS, conditioned, source, text

IDS = text(30)[0].tolist()


def told(model: Model, folder: Path) -> list[Tensor]:
    """Logits of rows with sources, on the way through what a state does."""
    state = conditioned(model, model.new_state(2))
    out = [model([IDS[:9], IDS[:4]], state), model([IDS[9:12], []], state)]
    state.snapshot(1).save(folder / "row")
    state.rewind(0, 3)
    state.select([0, 1, 0, None])
    state.restore(3, lmstate.Snapshot.load(folder / "row"))
    out.append(model([IDS[:2], IDS[:1], [], IDS[:3]], state, logits="all"))
    state.rewind(0, 0)
    state.condition(0, source(model, 12, seed=5))
    state.remove(2)
    out.append(model([IDS[:3], [], [], []], state))
    state.rewind(1, 0)
    fresh = state.snapshot(1)  # a source, and no tokens yet
    assert state.add(fresh) == 2
    return [*out, model([[], IDS[:2], IDS[:2], []], state)]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("case", sampled(list(ENCODERS), ["bart", "t5-gated", "t5gemma", "whisper"]))
def test_every_encoder_gives_the_bits_of_one_process(case: str, kind: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path)
    with over_threads(folder, kind, 2) as (model, _):
        one = one_process(folder, kind)
        assert model.fingerprint == one.fingerprint
        assert same(told(model, tmp_path), told(one, tmp_path))


@pytest.mark.parametrize("case", ["bart", "whisper"])
def test_a_snapshot_with_a_source_is_that_of_one_process(case: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path)
    with over_threads(folder, "float32", 2) as (model, _):
        one, snapshots = one_process(folder, "float32"), []
        for of in (one, model):
            state = conditioned(of, of.new_state())
            of([IDS[:7]], state)
            snapshots.append(state.snapshot(0))
        for theirs, ours in zip(*(each.layers for each in snapshots), strict=True):
            assert set(theirs) == set(ours) and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_source_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    with over_threads(saved("bart", tmp_path), "float32", 2) as (model, _):
        state = conditioned(model, model.new_state())
        expected = model([IDS[:5]], state)
        for row, wrong in ((0, IDS[:4]), (1, IDS[:4])):
            with pytest.raises(StateError):
                state.condition(row, wrong)
        other = model.new_state()
        for wrong in ([], IDS * 20, [10**6]):
            with pytest.raises(StateError):
                other.condition(0, wrong)
        conditioned(model, other)
        assert same([model([IDS[:5]], other)], [expected])


@pytest.mark.parametrize("case", ["bart", "whisper"])
def test_an_engine_answers_each_source_as_in_one_process(case: str, tmp_path: Path) -> None:
    """Sources in rows beside each other and one after the other, from a store that both write."""
    folder = saved(case, tmp_path / "model")
    with over_threads(folder, "float32", 2) as (two, _):
        one, answers = one_process(folder, "float32"), []
        for model in (one, two, two, one):
            with lmstate.Engine(model, rows=2, store=tmp_path / "store") as engine:
                begun: list[list[int] | None] = [None, IDS[:9], IDS[:9]]
                asked = [
                    engine.submit(start, max_new_tokens=5, source=source(model, length, seed=length))
                    for length, start in zip((5, 40, 33), begun)
                ]
                answers.append([request.result(600).tokens for request in asked])
                assert engine.stats()["folder_failed"] == 0
        assert all(each == answers[0] for each in answers)
