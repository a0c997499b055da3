"""Steps that are recorded once, as CUDA graphs, and replayed whatever is done to the state in between."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import lmstate
from tests.compiled.static_mirror import StaticMirror
from tests.cuda import ids, needs_gpu, on_gpu
from tests.followed import calls
from tests.interpreted.test_graphs import story

pytestmark = needs_gpu


@pytest.mark.parametrize(
    "case",
    ["llama", "mistral", "llama4-interleaved", "deepseek_v2", "lfm2", "qwen3_5", "mamba2", "falcon_h1", "gpt_oss"],
)
def test_replayed_steps_give_the_logits_of_eager_ones(case: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = on_gpu(case)
    step = torch.compile(model.decode_step, fullgraph=True, dynamic=False, mode="reduce-overhead")
    own = StaticMirror(model, step, rows=2)
    own.extend([ids(3), ids(9, 1)])
    for seed in range(24):  # past where a window of 17 wraps
        own.feed([ids(1, seed), ids(1, 40 + seed)])
    for seed in range(3):  # the first call of a width runs as it is, the second is recorded, later ones are replayed
        own.feed([ids(4, 2 + seed), ids(4, 3 + seed)], accept=[4, 1])
    snapshot, kept = own.state.snapshot(0), list(own.rows[0])
    own.rewind(0, len(own.rows[0]) - 5)
    own.feed([[7], [8]])
    own.extend([[], ids(5, 9)])
    own.select([1, 0])
    own.feed([[7], [8]])
    own.restore(1, snapshot, kept)
    own.feed([[9], [8]])
    own.rewind(1, 12)
    own.extend([[], []])
    own.feed([ids(4, 6), ids(4, 7)], accept=[0, 3])
    own.check()
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] <= 2 * 2, "tokens alone are copied"


KINDS = ("llama", "mistral", "deepseek_v3", "qwen3_next-dense", "mamba2", "mixtral", "lfm2")
CODED = [("llama", 8), ("gemma", 4), ("gemma", 3), ("gemma", 2)]


@pytest.mark.parametrize(("case", "bits"), [*((case, None) for case in KINDS), *CODED])
def test_graphs_of_the_model_have_the_bits_of_eager_steps(
    case: str, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kv = on_gpu(case), None if bits is None else lmstate.kv.Quantized(bits)
    with torch.no_grad():
        replayed = story(model, kv)
        assert any(graph is not None for graph in model.network.graphs._made.values()), "no step was recorded"
        monkeypatch.setattr("lmstate.models.graphs.fuses", lambda: False)
        eager = story(model, kv)
    assert all(torch.equal(own.nan_to_num(7.0), other.nan_to_num(7.0)) for own, other in zip(replayed, eager))


@pytest.mark.parametrize(("case", "bits"), [*((case, None) for case in KINDS), *CODED])
def test_tokens_that_follow_in_one_graph_are_those_of_single_steps(case: str, bits: int | None) -> None:
    model, kv = on_gpu(case), None if bits is None else lmstate.kv.Quantized(bits)
    own, other = model.new_state(2, kv=kv), model.new_state(2, kv=kv)
    with torch.no_grad():
        for state in (own, other):
            model([ids(62), ids(3)], state)
        found = model.follow([[7], [9]], own, 2)
        steps = calls(model, [[7], [9]], other, 2)
    assert found is not None and torch.equal(found[1], torch.stack(steps, 1))
