"""Rows that pass the length where their rope changes, and come back: nothing of one rotation is used beside another."""

from __future__ import annotations

import pytest
import torch

import lmstate
from tests.invariants.mirror import Mirror, close
from tests.invariants.stretched import NATIVE, stretched
from tests.invariants.test_rewind_costs import computed
from tests.zoo import text

# Layers that forget and layers that do not, alone and side by side.
CASES = ["llama", "mistral", "gemma3", "falcon_h1", "lfm2"]
every_case = pytest.mark.parametrize("case", CASES)
every_rope = pytest.mark.parametrize("continuous", [False, True], ids=["longrope", "dynamic"])


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()


def grown(model: lmstate.Model, *, marked: int, length: int) -> Mirror:
    """A row of `length` tokens, fed in pieces, with a mark in it."""
    mirror = Mirror(model, rewind=4)
    mirror.extend([ids(marked)])
    mirror.state.mark(0)
    while (now := len(mirror.rows[0])) < length:
        mirror.extend([ids(min(30, length - now), seed=now)])
    return mirror


@every_rope
@every_case
@pytest.mark.parametrize("length", [80, 200])
@pytest.mark.parametrize("more", [1, 30])
def test_a_mark_of_another_rotation_is_not_gone_on_from(case: str, continuous: bool, length: int, more: int) -> None:
    mirror = grown(stretched(case, continuous), marked=50, length=length)
    mirror.rewind(0, 52)
    mirror.extend([ids(more, seed=9)], logits="all")
    mirror.check()
    mirror.rewind(0, 50)
    mirror.extend([[]])
    mirror.check()


def test_a_mark_is_of_use_again_where_the_row_is_again_of_its_rotation() -> None:
    mirror = grown(stretched("falcon_h1"), marked=40, length=60)
    mirror.draft([ids(9, seed=1)], [0])  # past the border, and not accepted
    mirror.extend([ids(1, seed=2)])
    assert mirror.state.rewind_cost(0, 43) == 3
    mirror.rewind(0, 43)
    assert computed(mirror) == 3
    mirror.check()


@every_rope
@every_case
def test_parts_of_a_text_that_was_announced_are_rotated_as_the_whole(case: str, continuous: bool) -> None:
    model, whole = stretched(case, continuous), ids(150)
    expected = model([whole], model.new_state(1), logits="all")
    assert expected is not None
    state = model.new_state(1)
    state.expect(0, len(whole))
    parts = [model([whole[at : at + 50]], state, logits="all") for at in range(0, 150, 50)]
    assert torch.equal(torch.cat([part for part in parts if part is not None], 1), expected)
    assert torch.equal(model([[7]], state), model([[7]], grown_at_once(model, whole))), "and then it grows as any row"
    state.rewind(0, 40)
    assert torch.equal(model([[7]], state), model([[7]], grown_at_once(model, whole[:40]))), "going back ends it"


@every_rope
@every_case
@pytest.mark.parametrize("late", [False, True])
def test_an_idle_row_of_an_announced_text_has_the_logits_of_the_whole(case: str, continuous: bool, late: bool) -> None:
    model, whole = stretched(case, continuous), ids(150)
    expected, short = (model([text], model.new_state(), logits="all")[0] for text in (whole, whole[:50]))
    state = model.new_state()
    if late:
        model([whole[:50]], state)
        state.expect(0, len(whole))
    else:
        state.expect(0, len(whole))
        model([whole[:50]], state, logits="none")
    assert torch.equal(model([[]], state)[0], expected[49])
    state.mark(0)
    other = model.new_state()
    other.restore(0, state.snapshot(0))
    assert torch.equal(model([[]], other)[0], short[49]), "a snapshot announces nothing"
    model([whole[50:60]], state)
    assert torch.equal(model([[]], state)[0], expected[59])
    state.rewind(0, 50)
    assert torch.equal(model([[]], state)[0], short[49]), "nor does a mark"


