"""Dropping a span: the gap closes, keys turn to where they now stand, and what cannot do it says so first."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

import lmstate
from lmstate import kv
from lmstate.state import AttentionState
from tests.invariants.mirror import BOUND
from tests.zoo import CASES, SAMPLE, ours, text


def attention_only(case: str) -> bool:
    layers = ours(case).new_state().layers
    return all(type(part) is AttentionState and part.window_span is None for layer in layers for part in layer.leaves())


FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "olmo2", "smollm3", "phi3", "phi", "glm", "cohere", "hunyuan_v1_dense",
    "nanochat", "gpt_neox", "falcon", "diffllama", "doge",
)  # fmt: skip
FULL = [case for case in CASES if case.split("-")[0] in FAMILIES and not case.endswith("-window")]
STRETCHED = ("dynamic", "longrope")


@pytest.mark.parametrize("case", [case for case in FULL if not case.endswith(STRETCHED)])
def test_kept_keys_equal_keys_that_were_rotated_there_in_the_first_place(case: str) -> None:
    assert attention_only(case)
    model, ids = ours(case), text(60)[0].tolist()
    state, straight = model.new_state(2), model.new_state(2)
    model([ids, ids[:9]], state)
    model([ids, ids[:9]], straight)
    state.drop(0, 5, 25)
    assert state.tokens(0) == ids[:5] + ids[25:]
    assert state.lengths == [40, 9]
    for block, dropped, whole in zip(model.blocks, state.layers, straight.layers):
        # The oracle: undo each stored key's own rotation, and rotate it at the position where it now stands.
        rope, keys = block.mixer.rope, whole.capture(0, 60)["k"]
        for position in range(25, 60) if rope is not None else ():
            bare = rope.rotate_by(keys[:, position : position + 1], -position)
            keys[:, position : position + 1] = rope.rotate_by(bare, position - 20)
        kept = torch.cat([keys[:, :5], keys[:, 25:]], 1)
        closed, values = dropped.capture(0, 40), whole.capture(0, 60)["v"]
        torch.testing.assert_close(closed["k"], kept, atol=BOUND, rtol=BOUND)
        torch.testing.assert_close(closed["v"][:, 5:], values[:, 25:], atol=0, rtol=0)
        torch.testing.assert_close(dropped.capture(1, 9)["k"], whole.capture(1, 9)["k"], atol=0, rtol=0)
    model([[3], [4]], state)
    assert state.lengths == [41, 10]


def test_layers_that_never_saw_the_span_close_the_gap_exactly() -> None:
    """The first layer's keys depend on their own token alone: a text without the span gives the same ones."""
    model, ids = ours("llama"), text(40)[0].tolist()
    state, short = model.new_state(), model.new_state()
    model([ids], state)
    model([ids[:4] + ids[30:]], short)
    for start, stop in itertools.pairwise((10, 17, 24, 30)):
        state.drop(0, 4, 4 + stop - start)
    state.drop(0, 4, 10)
    assert state.tokens(0) == short.tokens(0)
    torch.testing.assert_close(
        state.layers[0].capture(0, 14)["k"], short.layers[0].capture(0, 14)["k"], atol=BOUND, rtol=BOUND
    )


@pytest.mark.parametrize("how", [{}, {"rewind": 0}, {"static": True, "capacity": 80}])
@pytest.mark.parametrize("span", [(0, 16), (8, 13), (5, 44), (30, 45), (40, 50)])
def test_a_window_that_has_lost_nothing_closes_the_gap(span: tuple[int, int], how: dict[str, int]) -> None:
    """Also of a row longer than the window, whose first positions come in sight again."""
    (start, stop), (model, ids) = span, (ours("mistral"), text(50)[0].tolist())
    state, short = model.new_state(**how), model.new_state(**how)
    model([ids], state)
    model([ids[:start] + ids[stop:]], short)
    state.drop(0, start, stop)
    length = 50 - (stop - start)
    for name in ("k", "v"):  # of the first layer, whose keys and values depend on their own token alone
        closed, straight = (each.layers[0].capture(0, length)[name] for each in (state, short))
        torch.testing.assert_close(closed, straight, atol=BOUND, rtol=BOUND)


