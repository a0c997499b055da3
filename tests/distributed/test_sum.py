"""Mode "sum": ranks add their products. Its bits are its own, and the cuts of the stream change none of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import lmstate
from lmstate.distributed.model import ParallelModel
from lmstate.errors import SnapshotError, StateError
from lmstate.models.fingerprint import weights_in
from lmstate.models.model import Model
from lmstate.ops.weights.split import SummedWeight
from tests.distributed.helpers import WIDE, Meeting, one_process, over_threads, same, saved
from tests.distributed.test_bits import KINDS
from tests.distributed.test_states import OPERATIONS
from tests.invariants.test_interleavings import Run
from tests.state.test_other_device import story
from tests.sweeps import sampled
from tests.zoo import CASES, text

IDS = text(60)[0].tolist()


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The root mean square of the differences between logits; NaN stands where it does in both."""
    each = torch.cat([(a - b).flatten() for a, b in zip(found, expected, strict=True)])
    theirs = torch.cat([b.flatten() for b in expected])
    assert torch.equal(each.isnan(), theirs.isnan())
    return float(each.nan_to_num().square().mean().sqrt())


@pytest.mark.parametrize("case", sampled(list(CASES), KINDS))
def test_every_family_is_close_to_one_process(case: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path)
    with over_threads(folder, "float32", 2, "sum") as (model, _):
        for ours, theirs in zip(story(model, tmp_path), story(one_process(folder, "float32"), tmp_path), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("case", list(WIDE))
def test_every_storage_is_close_to_one_process(case: str, kind: str, tmp_path: Path) -> None:
    """Closer than the rounding of the storage leaves that to float32."""
    folder = saved(case, tmp_path, wide=True)
    one, exact = (story(one_process(folder, each), tmp_path) for each in (kind, "float32"))
    with over_threads(folder, kind, 2, "sum") as (model, _):
        kinds = [weight.kind for _, weight in weights_in(model.blocks) if isinstance(weight, SummedWeight)]
        assert any(each.startswith(kind) for each in kinds)
        assert distance(story(model, tmp_path), one) < 0.5 * distance(one, exact)


@pytest.fixture(scope="module", params=[("llama", 3), ("mistral", 2), ("qwen3_next-dense", 2), ("nemotron_h-moe", 2)])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Model, ParallelModel, Meeting]]:
    """A model in one process, and over ranks that add."""
    case, ranks = request.param
    folder = saved(case, tmp_path_factory.mktemp("model"))
    with over_threads(folder, "float32", ranks, "sum") as (model, meeting):
        yield one_process(folder, "float32"), model, meeting


def test_any_interleaving_equals_recomputation(both: tuple[Model, ParallelModel, Meeting]) -> None:
    @settings(max_examples=2, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(operations=st.lists(OPERATIONS, min_size=20, max_size=20), rewind=st.sampled_from([0, 3, 16]))
    def interleave(operations: list[tuple], rewind: int) -> None:
        run = Run(both[1], rewind, carries=32)
        for turn, (name, *arguments) in enumerate(operations):
            getattr(run, name)(*arguments)
            run.mirror.check(probe=turn % 3 == 2)

    interleave()


def test_cuts_change_no_bit(both: tuple[Model, ParallelModel, Meeting]) -> None:
    _, two, _ = both
    whole = two([IDS], two.new_state())
    for width in (1, 7):
        state = two.new_state()
        for first in range(0, len(IDS), width):
            found = two([IDS[first : first + width]], state)
        assert same([found], [whole])


def test_its_snapshots_are_its_own(both: tuple[Model, ParallelModel, Meeting], tmp_path: Path) -> None:
    one, two, _ = both
    assert two.fingerprint == f"{one.fingerprint} parallel=sum:{two.ranks.count}"  # type: ignore[union-attr]
    snapshots = {}
    for model in (one, two):
        state = model.new_state()
        model([IDS[:30]], state)
        state.snapshot(0).save(tmp_path / "row")
        snapshots[model] = lmstate.Snapshot.load(tmp_path / "row")
    other = replace(snapshots[two], fingerprint=snapshots[two].fingerprint.replace("sum:", "sum:1"))
    for model, refused in ((one, snapshots[two]), (two, snapshots[one]), (two, other)):
        state = model.new_state()
        with pytest.raises(SnapshotError, match="parallel is"):
            state.restore(0, refused)
        with pytest.raises(SnapshotError, match="parallel is"):
            state.add(refused)
        assert state.rows == 1 and state.lengths == [0]
    state = two.new_state()
    state.restore(0, snapshots[two])
    assert same([two([IDS[30:40]], state)], [two([IDS[:40]], two.new_state())])
    with pytest.raises(StateError):
        one([IDS[:1]], state)


def test_a_block_exchanges_twice(tmp_path: Path) -> None:
    """The outputs of attention, and those of the feed-forward part."""
    with over_threads(saved("llama", tmp_path), "float32", 2, "sum") as (model, meeting):
        state = model.new_state()
        model([[1, 2, 3]], state)
        before, sums = meeting.gathers, meeting.sums
        model([[4]], state)
        assert meeting.sums - sums == 2 * len(model.blocks)
        assert meeting.gathers - before == 2  # the embedding, the logits


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_each_rank_holds_half(kind: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path, wide=True)
    whole = sum(one_process(folder, kind).weight_totals.nbytes.values())
    with over_threads(folder, kind, 2, "sum") as (two, meeting):
        two([IDS])
        for part in (two, meeting.followers[0].model):
            assert sum(part.weight_totals.nbytes.values()) <= 0.55 * whole
            assert any(isinstance(weight, SummedWeight) for _, weight in weights_in(part.blocks))
