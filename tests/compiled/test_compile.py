"""A step compiles once for its rows and tokens, and never again, whatever is done to the state in between."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

import lmstate
from lmstate import CapacityError
from tests.compiled.static_mirror import CAPACITY, StaticMirror, Step
from tests.invariants.mirror import close
from tests.sweeps import sampled
from tests.zoo import made, ours, text

# Of each layer kind one: full, window, chunk, latent, folds, attention and a fold in one layer.
KINDS = (
    "llama", "mistral", "llama4-interleaved", "deepseek_v2", "lfm2", "qwen3_5", "mamba", "mamba2", "minimax",
    "recurrent_gemma", "falcon_h1", "bailing_hybrid", "zaya", "xlstm", "rwkv",
)  # fmt: skip
every_kind = pytest.mark.parametrize("case", sampled(KINDS, ("mistral", "deepseek_v2", "falcon_h1")))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled(case: str, **options: object) -> Step:
    """Without autograd's own compiler and code generation, which see only the graph: what is tested is its keeping."""
    return torch.compile(ours(case).decode_step, fullgraph=True, **{"backend": "eager", **options})


@every_kind
def test_compiles_once_for_each_width_and_never_again(case: str) -> None:
    own = StaticMirror(ours(case), compiled(case), rows=2)
    own.extend([ids(3), ids(9, 1)])
    own.feed([[5], [6]])
    assert graphs() == 1
    own.feed([ids(4, 2), ids(4, 3)], accept=[4, 1])
    assert graphs() == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        snapshot, kept = own.state.snapshot(0), list(own.rows[0])
        for seed in range(44):  # over the windows of 17 and the chunks of 7, and past where their rings wrap
            own.feed([ids(1 + 3 * (seed % 2), 10 + seed), ids(1 + 3 * (seed % 2), 60 + seed)])
        own.rewind(0, len(own.rows[0]) - 5)
        own.feed([[7], [8]])
        own.rewind(1, 30)  # farther back than a window or a fold keeps: the layers must be fed again
        own.extend([[], []])
        own.feed([ids(4, 4), ids(4, 5)], accept=[0, 3])
        own.select([1, 0])
        own.feed([[7], [8]])
        own.restore(1, snapshot, kept)
        own.feed([ids(4, 6), ids(4, 7)])
        own.select([None, 1])
        own.feed([[7], [8]])
        again = StaticMirror(own.model, own.step, rows=2)  # another state of the same size, empty
        again.feed([ids(4), ids(4, 1)])
        again.feed([[7], [8]])
        own.check()
        again.check()
    assert graphs() == 2


def test_a_ring_wraps_within_one_graph() -> None:
    own = StaticMirror(ours("mistral"), compiled("mistral"), capacity=400)
    own.feed([ids(1)])
    slots = own.state.layers[0].static_tensors()["k"].shape[2]
    with torch._dynamo.config.patch(error_on_recompile=True):
        own.extend([ids(slots - 3, 1)])
        for seed in range(40):
            own.feed([ids(1, 100 + seed)])
        own.check()
    assert len(own.rows[0]) > slots + 17, "the ring wrapped, and its window lies wholly after the wrap"


def test_ragged_counts_are_no_reason_to_compile_again() -> None:
    own = StaticMirror(ours("lfm2"), compiled("lfm2"), rows=2)
    own.ragged([ids(4), ids(2, 1)], width=4)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, (a, b) in enumerate([(0, 4), (1, 1), (4, 0), (3, 4)]):
            own.ragged([ids(a, 2 * seed), ids(b, 2 * seed + 1)], width=4)
        own.check()


def test_slices_of_one_text_are_no_reason_to_compile_again_where_shapes_are_not_dynamic() -> None:
    model, tokens = ours("llama"), text(60)
    step, state = compiled("llama", dynamic=False), model.new_state(1, capacity=CAPACITY, static=True)
    step(tokens[:, :4], state)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for start in range(0, 60, 4):
            state.commit() if start else state.discard()
            logits = step(tokens[:, start : start + 4], state)
    close(logits, model(tokens)[:, -1])


def test_a_full_row_needs_no_other_graph() -> None:
    own = StaticMirror(ours("lfm2"), compiled("lfm2"), rows=2, capacity=12)
    own.feed([[5], [6]])
    own.extend([ids(11), []])
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert own.step(torch.tensor([[5], [6]]), own.state, logits="all").isnan().all(-1).tolist() == [[True], [False]]
        with pytest.raises(CapacityError):
            own.state.commit()
        own.rewind(0, 8)
        own.feed([[5], [6]])
        own.check()


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int4"])
def test_a_model_that_never_ran_compiles(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is made when it is first used is made outside of the graph."""
    monkeypatch.setenv("LMSTATE_CACHE", str(tmp_path / "cache"))
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model, tokens = lmstate.load(tmp_path, weights=weights), text(40) % 64
    state = model.new_state(1, 50, static=True)
    step = torch.compile(model.decode_step, fullgraph=True, backend="eager")
    for at in range(40):
        logits = step(tokens[:, at : at + 1], state)
        state.commit()
    assert model._traced is not None
    assert weights != "bfloat16" or model.embed.kind == "bfloat16" or model._traced[1] is not model.network
    tolerance = 1e-5 if weights == "float32" else 0.02  # large products are in bfloat16
    torch.testing.assert_close(logits, model(tokens)[:, -1], atol=tolerance, rtol=tolerance)


@every_kind
def test_no_layer_has_to_run_before(case: str) -> None:
    _, model = made(case)
    state = model.new_state(1, CAPACITY, static=True)
    step = torch.compile(model.decode_step, fullgraph=True, backend="eager")
    assert step(torch.tensor([[3]]), state).isfinite().all()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's code generation needs a C++ compiler (g++)")
def test_generated_code_gives_the_same_logits() -> None:
    whole = ours("lfm2")
    # A convolution and attention: the compiler takes its time.
    model = replace(whole, network=replace(whole.network, blocks=whole.blocks[1:3]))
    own = StaticMirror(model, torch.compile(model.decode_step, fullgraph=True))
    own.extend([ids(9)])
    own.feed([[5]])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(20):
            own.feed([ids(1, seed)])
        own.rewind(0, 20)
        own.feed([[5]])
        own.check()


@every_kind
def test_whatever_a_graph_changes_or_reads_of_model_and_state_has_a_fixed_address(case: str) -> None:
    """What a CUDA graph asks for: only the tokens of a call may lie somewhere else."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._guards import TracingContext

    seen = []

    def look(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        context = TracingContext.get()
        assert context.fw_metadata is not None
        seen.append((len(inputs), set(context.fw_metadata.static_input_indices), context.fw_metadata))
        return make_boxed_func(graph.forward)

    step = torch.compile(ours(case).decode_step, fullgraph=True, backend=aot_autograd(fw_compiler=look))
    with torch.no_grad():
        own = StaticMirror(ours(case), step, rows=2)
        own.feed([[5], [6]])
        own.feed([[7], [8]])
        own.check()
    [(inputs, fixed, metadata)] = seen
    changed = {index for index, info in enumerate(metadata.input_info) if info.mutates_data}
    assert changed and changed <= fixed
    assert inputs - len(fixed) == 1, "the tokens"
