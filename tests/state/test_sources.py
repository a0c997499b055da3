"""Sources: what is refused, who shares them, and what a snapshot in another process is good for."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GenerationMixin

import lmstate
from lmstate.state import SnapshotFolder, SourceFeatures
from tests.zoo import ENCODERS, ours, pair, read, source, text

IDS = text(20)[0].tolist()
SOURCE = text(33, seed=1)[0].tolist()
CASE = "bart"


@pytest.fixture
def model() -> lmstate.Model:
    return ours(CASE)


def conditioned(model: lmstate.Model) -> lmstate.State:
    state = model.new_state(2)
    state.condition(0, SOURCE)
    return state


def test_tokens_without_a_source_are_refused(model: lmstate.Model) -> None:
    state = conditioned(model)
    for refused in (lambda: model([[5], [5]], state), lambda: state.queue(1, [5])):
        with pytest.raises(lmstate.StateError, match=r"row 1 .* has no source; call state.condition\(1"):
            refused()
    assert state.lengths == [0, 0] and state.source(1) is None
    with pytest.raises(lmstate.StateError, match="read a source"):
        model([IDS])
    model([IDS, []], state)
    assert state.lengths == [20, 0]


def test_a_source_of_a_row_that_holds_tokens_is_refused(model: lmstate.Model) -> None:
    state = conditioned(model)
    before = model([IDS, []], state)
    with pytest.raises(lmstate.StateError, match="holds 20 tokens"):
        state.condition(0, IDS)
    assert state.source(0) == SOURCE
    torch.testing.assert_close(model([[], []], state)[0], before[0])
    state.rewind(0, 0)
    assert state.source(0) == SOURCE, "a rewind keeps the source"
    torch.testing.assert_close(model([IDS, []], state)[0], before[0])
    state.rewind(0, 0)
    state.condition(0, IDS)
    assert not torch.allclose(model([IDS, []], state)[0], before[0], atol=0.1)


@pytest.mark.parametrize(
    "source, why", [([], "empty"), ([99], "99"), ([True], "bool|whole"), ([1] * 251, "learned 250")]
)
def test_bad_sources_are_refused(model: lmstate.Model, source: list[int], why: str) -> None:
    state = conditioned(model)
    with pytest.raises(lmstate.StateError, match=why):
        state.condition(0, source)
    assert state.source(0) == SOURCE
    model([IDS, []], state)


def test_a_pending_row_is_refused(model: lmstate.Model) -> None:
    state = conditioned(model)
    model([IDS, []], state, commit=False)
    with pytest.raises(lmstate.PendingError):
        state.condition(0, SOURCE)
    state.condition(1, SOURCE)
    state.commit()
    assert state.lengths == [20, 0] and state.source(1) == SOURCE


def test_a_model_without_an_encoder_refuses_sources() -> None:
    model = ours("llama")
    state = model.new_state()
    with pytest.raises(lmstate.UnsupportedError, match="no encoder"):
        state.condition(0, SOURCE)
    with pytest.raises(lmstate.UnsupportedError, match="no encoder"):
        model.generate(source=SOURCE, return_ids=True)
    assert state.source(0) is None


def test_what_has_no_sources_yet_is_refused(model: lmstate.Model, tmp_path: Path) -> None:
    with pytest.raises(lmstate.UnsupportedError, match="source"):
        model.new_state(1, capacity=20, static=True)
    with pytest.raises(lmstate.UnsupportedError, match="source"):
        SnapshotFolder(tmp_path).save("one", conditioned(model).snapshot(0))


def test_forks_share_the_blocks_of_a_source(model: lmstate.Model) -> None:
    state = conditioned(model)
    held = state.memory()["cross"]
    assert held > 0
    state.select([0, 0, 0, None])
    model([IDS, IDS[:3], [7], []], state)
    assert state.memory()["cross"] == held
    assert [state.source(row) for row in range(4)] == [SOURCE] * 3 + [None]
    state.remove(0)
    assert state.source(1) == SOURCE and state.memory()["cross"] == held


def test_a_copy_of_a_state_copies_no_model(model: lmstate.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the model was copied")

    monkeypatch.setattr(lmstate.Model, "__deepcopy__", fail, raising=False)
    twin = copy.deepcopy(conditioned(model))
    twin.condition(1, IDS)
    assert (twin.source(0), twin.source(1)) == (SOURCE, IDS)


def test_no_span_is_dropped_where_positions_are_learned(model: lmstate.Model) -> None:
    state = conditioned(model)
    model([IDS, []], state)
    assert not state.can_drop(0, 2, 5), "positions are learned"


def test_a_snapshot_before_the_first_token_holds_the_source(model: lmstate.Model, tmp_path: Path) -> None:
    state = conditioned(model)
    state.snapshot(0).save(tmp_path / "row")
    other = model.new_state(1)
    other.restore(0, lmstate.Snapshot.load(tmp_path / "row"))
    assert other.source(0) == SOURCE
    torch.testing.assert_close(model([IDS], other), model([IDS, []], state)[:1])


def test_damaged_snapshots_are_refused(model: lmstate.Model) -> None:
    state = conditioned(model)
    model([IDS, []], state)
    whole = state.snapshot(0)
    cross = [index for index, layer in enumerate(state.layers) if layer.conditioned]
    without = tuple({} if index in cross else layer for index, layer in enumerate(whole.layers))
    one = tuple({} if index == cross[0] else layer for index, layer in enumerate(whole.layers))
    wrong = tuple(
        {**layer, "k": layer["k"][:, :5]} if index in cross else layer for index, layer in enumerate(whole.layers)
    )
    changes = ({"source": None}, {"layers": without}, {"layers": one}, {"layers": wrong}, {"source": (99,)})
    for change in changes:
        with pytest.raises(lmstate.SnapshotError):
            state.restore(1, replace(whole, **change))
        with pytest.raises(lmstate.SnapshotError):
            state.add(replace(whole, **change))
    assert state.lengths == [20, 0] and state.rows == 2
    state.restore(1, whole)
    assert state.source(1) == SOURCE


READER = """
import sys, torch, lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from pathlib import Path
folder = Path(sys.argv[1])
torch.set_num_threads(1)
model = build(WeightLoader(open_source(folder / "model"), "float32"))
state = model.new_state(1)
state.restore(0, lmstate.Snapshot.load(folder / "row"))
torch.save(model([[7, 8, 9]], state, logits="all"), folder / "logits")
"""


def test_a_snapshot_goes_on_in_another_process(tmp_path: Path) -> None:
    theirs, model = pair(CASE)
    theirs.save_pretrained(tmp_path / "model")
    state = conditioned(model)
    model([IDS, []], state)
    state.snapshot(0).save(tmp_path / "row")
    subprocess.run([sys.executable, "-c", READER, str(tmp_path)], check=True)
    expected = model([[7, 8, 9], []], state, logits="all")[:1]
    assert torch.equal(torch.load(tmp_path / "logits"), expected)


SOUND = SourceFeatures.of(torch.randn(70, 12, generator=torch.Generator().manual_seed(5)))


def test_a_snapshot_holds_a_sound_by_its_hash(tmp_path: Path) -> None:
    model = ours("whisper")
    state = model.new_state(1)
    state.condition(0, SOUND)
    before = model([IDS], state)
    assert state.source(0) == SOUND and state.source(0).values is None, "the features were let go"
    state.snapshot(0).save(tmp_path / "row")
    loaded = lmstate.Snapshot.load(tmp_path / "row")
    assert loaded.source == SOUND and loaded.tokens == tuple(IDS)
    other = model.new_state(1)
    other.restore(0, loaded)
    assert torch.equal(model([[]], other), before)
    assert torch.equal(model([[7]], other), model([[7]], state))
    state.rewind(0, 0)
    assert state.source(0) == SOUND
    assert torch.equal(model([IDS], state), before)


def test_sounds_that_cannot_be_are_refused(tmp_path: Path) -> None:
    model, text_model = ours("whisper"), ours(CASE)
    state, read_text = model.new_state(1), conditioned(text_model)
    state.condition(0, SOUND)
    short, wide = SourceFeatures.of(SOUND.values[:50]), SourceFeatures.of(SOUND.values[:, :8])
    for bad, why in (
        (IDS, "reads sounds"), (short, "50, 12"), (wide, "70, 8"), (SOUND.without_values(), "make it again"),
    ):  # fmt: skip
        with pytest.raises(lmstate.StateError, match=why):
            state.condition(0, bad)
    with pytest.raises(lmstate.StateError, match="reads texts"):
        read_text.condition(0, SOUND)
    assert state.source(0) == SOUND and read_text.source(0) == SOURCE
    for bad in (
        torch.zeros(3),
        torch.zeros(0, 12),
        torch.full((3, 4), torch.inf),
        torch.ones(3, 4, dtype=torch.int64),
        5,
    ):
        with pytest.raises(lmstate.StateError, match="features of a source"):
            SourceFeatures.of(bad)
    snapshot = state.snapshot(0)
    for made in (
        SourceFeatures("x", (70, 12), None),
        SourceFeatures(SOUND.hash, (0, 12), None),
        SourceFeatures(SOUND.hash, (70.0, 12), None),
        SourceFeatures(5, (70, 12), None),
    ):
        with pytest.raises(lmstate.SnapshotError, match="source"):
            state.restore(0, replace(snapshot, source=made))
    for record in ("5", "[", '["x", 1, 2]', f'["{SOUND.hash}", 1]', f'["{SOUND.hash}", 1, -2]'):
        with pytest.raises(lmstate.SnapshotError, match="malformed"):
            SourceFeatures.from_json("a file", record)


def test_other_sounds_are_other_texts_to_a_prefix_store() -> None:
    model, other = ours("whisper"), SourceFeatures.of(SOUND.values + 1)
    state = model.new_state(2)
    for row, sound in enumerate((SOUND, other)):
        state.condition(row, sound)
    model([IDS, IDS], state)
    first, second = (state.snapshot(row).identities for row in range(2))
    assert first[1:] == second[1:] == IDS[1:] and first[0] != second[0] and first[0] > 2**62


@pytest.mark.parametrize("case", ENCODERS)
def test_greedy_answers_are_those_of_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, model = pair(case)
    monkeypatch.setattr(model, "eos_ids", frozenset([theirs.config.eos_token_id]))
    sources = [source(model, length, seed=length) for length in (33, 20)]
    expected = []
    for given in sources:
        ids = GenerationMixin.generate(  # without a cache, whose layers are counted by those of T5's encoder
            theirs, **read(given), max_new_tokens=12, min_new_tokens=12, do_sample=False, num_beams=1, use_cache=False
        )[0, 1:].tolist()
        expected.append(ids)
    options = {"max_new_tokens": 12, "min_tokens": 12, "return_ids": True}
    assert model.generate(source=sources, **options) == expected
    assert model.generate(source=sources[0], **options) == expected[0]
    begun = model.generate(expected[0][:4], source=sources[0], **{**options, "max_new_tokens": 8, "min_tokens": 8})
    assert begun == expected[0][4:]
