"""Threads of Python that compute at once, each on a state of its own, give the bits of one after the other.

`make tsan` runs this file with the native operations under ThreadSanitizer, which then sees the threads of a parallel
region as well (`gomp.c`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate import kv, ops
from tests.invariants.test_to_the_bit import model_of
from tests.ops.helpers import stored
from tests.ops.test_fused import EMBED, attention
from tests.zoo import ours, text

STATES, INSIDE = 3, 2  # threads of Python, and those of each in a parallel region
OPTIONS: dict[str, dict[str, object]] = {
    "floats": {},
    "8 bits": {"kv": kv.Quantized(8)},
    "4 bits": {"kv": kv.Quantized(4)},
    "h2o": {"kv": kv.H2O(budget=12, recent=3, sinks=1)},
    "static": {"static": True, "capacity": 80},
}
CASES = [
    *(("llama", "float32", options) for options in OPTIONS),
    *((case, "int4", "floats") for case in ("qwen3_5", "qwen3_moe", "mamba2", "deepseek_v3", "lfm2")),
    *((case, "bfloat16", "floats") for case in ("gpt_oss", "mamba", "recurrent_gemma", "falcon_h1", "kimi_linear")),
    ("llama", "int8", "floats"),
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def talk(model: lmstate.Model, options: dict[str, object], seed: int) -> list[Tensor]:
    """The logits of a prompt, of tokens, of a draft that is taken in part, and of what follows."""
    torch.set_num_threads(INSIDE)
    state = model.new_state(2, rewind=8, **options)  # type: ignore[arg-type]
    got = [model([text(40, seed=seed)[0].tolist(), text(9, seed=seed)[0].tolist()], state)]
    got += [model([[3 + seed], [4]], state) for _ in range(3)]
    got.append(model([[5, 6, 7], [8, 9]], state, logits="all", commit=False))
    state.commit([2, 1])
    state.rewind(0, state.lengths[0] - 3)
    got.append(model([[1], []], state))
    return [logits for logits in got if logits is not None]


def at_once(each: Callable[[int], list[Tensor]], count: int) -> list[list[Tensor]]:
    """What every thread computes, all begun together."""
    begin = Barrier(count)

    def run(index: int) -> list[Tensor]:
        begin.wait()
        with torch.no_grad():
            return each(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.parametrize(("case", "weights", "options"), CASES)
def test_states_of_one_model_in_threads_of_their_own_do_not_see_each_other(
    case: str, weights: str, options: str
) -> None:
    model = model_of(case, weights)
    together = at_once(lambda seed: talk(model, OPTIONS[options], seed), STATES)
    for seed, got in enumerate(together):
        assert all(map(torch.equal, got, talk(model, OPTIONS[options], seed)))


def test_states_that_share_a_snapshot_go_on_apart() -> None:
    model = ours("llama")
    state = model.new_state(rewind=8)
    model(text(30), state)
    snapshot = state.snapshot()

    def go_on(seed: int) -> list[Tensor]:
        own = model.new_state(rewind=8)
        own.restore(0, snapshot)
        return [model([[seed + 1]], own) for _ in range(4)]  # type: ignore[misc]

    for seed, got in enumerate(at_once(go_on, STATES)):
        assert all(map(torch.equal, got, go_on(seed)))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "int8/8", "int4/8"])
def test_products_of_many_rows_are_the_same_on_several_threads(kind: str) -> None:
    weight, x = stored(torch.randn(640, 320), kind), torch.randn(70, 320)
    torch.set_num_threads(1)
    alone = ops.linear(x, weight)
    torch.set_num_threads(INSIDE)
    assert torch.equal(ops.linear(x, weight), alone)
    for got in at_once(lambda _: [ops.linear(x, weight)], STATES):
        assert torch.equal(got[0], alone)


def test_threads_of_a_run_stop_together_at_the_layer_that_refuses() -> None:
    """One that was still at the layer before would leave the others to wait for it for ever."""
    up, down = ops.quantize(torch.randn(64, EMBED), "int8"), ops.quantize(torch.randn(EMBED, 32), "int8")
    (attends,) = attention("int4", 4, 2, 32).sublayers(None, None, 1.0)
    x, one = torch.randn(1, 1, EMBED), torch.tensor([1])
    fits, short = (ops.KVView(*torch.zeros(2, 1, 2, slots, 32).unbind()) for slots in (16, 8))
    torch.set_num_threads(INSIDE)
    for _ in range(200):
        graph = ops.FusedGraph(x, torch.tensor([8]), one)
        for sublayer, view in ((attends, fits), (ops.MLPSublayer(up, down, "silu"), None), (attends, short)):
            fusable = graph.fusable(sublayer, view=view)
            assert fusable is not None
            graph.add(fusable)
        with pytest.raises(ValueError, match="ring of 8 slots"):
            graph.flush()
