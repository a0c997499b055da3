"""RWKV-7: its logits are those of the paper's formulas, its bits do not depend on cuts, and its files are checked."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lmstate
from lmstate.errors import ModelError
from lmstate.models.model import Model
from tests.invariants.mirror import Mirror
from tests.models import rwkv7_model as reference

TEXT = torch.randint(0, 99, (70,), generator=torch.Generator().manual_seed(3)).tolist()


def load(folder: Path, **changes: Any) -> Model:
    config = {**reference.CONFIG, **changes}
    return lmstate.load(reference.save(folder, config, reference.weights(config)), weights="float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(tmp_path_factory.mktemp("rwkv7"))


@pytest.mark.parametrize("changes", [{}, {"head_dim": 8, "norm_eps": 1e-3, "num_hidden_layers": 2}], ids=["", "heads"])
def test_logits_are_those_of_the_formulas(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {**reference.CONFIG, **changes}
    ours, expected = load(tmp_path, **changes), reference.logits(config, reference.weights(config), TEXT)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours([TEXT])[0].double(), expected, atol=1e-4, rtol=1e-4)
    state = ours.new_state(1)
    pieces = [ours([TEXT[a:b]], state, logits="all")[0] for a, b in itertools.pairwise([0, 30, 31, 32, 70])]
    torch.testing.assert_close(torch.cat(pieces).double(), expected, atol=1e-4, rtol=1e-4)


def test_every_parameter_counts(tmp_path: Path) -> None:
    """Of each, one number changes the logits, so that no comparison above passes without it."""
    made = reference.weights(reference.CONFIG)
    text = TEXT[:6]
    expected = reference.logits(reference.CONFIG, made, text)
    for name, tensor in made.items():
        changed = {**made, name: tensor.clone()}
        changed[name].view(-1)[text[2] * 48 if name == "model.embeddings.weight" else 5] += 0.5
        assert (reference.logits(reference.CONFIG, changed, text) - expected).abs().max() > 1e-6, name


@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_cut_changes_a_bit(model: Model, data: st.DataObject) -> None:
    """Beside other rows too, and after drafts of which a part was refused."""
    cuts = sorted(data.draw(st.lists(st.integers(1, len(TEXT) - 1), max_size=6)))
    whole = model([TEXT])[0]
    state = model.new_state(3)
    for start, stop in itertools.pairwise([0, *cuts, len(TEXT)]):
        drafted = TEXT[start:stop] + [7] * data.draw(st.integers(0, 4))
        got = model([TEXT[:3] if start == 0 else [], drafted, [5]], state, logits="all", commit=False)
        state.commit([3 if start == 0 else 0, stop - start, 1])
        assert torch.equal(got[1, : stop - start], whole[start:stop])


@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_drafts_forks_and_rewinds_leave_the_state_as_if_they_never_were(model: Model, data: st.DataObject) -> None:
    mirror = Mirror(model, rows=2, rewind=8)
    mirror.extend([TEXT[:30], TEXT[:44]])
    for turn in range(3):
        widths = [data.draw(st.integers(0, 12)) for _ in range(2)]
        mirror.draft([TEXT[:width] for width in widths], [data.draw(st.integers(0, width)) for width in widths])
        row = data.draw(st.integers(0, 1))
        mirror.rewind(row, data.draw(st.integers(max(0, len(mirror.rows[row]) - 8), len(mirror.rows[row]))))
        mirror.check()
        del turn


def test_snapshots_and_forks_restore_every_bit(model: Model) -> None:
    state = model.new_state(1)
    model([TEXT[:40]], state)
    state.select([0, 0])
    snapshot = state.snapshot(1)
    wanted = model([TEXT[40:]] * 2, state, logits="all")
    assert torch.equal(wanted[0], wanted[1])
    restored = model.new_state(1)
    restored.restore(0, snapshot)
    assert torch.equal(model([TEXT[40:]], restored, logits="all")[0], wanted[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn": {"layers": [1], "num_heads": 4}}, "layers of attention"),
        ({"value_dim": [96, 96, 96]}, "values of 48 features"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"head_dim": 20}, "cannot share"),
        ({"norm_first": False}, "norm_first"),
    ],
)
def test_what_is_not_run_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = reference.save(tmp_path, {**reference.CONFIG, **changes}, reference.weights(reference.CONFIG))
    with pytest.raises(ModelError, match=message):
        lmstate.load(folder, weights="float32")
