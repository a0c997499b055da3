"""A trace shows every sublayer of a call and changes nothing of it; features and starts in the middle are exact."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate.errors import PendingError, StateError
from tests.zoo import ours, text

CASES = ["llama", "qwen3_5", "gemma3n", "gemma4-deep", "zaya", "zamba2", "falcon_h1", "cohere2", "minimax"]
PAGE = Path(__file__).parents[2] / "docs" / "tracing.md"


def traced(model: lmstate.Model, *given: Any, **options: Any) -> tuple[Tensor, list[tuple[str, Tensor, Tensor]]]:
    seen: list[tuple[str, Tensor, Tensor]] = []
    out = model.trace(*given, on=lambda *call: seen.append(call), **options)
    return out, seen


@pytest.mark.parametrize("case", CASES)
def test_a_trace_is_a_call_and_its_streams_follow_each_other(case: str) -> None:
    model, ids = ours(case), text(9, rows=2).tolist()
    ids[1] = ids[1][:4]
    state, other = model.new_state(2), model.new_state(2)
    want = model(ids, other, logits="all")
    got, seen = traced(model, ids, state)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # of a gate's sigmoid alone
    assert state.lengths == other.lengths and torch.equal(model([[1], [2]], state), model([[1], [2]], other))
    calls = {name: (given, result) for name, given, result in seen}
    blocks = [name for name in calls if re.fullmatch(r"blocks\.\d+", name)]
    assert blocks == [f"blocks.{index}" for index in range(len(model.blocks))]
    for before, after in zip(["embed", *blocks], blocks):
        assert calls[before][1] is calls[after][0]
    assert all(f"{name}.mixer" in calls for name in blocks)
    assert calls["head"][0] is calls[blocks[-1]][1] or "exit" in calls
    assert torch.equal(calls["head"][1][0], got[0])


@pytest.mark.parametrize("state", [False, True])
def test_a_trace_of_ragged_rows_has_their_padding(state: bool) -> None:
    model, ids = ours("llama"), [[3, 4, 5], [6]]
    out, seen = traced(model, ids, model.new_state(2) if state else None, commit=not state)
    assert {(name, *result.shape[:2]) for name, _, result in seen} == {(name, 2, 3) for name, *_ in seen}
    assert torch.equal(out[1, 0], seen[-1][2][1, 0]) and not out[1, 1:].any()


def test_a_mixer_and_a_feed_forward_part_add_to_the_stream() -> None:
    model = ours("llama")
    _, seen = traced(model, text(5).tolist())
    calls = {name: (given, result) for name, given, result in seen}
    x, mixed = calls["blocks.0.mixer"]
    assert x is calls["embed"][1] and mixed is calls["blocks.0.mlp"][0]
    assert calls["blocks.0.mlp"][1] is calls["blocks.0"][1] and not torch.equal(x, mixed)


@pytest.mark.parametrize("case", CASES)
def test_features_are_what_the_head_reads(case: str) -> None:
    model, ids = ours(case), text(7).tolist()
    state, other = model.new_state(), model.new_state()
    hidden = model.hidden(ids, state)
    assert hidden.shape == (1, 7, model.config.hidden_size)
    assert torch.equal(model.logits(hidden), model(ids, other, logits="all"))
    computed, known = model([[]], state), model([[]], other)  # the last logits: by a step of one token, and of seven
    if case == "zamba2":  # whose cuts still move the last bits
        torch.testing.assert_close(computed, known)
    else:
        assert torch.equal(computed, known)


@pytest.mark.parametrize("case", CASES)
def test_a_start_in_the_middle_goes_on_as_the_whole(case: str) -> None:
    model, prompt, ids = ours(case), text(6).tolist(), text(5, seed=3).tolist()
    state = model.new_state()
    model(prompt, state)
    want, seen = traced(model, ids, state, commit=False)
    state.discard()
    model(text(5, seed=9).tolist(), state, commit=False)  # nothing of the traced call is left behind the prompt
    state.discard()
    streams = [result for name, _, result in seen if name == "embed" or re.fullmatch(r"blocks\.\d+", name)]
    before = [tensor.clone() for layer in state.layers for tensor in layer.tensors()]
    for start, inputs in enumerate(streams):
        if any(block.reads is not None and block.reads < start for block in model.blocks[start:]):
            with pytest.raises(StateError, match="reads the keys of block"):
                model.hidden(ids, state, start=start, inputs=inputs)
        else:
            hidden = model.hidden(ids, state, start=start, inputs=inputs)
            assert torch.equal(model.logits(hidden), want), start
        assert state.lengths == [6] and state.pending == [0]
    model([[1]], state)
    other = model.new_state()
    model(prompt, other)
    assert torch.equal(model([[1]], other), model([[]], state)), "what was probed left a trace"
    assert before


def test_gradients_reach_the_inputs() -> None:
    model = ours("llama")
    x = torch.randn(1, 4, model.config.hidden_size, requires_grad=True)
    model.hidden([[1, 2, 3, 4]], start=1, inputs=x)[0, -1].sum().backward()
    assert x.grad is not None and x.grad[0, 0].abs().sum() > 0


def test_a_long_text_is_started_in_the_middle_part_by_part() -> None:
    model, ids = ours("llama"), text(1100).tolist()
    _, seen = traced(model, ids)
    stream = next(result for name, _, result in seen if name == "blocks.0")
    hidden = model.hidden(ids, model.new_state(capacity=1100), start=1, inputs=stream)
    torch.testing.assert_close(hidden, model.hidden(ids), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_started_is_refused_and_changes_nothing() -> None:
    model = ours("llama")
    state = model.new_state()
    model([[1, 2]], state)
    x = torch.zeros(1, 2, model.config.hidden_size)
    for options, what in (
        ({"start": 1}, "without inputs"),
        ({"start": 9, "inputs": x}, "blocks 0 to 2"),
        ({"start": -1, "inputs": x}, "blocks 0 to 2"),
        ({"start": 1, "inputs": x[:, :1]}, r"\[1, 2, 48\]"),
        ({"start": 1, "inputs": x[..., 1:]}, r"\[1, 2, 48\]"),
        ({"start": 1, "inputs": x.double()}, "float64"),
    ):
        with pytest.raises(StateError, match=what):
            model.hidden([[3, 4]], state, **options)
        assert state.lengths == [2] and state.pending == [0]
    model([[5]], state, commit=False)
    with pytest.raises(PendingError):
        model.hidden([[3, 4]], state, start=1, inputs=x)
    assert state.pending == [1], "another step's verdict is not ours to give"


def test_an_exception_of_the_callback_is_no_step() -> None:
    model = ours("qwen3_5")
    state = model.new_state()
    want = model([[1, 2]], state)

    def fail(name: str, given: Tensor, result: Tensor) -> None:
        if name == "blocks.1.mlp":
            raise KeyError(name)

    with pytest.raises(KeyError):
        model.trace([[3]], state, on=fail)
    assert state.lengths == [2] and state.pending == [0] and torch.equal(model([[]], state), want)


def test_the_page_of_traces_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert len(examples) == 2
    monkeypatch.setattr(lmstate, "load", lambda name, weights: ours("llama"))
    examples[0], count = re.subn(r"(?m)^tokens = .*$", "tokens = [[5, 7, 6, 4]]", examples[0])  # of a small vocabulary
    assert count == 1
    scope: dict[str, Any] = {}
    for example in examples:
        exec(example, scope)


@pytest.mark.parametrize("case", ["llama", "qwen3_5"])
def test_a_model_describes_itself_in_few_lines(case: str) -> None:
    model = ours(case)
    shown = repr(model)
    assert len(shown) < 500 and model.config.family in shown
    for what in (f"layers: {len(model.blocks)}", "attention", "parameters", "float32", "made for 512 tokens"):
        assert what in shown


def test_a_state_and_a_snapshot_describe_themselves_in_a_line() -> None:
    model = ours("qwen3_5")
    state = model.new_state(2)
    model([[1, 2], [3]], state)
    model([[4], []], state, commit=False)
    shown = repr(state)
    assert "2 rows of lengths [2, 1], pending [1, 0]" in shown and "3 recurrent, 1 attention" in shown
    assert state.pending == [1, 0] and len(shown) < 200
    state.discard()
    shown = repr(state.snapshot(0))
    assert shown.startswith("Snapshot(2 tokens, 4 layers of a qwen3_5") and len(shown) < 200