@pytest.mark.parametrize("case", [case for case in FULL if case.endswith(STRETCHED)])
def test_a_row_that_has_outgrown_its_rope_refuses(case: str) -> None:
    """Its keys are not of the frequencies that would move them."""
    model, ids = ours(case), text(80)[0].tolist()
    state, other = model.new_state(), model.new_state()
    model([ids[:50]], state)
    state.drop(0, 3, 9)
    assert state.lengths == [44]
    for each in (state, other):
        each.rewind(0, 0)
        model([ids], each)
    for to in (80, 50):  # back where the text is short, the keys are still those of the long one
        for each in (state, other):
            each.rewind(0, to)
        with pytest.raises(lmstate.UnsupportedError, match="outgrown"):
            state.drop(0, 3, 9)
        assert state.tokens(0) == ids[:to]
        torch.testing.assert_close(model([[5]], state, commit=False), model([[5]], other, commit=False), atol=0, rtol=0)
        state.discard(), other.discard()


@pytest.mark.parametrize("case", ["qwen3_next", "mamba2", "falcon_h1", "recurrent_gemma", "lfm2", "minimax", "mamba"])
def test_recurrent_models_refuse_before_anything_changes(case: str) -> None:
    model, ids = ours(case), text(40)[0].tolist()
    state, other = model.new_state(), model.new_state()
    model([ids], state)
    model([ids], other)
    with pytest.raises(lmstate.UnsupportedError, match=r"layer \d+ \((recurrent|composite)\)"):
        state.drop(0, 3, 9)
    assert state.tokens(0) == ids
    torch.testing.assert_close(model([[5]], state), model([[5]], other), atol=0, rtol=0)


STORED: dict[str, dict[str, Any]] = {
    "": {},
    "static": {"static": True, "capacity": 96},
    "8 bits": {"kv": kv.Quantized(8)},
    "4 bits": {"kv": kv.Quantized(4)},
    "h2o": {"kv": kv.H2O(budget=24, recent=5, sinks=1)},
    "snapkv": {"kv": kv.SnapKV(budget=24, window=5, sinks=1)},
}


@pytest.mark.parametrize("case", SAMPLE)
def test_can_drop_says_what_drop_does(case: str) -> None:
    """For every kind of layer and storage, at lengths where windows and ropes have lost something, and where not."""
    model, rng = ours(case), random.Random(case)
    for options in STORED.values() if case in ("llama", "mistral", "qwen3_next", "deepseek_v3", "gemma3") else [{}]:
        try:
            state = model.new_state(2, **options)
        except lmstate.UnsupportedError:
            continue
        for count in (0, 9, 40, 40):
            model([text(count, seed=1)[0].tolist(), [7]], state)
            length = state.lengths[0]
            start, stop = sorted(rng.randint(0, length) for _ in range(2))
            can, before = state.can_drop(0, start, stop), state.tokens(0)
            assert state.tokens(0) == before and state.lengths[0] == length
            if can:
                state.drop(0, start, stop)
                assert state.tokens(0) == before[:start] + before[stop:]
            else:
                with pytest.raises(lmstate.UnsupportedError, match="cannot be dropped"):
                    state.drop(0, start, stop)
                assert state.tokens(0) == before


def test_bad_spans_are_refused() -> None:
    model = ours("llama")
    state = model.new_state()
    model([[1, 2, 3]], state)
    for start, stop in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(lmstate.RewindError):
            state.drop(0, start, stop)
        with pytest.raises(lmstate.RewindError):
            state.can_drop(0, start, stop)
    model([[4, 5]], state, commit=False)
    with pytest.raises(lmstate.PendingError):
        state.can_drop(0, 0, 1)
    with pytest.raises(lmstate.PendingError):
        state.drop(0, 0, 1)
    state.discard()
    state.drop(0, 0, 3)
    assert state.tokens(0) == []