def grown_at_once(model: lmstate.Model, tokens: list[int]) -> lmstate.State:
    state = model.new_state(1)
    model([tokens], state)
    return state


@every_rope
@every_case
def test_going_back_past_the_border_costs_what_is_said(case: str, continuous: bool) -> None:
    model = stretched(case, continuous)
    for to in (80, 79, NATIVE, NATIVE - 1, 60, 52, 50, 20, 0):
        mirror = grown(model, marked=50, length=80)
        cost = mirror.state.rewind_cost(0, to)
        mirror.rewind(0, to)
        assert computed(mirror) == cost, f"back to {to}"
        mirror.check()


@every_rope
@every_case
def test_going_back_in_a_text_that_was_announced_costs_what_is_said(case: str, continuous: bool) -> None:
    for to in (40, 39, 30, 0):
        mirror = Mirror(stretched(case, continuous))
        mirror.state.expect(0, 150)
        mirror.extend([ids(40)], logits="none")
        cost = mirror.state.rewind_cost(0, to)
        assert cost == (0 if to == 40 else to), "going back ends what was announced, and the keys are of a long text"
        mirror.rewind(0, to)
        assert computed(mirror) == cost, f"back to {to}"


@every_rope
@every_case
@pytest.mark.parametrize("want", ["all", "last"])
def test_logits_of_a_draft_past_the_border_are_those_of_what_was_accepted(
    case: str, continuous: bool, want: str
) -> None:
    mirror = Mirror(stretched(case, continuous), rows=2)
    mirror.extend([ids(60), ids(5, seed=3)])
    for accepted in (2, 0, 1, 3):
        draft = ids(8, seed=accepted)
        mirror.model([draft, []], mirror.state, logits=want, commit=False)
        mirror.state.commit([accepted, 0])
        mirror.rows[0] += draft[:accepted]
        snapshot = mirror.state.snapshot(0)
        if snapshot.logits is not None:
            close(snapshot.logits, mirror.expected(mirror.rows[0])[-1])
        other = Mirror(mirror.model)
        other.restore(0, snapshot, mirror.rows[0])
        other.extend([[]])
    mirror.extend([[], []])
    mirror.check()


@every_rope
@every_case
def test_logits_before_a_step_that_failed_are_not_those_of_its_rotation(case: str, continuous: bool) -> None:
    mirror = Mirror(stretched(case, continuous), rows=2)
    mirror.extend([ids(60), ids(5, seed=3)])
    mirror.rewind(1, 2)
    with pytest.raises(ZeroDivisionError):
        fail_after_the_backlog(mirror)
    snapshot = mirror.state.snapshot(0)
    if snapshot.logits is not None:
        close(snapshot.logits, mirror.expected(mirror.rows[0])[-1])
    mirror.extend([[], []])
    mirror.check()


def fail_after_the_backlog(mirror: Mirror) -> None:
    """Row 0 passes the border while row 1 is idle and its logits are unknown; then the step itself is not planned."""
    plan = mirror.state.plan
    mirror.state.plan = lambda *_, **__: 1 // 0  # type: ignore[method-assign]
    try:
        mirror.model([ids(10, seed=4), []], mirror.state)
    finally:
        mirror.state.plan = plan  # type: ignore[method-assign]


@every_rope
@every_case
def test_a_snapshot_of_one_rotation_grows_into_another(case: str, continuous: bool) -> None:
    model = stretched(case, continuous)
    for length in (50, NATIVE, 80):
        mirror = grown(model, marked=40, length=length)
        snapshot, tokens = mirror.state.snapshot(0), list(mirror.rows[0])
        other = Mirror(model, rows=2, rewind=2)
        other.extend([ids(70, seed=5), ids(9, seed=6)])
        other.state.mark(0)
        other.restore(0, snapshot, tokens)
        other.check()
        other.extend([ids(30, seed=7), []])
        other.rewind(0, 45)
        other.extend([[], ids(60, seed=8)])
        other.check()
