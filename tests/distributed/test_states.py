"""All that can be done to a state, over two ranks that are threads."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import lmstate
from lmstate.cluster.serving import FrontFiles
from lmstate.distributed.model import ParallelModel
from lmstate.errors import CapacityError, SnapshotError, StateError, UnsupportedError
from lmstate.generation import generate
from lmstate.models.model import Model
from tests.audio.hearing import saved as saved_hearing
from tests.cluster.helpers import fleet
from tests.distributed.helpers import Meeting, one_process, over_threads, same, saved
from tests.generation.fake_model import FakeTokenizer
from tests.invariants.test_interleavings import MOST, OPERATION, Run
from tests.vision.test_encode import saved as saved_seeing
from tests.zoo import text

IDS = text(60)[0].tolist()
OPERATIONS = OPERATION.filter(lambda operation: operation[0] != "fail")  # a fault inside a forward ends the ranks
Both = tuple[Model, ParallelModel, Meeting]


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3_next-dense", "falcon_h1", "llama-longrope"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A model in one process, and over two ranks."""
    folder = saved(request.param, tmp_path_factory.mktemp("model"))
    with over_threads(folder, "float32", 2) as (model, meeting):
        yield one_process(folder, "float32"), model, meeting


def test_any_interleaving_equals_recomputation(both: Both) -> None:
    @settings(max_examples=4, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(operations=st.lists(OPERATIONS, min_size=20, max_size=20), rewind=st.sampled_from([0, 3, 16]))
    def interleave(operations: list[tuple], rewind: int) -> None:
        run = Run(both[1], rewind, carries=32)
        for turn, (name, *arguments) in enumerate(operations):
            getattr(run, name)(*arguments)
            for row, tokens in enumerate(run.mirror.rows):
                if len(tokens) > MOST:
                    run.far(row, 0.3)
            run.mirror.check(probe=turn % 3 == 2)

    interleave()


def test_a_snapshot_is_that_of_one_process(both: Both, tmp_path: Path) -> None:
    one, two, _ = both
    snapshots = []
    for model in (one, two):
        state = model.new_state()
        model([IDS[:30]], state)
        snapshots.append(state.snapshot(0))
        snapshots[-1].save(tmp_path / f"{len(snapshots)}")
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    for model in (one, two):
        for snapshot in (*snapshots, lmstate.Snapshot.load(tmp_path / "2")):
            state = model.new_state()
            state.restore(0, snapshot)
            number = state.add(snapshot)
            assert same([model([IDS[30:33], IDS[30:33]], state)[number]], [one([IDS[:33]])[0, -1]])  # type: ignore[index]


def test_trees_and_copies(both: Both) -> None:
    found = []
    for model in both[:2]:
        state = model.new_state()
        model([IDS[:9]], state)
        other = copy.deepcopy(state)
        out = [model([IDS[9:13]], state, commit=False, parents=[[-1, 0, 0, -1]])]
        state.commit_path([[0, 2]])
        out += [model([IDS[20:22]], state), model([IDS[20:22]], other)]
        found.append(out)
    assert same(found[1], found[0])


def test_answers_with_drafts_are_the_same(both: Both) -> None:
    said = []
    for model in both[:2]:
        whole = replace(model, _tokenizer=FakeTokenizer(), eos_ids=frozenset())  # type: ignore[arg-type]
        state = whole.new_state()
        generate(whole, [IDS[:9] * 3], state, max_new_tokens=12, draft="text")
        said.append(state.tokens(0))
    assert said[0] == said[1]


def test_the_others_let_go_what_rank_0_lets_go(both: Both) -> None:
    _, two, meeting = both
    gc.collect()
    two([IDS[:3]])
    held = len(meeting.followers[0].states)
    for _ in range(3):
        two([IDS[:3]], two.new_state())
    gc.collect()
    two([IDS[:3]])
    assert len(meeting.followers[0].states) <= held + 1


def test_what_is_refused_changes_nothing(both: Both) -> None:
    one, two, _ = both
    state = two.new_state(capacity=20)
    expected = two([IDS[:9]], state)
    assert expected is not None
    for refused in (
        lambda: two([IDS[:12]], state),
        lambda: two([[10**6]], state),
        lambda: state.rewind(0, 99),
        lambda: state.rewind(4, 0),
        lambda: state.select([]),
        lambda: one([IDS[:1]], state),
        lambda: two([IDS[:1]], one.new_state()),
        lambda: two.new_state(static=True),
        lambda: two.new_state(kv=lmstate.kv.Recent(64)),
        lambda: two.trace([IDS[:1]], on=lambda *_: None),
    ):
        with pytest.raises(StateError):
            refused()
    with pytest.raises(CapacityError):
        state.restore(0, one_snapshot(one, 25))
    short = one_snapshot(one, 9)
    cut = replace(short, layers=tuple({name: part[:1] for name, part in layer.items()} for layer in short.layers))
    with pytest.raises(SnapshotError):
        state.restore(0, cut)
    with pytest.raises(UnsupportedError, match="pictures"):
        state.place(0, 9, None)  # type: ignore[arg-type]
    assert same([two([[]], state)], [expected])  # type: ignore[list-item]
    assert same([two([IDS[9:10]], state)], [one([IDS[:10]])[:, -1]])  # type: ignore[index, list-item]


@pytest.mark.parametrize("ability", ["sees", "takes_sounds"])
def test_pictures_and_sounds_are_refused_before_one_is_sent(ability: str, tmp_path: Path) -> None:
    """A model over several processes, and a front of such ones, say that they take none, whatever the folder has."""
    if ability == "sees":
        saved_seeing(tmp_path)
    else:
        saved_hearing("qwen2_audio", tmp_path)
    alone = lmstate.load(tmp_path, weights="float32")
    with over_threads(tmp_path, "float32", 2) as (two, _):
        two.folder, two._tokenizer = alone.folder, alone.tokenizer
        with fleet(lmstate.Engine(two), files=FrontFiles.of(str(tmp_path))) as (cluster, _):
            for model in (two, cluster.front.model):
                assert getattr(alone, ability) and not getattr(model, ability)
                with pytest.raises(UnsupportedError, match=r"no pictures, and no sounds .*: load it without parallel"):
                    model.pictures()


def one_snapshot(model: Model, length: int) -> lmstate.Snapshot:
    state = model.new_state()
    model([IDS[:length]], state)
    return state.snapshot(0)


SPLIT = (
    "llama", "gemma2", "qwen3_moe", "qwen3_next", "kimi_linear", "mamba2-groups", "mamba2", "jamba", "zamba-deep",
    "recurrent_gemma", "rwkv-wide", "xlstm-biased", "lfm2-biased", "minimax", "falcon_h1", "zamba2-adapters", "inkling",
)  # fmt: skip
"""A case of each kind of layer that is split."""


@pytest.mark.parametrize("case", SPLIT)
def test_each_rank_holds_half(case: str, tmp_path: Path) -> None:
    """Of the weights and of the state together, 0.55 on average."""
    folder = saved(case, tmp_path)
    one = one_process(folder, "float32")
    with over_threads(folder, "float32", 2) as (two, meeting):
        states = [model.new_state(rewind=0) for model in (one, two)]
        for model, state in zip((one, two), states):
            model([IDS], state)
        other = meeting.followers[0]
        whole, first = (_bytes(model) + _held(state) for model, state in zip((one, two), states))
        second = _bytes(other.model) + _held(other.states[max(other.states)])
        assert first + second <= 2 * 0.55 * whole  # three heads are one here and two there
        if case == "llama":
            assert 2 * _held(states[1]) == _held(states[0])


def _held(state: lmstate.State) -> int:
    """Bytes of the layers of a state."""
    return sum(layer.nbytes() for layer in state.layers)


def _bytes(model: Model) -> int:
    return sum({id(w): w.nbytes for w in lmstate.models.describe.stored_weights(model.network)}.values())


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_a_snapshot_fits_in_every_storage(kind: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    one = one_process(folder, kind)
    with over_threads(folder, kind, 2) as (two, _):
        state = two.new_state()
        state.restore(0, one_snapshot(one, 30))
        found = two([IDS[30:40]], state)
    assert same([found], [one([IDS[:40]])[:, -1]])  # type: ignore[index, list-item]
    assert torch.isfinite(found).all()  # type: ignore[arg-type]
