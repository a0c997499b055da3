"""What going back costs, as `rewind_cost` says and as the next call really computes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import Tensor

import lmstate
from lmstate.state import Step
from tests.invariants.mirror import Mirror
from tests.zoo import ours, text

FOLDS = [
    "qwen3_next",
    "mamba2",
    "mamba",
    "lfm2",
    "recurrent_gemma",
    "minimax",
    "falcon_h1",
    "kimi_linear",
    "bailing_hybrid",
]
WINDOWS = ["mistral", "gemma3"]
FULL = ["llama", "deepseek_v3"]


def computed(mirror: Mirror) -> int:
    """Tokens of row 0 that the model runs for a call with one new token, less that one."""
    counts: list[int] = []
    run = mirror.model._run

    def count(tokens: Tensor, step: Step, *rest: Any) -> Tensor:
        counts.append(step.counts[0])
        return run(tokens, step, *rest)

    with mock.patch.object(mirror.model, "_run", count):
        mirror.model([[5]], mirror.state)
    mirror.rows[0].append(5)
    return sum(counts) - 1


@pytest.mark.parametrize("case", FOLDS + WINDOWS)
@pytest.mark.parametrize("rewind", [1, 5, 16])
def test_any_of_the_last_positions_costs_nothing(case: str, rewind: int) -> None:
    for prefill in (40, 41, 47, 48):
        mirror = Mirror(ours(case), rewind=rewind)
        mirror.extend([text(prefill)[0].tolist()])
        for turn in range(2 * rewind + 3):
            length = mirror.state.lengths[0]
            for to in range(length - rewind, length + 1):
                assert mirror.state.rewind_cost(0, to) == 0, f"{length} to {to}, turn {turn}"
            mirror.extend([[7 + turn]])
        mirror.rewind(0, mirror.state.lengths[0] - rewind)
        assert computed(mirror) == 0


@pytest.mark.parametrize("case", FOLDS)
def test_farther_back_costs_what_is_said(case: str) -> None:
    mirror = Mirror(ours(case), rewind=4)
    mirror.extend([text(30)[0].tolist()])
    mirror.state.mark(0)
    mirror.extend([text(40, seed=1)[0].tolist()])
    assert mirror.state.rewind_cost(0, 45) == 15, "from the mark at 30"
    assert mirror.state.rewind_cost(0, 30) == 0
    assert mirror.state.rewind_cost(0, 29) == 29, "from the start"
    mirror.rewind(0, 45)
    assert computed(mirror) == 15
    mirror.check()
    mirror.rewind(0, 30)
    assert computed(mirror) == 0
    mirror.check()
    mirror.rewind(0, 29)
    assert mirror.state.rewind_cost(0, 29) == 29, "the mark lay ahead and is gone"
    assert computed(mirror) == 29
    mirror.check()


@pytest.mark.parametrize("case", FOLDS)
def test_back_into_tokens_that_were_not_rewindable_computes_them_again(case: str) -> None:
    for prefill in (5, 40, 48):
        mirror = Mirror(ours(case))
        for ids in (text(30)[0].tolist(), text(prefill, seed=1)[0].tolist()):
            mirror.model([ids], mirror.state, rewindable=False)
            mirror.rows[0] += ids
        begin = mirror.state.lengths[0]
        assert [mirror.state.rewind_cost(0, to) for to in (30, begin - 1, begin)] == [30, begin - 1, 0]
        for turn in range(35):
            mirror.extend([[7 + turn]])
            length = mirror.state.lengths[0]
            for to in range(max(begin, length - 16), length + 1):
                assert mirror.state.rewind_cost(0, to) == 0, f"{length} to {to}, turn {turn}"
        mirror.rewind(0, mirror.state.lengths[0] - 16)
        assert computed(mirror) == 0
        mirror.check()
        mirror.rewind(0, begin - 1)
        assert computed(mirror) == begin - 1
        mirror.check()


@pytest.mark.parametrize("case", FOLDS)
@pytest.mark.parametrize("draft", [0, 3])
def test_each_row_is_rewindable_for_itself(case: str, draft: int) -> None:
    """One row decodes, or verifies a draft that is refused, beside chunks of a text that nobody goes back into."""
    mirror = Mirror(ours(case), rows=2)
    mirror.extend([text(30)[0].tolist(), []])
    for turn in range(20):
        chunk = text(20, seed=turn)[0].tolist()
        tokens = [[7 + turn, *range(draft)], chunk]
        logits = mirror.model(tokens, mirror.state, logits=[1 + draft, 0], commit=not draft, rewindable=[True, False])
        assert logits is not None and logits.shape[1] == 1 + draft
        if draft:
            mirror.state.commit([1, len(chunk)])
        mirror.rows[0].append(7 + turn)
        mirror.rows[1] += chunk
        length = mirror.state.lengths[0]
        assert [mirror.state.rewind_cost(0, to) for to in range(length - 16, length + 1)] == [0] * 17
    assert mirror.state.rewind_cost(1, 399) == 399
    mirror.rewind(0, mirror.state.lengths[0] - 11)
    mirror.check()


@pytest.mark.parametrize("case", FULL)
def test_full_attention_goes_anywhere_at_no_cost(case: str) -> None:
    mirror = Mirror(ours(case), rewind=0)
    mirror.extend([text(60)[0].tolist()])
    assert [mirror.state.rewind_cost(0, to) for to in (0, 1, 30, 60)] == [0, 0, 0, 0]
    mirror.rewind(0, 30)
    mirror.check()


@pytest.mark.parametrize("case", FOLDS + WINDOWS + FULL)
def test_memory_stays_flat_over_many_drafts(case: str) -> None:
    """Rewind logs, rings and pending inputs are bounded: what a state of fixed length holds does not grow."""
    mirror = Mirror(ours(case), rewind=8)
    mirror.extend([text(40)[0].tolist()])
    held = []
    for turn in range(60):
        draft = text(8, seed=turn)[0].tolist()
        mirror.model([draft], mirror.state, commit=False)
        mirror.state.commit([turn % 9])
        mirror.rows[0] += draft[: turn % 9]
        if len(mirror.rows[0]) > 90:
            mirror.rewind(0, 60)
        held.append(sum(mirror.state.memory().values()) - mirror.state.memory().get("logits", 0))
    assert max(held[20:]) <= max(held[:20])
    mirror.check()


def test_positions_that_never_were_are_refused() -> None:
    mirror = Mirror(ours("mamba2"))
    mirror.extend([[3, 4, 5]])
    for to in (-1, 4):
        with pytest.raises(lmstate.RewindError, match="positions 0 to 3"):
            mirror.state.rewind(0, to)
    with pytest.raises(lmstate.StateError, match="row 1"):
        mirror.state.rewind(1, 0)
    mirror.model([[6]], mirror.state, commit=False)
    with pytest.raises(lmstate.PendingError):
        mirror.state.rewind(0, 1)
    mirror.state.discard()
    mirror.check()


@pytest.mark.parametrize("case", WINDOWS)
def test_a_ring_that_grows_does_not_bring_back_what_it_lost(case: str) -> None:
    mirror = Mirror(ours(case), rows=2, rewind=0)
    for width in (1, 9, 9, 9, 9):
        mirror.extend([text(width, seed=width)[0].tolist(), []])
    mirror.draft([[], text(40, seed=1)[0].tolist()], [0, 2])  # needs more slots, while row 0 is idle
    mirror.rewind(0, 2)
    mirror.check(probe=True)
