"""Sublayers of a block that run as one body give what their operations give one after the other, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lmstate.ops as ops
from lmstate import kv
from lmstate.models.block import Block, new_layers
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.base import add_sublayers
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.parallel_hybrid import ParallelHybrid
from lmstate.models.layers.rope import Rope
from lmstate.models.stack import Plan
from lmstate.ops import Norm
from lmstate.ops.cpu.fused import FusedBodies
from lmstate.state import KeyValueState, Layout, Step
from lmstate.state.changes import Changes
from tests.ops.helpers import stored
from tests.ops.small_mixers import MIXERS

EMBED = 96


def norm_of(width: int) -> Norm:
    return Norm(torch.rand(width) + 0.5, 1e-5)


def attention(kind: str, heads: int, kv_heads: int, dim: int, **options: Any) -> Attention:
    kept = 0 if "reads" in options else 2 * kv_heads
    width = (heads * (2 if options.get("gate") else 1) + kept) * dim + options.get("gates", 0)
    qkv, out = torch.randn(width, EMBED) / 8, torch.randn(EMBED, heads * dim) / 8
    return Attention(stored(qkv, kind), stored(out, kind), heads, kv_heads, dim, dim**-0.5, **options)


def rope(half: int, interleaved: bool = False) -> Rope:
    return Rope(1.0 / 100 ** (torch.arange(half) / half), interleaved=interleaved)


CASES = {
    "plain": lambda: attention("int4", 4, 2, 32, rope=rope(16)),
    "activations of 8 bits": lambda: attention("int4/8", 4, 2, 32, rope=rope(16)),
    "no positions": lambda: attention("float32", 4, 4, 24),
    "interleaved, partly rotated": lambda: attention("int8", 4, 1, 32, rope=rope(8, interleaved=True)),
    "norm of each head, window": lambda: attention(
        "bfloat16", 4, 2, 32, rope=rope(16), q_norm=norm_of(32), k_norm=norm_of(32), window=5
    ),
    "norm of all heads": lambda: attention(
        "bfloat16", 3, 3, 40, rope=rope(20), q_norm=norm_of(120), k_norm=norm_of(120)
    ),
    "biases, sinks, softcap": lambda: attention(
        "int4",
        4,
        2,
        32,
        rope=rope(16),
        sinks=torch.randn(4),
        softcap=3.0,
        qkv_bias=torch.randn(256),
        out_bias=torch.randn(EMBED),
    ),
    "chunks": lambda: attention("float16", 6, 2, 64, rope=rope(32), chunk=4),
    "norm of values": lambda: attention(
        "bfloat16", 2, 1, 64, rope=rope(32), q_norm=norm_of(64), k_norm=norm_of(64), v_norm=norm_of(64)
    ),
    "largest heads": lambda: attention("int8", 2, 1, 512, rope=rope(256), v_norm=norm_of(512)),
}


def step_of(starts: list[int], counts: list[int]) -> Step:
    return Step(tuple(starts), tuple(counts), torch.device("cpu"), tuple(starts))


def run(
    mixer: Attention,
    xs: list[tuple[list[int], Tensor]],
    fused: bool,
    dtype: torch.dtype,
    policy: kv.Policy | None = None,
) -> list[Tensor]:
    """The outputs of steps `(counts, x)` on a fresh state."""
    norm, rows = norm_fixed(), len(xs[0][0])
    memory = mixer.new_state(Layout(rows, torch.device("cpu"), dtype, kv=policy))
    assert isinstance(memory, KeyValueState)
    starts, outs = [0] * rows, []
    for counts, x in xs:
        step = step_of(starts, counts)
        memory.reserve(step)
        if fused:
            graph = ops.FusedGraph(x, step.starts_t, step.counts_t)
            sublayers = mixer.sublayers(norm, *onto(x)[1:])
            assert sublayers and add_sublayers(graph, sublayers, [memory], step, mixer.rope_tables(step))
            y = graph.flush()
        else:
            y = mixer.mix(ops.linear(x, mixer.qkv, mixer.qkv_bias, norm=norm), step, memory, onto(x))
        changes = Changes()
        memory.commit(step, tuple(counts), changes)
        changes.apply()
        outs += [y[row, :count] for row, count in enumerate(counts)]
        starts = [start + count for start, count in zip(starts, counts)]
    return outs


def onto(x: Tensor) -> ops.Residual:
    return ops.Residual(x, Norm(torch.linspace(1.5, 0.5, x.shape[-1]), 1e-6), 0.3)


def norm_fixed() -> Norm:
    return Norm(torch.linspace(0.5, 1.5, EMBED), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_its_operations(variant: str, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    mixer = CASES[name]()
    counts = [[3, 7], [1, 1], [0, 1], [8, 2], [1, 1]]  # ragged, with an idle row, past the window and the chunks
    xs = [(each, torch.randn(2, max(each), EMBED)) for each in counts]
    for got, want in zip(run(mixer, xs, True, dtype), run(mixer, xs, False, dtype)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", CASES)
def test_padding_is_not_read_and_gives_zeros(variant: str, name: str) -> None:
    torch.manual_seed(2)
    mixer, x, counts = CASES[name](), torch.randn(3, 40, EMBED), [2, 40, 0]
    for row, count in enumerate(counts):
        x[row, count:] = torch.nan
    step = step_of([0, 0, 0], counts)
    memory = mixer.new_state(Layout(3, torch.device("cpu"), torch.float32))
    assert isinstance(memory, KeyValueState)
    memory.reserve(step)
    graph = ops.FusedGraph(x, step.starts_t, step.counts_t, step.new_tokens)
    assert add_sublayers(graph, mixer.sublayers(norm_fixed(), *onto(x)[1:]), [memory], step, mixer.rope_tables(step))
    y = graph.flush()
    for row, count in enumerate(counts):
        (alone,) = run(mixer, [([count], x[row : row + 1, :count])], True, torch.float32) if count else (y[row, :0],)
        assert torch.equal(y[row, :count], alone) and not y[row, count:].any()


POLICIES = {
    "8 bits": kv.Quantized(8),
    "4 bits": kv.Quantized(4),
    "3 bits": kv.Quantized(3),
    "2 bits": kv.Quantized(2),
    "8 bits, h2o": kv.H2O(budget=20, recent=4, sinks=1, storage=kv.Quantized(8)),
    "4 bits, recent": kv.Recent(budget=20, sinks=2, storage=kv.Quantized(4)),
    "2 bits, snapkv": kv.SnapKV(budget=20, window=4, sinks=1, storage=kv.Quantized(2)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_attention_over_codes_equals_its_operations(variant: str, name: str, policy: str) -> None:
    torch.manual_seed(1)
    mixer = CASES[name]()
    counts = [[16, 2], [16, 1], [1, 1], [15, 16], [13, 0], [6, 1], [1, 1], [0, 1], [3, 16], [1, 1]]
    xs = [(each, torch.randn(2, max(each), EMBED)) for each in counts]
    dtype = torch.bfloat16 if "4" in policy else torch.float32
    whole = [run(mixer, xs, fused, dtype, POLICIES[policy]) for fused in (True, False)]
    for got, want in zip(*whole):
        assert torch.equal(got, want)


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize("name", ["plain", "norm of each head, window", "norm of values"])
def test_a_layer_that_reads_another_ones_memory_equals_its_operations(
    variant: str, name: str, policy: str | None
) -> None:
    torch.manual_seed(1)
    source = CASES[name]()
    dim = source.head_dim
    reader = attention(
        "int4", source.heads, source.kv_heads, dim, rope=source.rope, window=source.window, q_norm=norm_of(dim), reads=0
    )
    blocks = {kind: [kind(each, None, norm_fixed()) for each in (source, reader, reader)] for kind in (Block, Apart)}
    layout = Layout(2, torch.device("cpu"), torch.float32, kv=None if policy is None else POLICIES[policy])
    states = {kind: new_layers(blocks[kind], [layout] * 3) for kind in blocks}
    starts = [0, 0]
    for counts in [[16, 2], [16, 1], [1, 1], [5, 16], [3, 0], [1, 1], [1, 1]]:
        x, outs = torch.randn(2, max(counts), EMBED), []
        for kind, layers in states.items():
            step = step_of(starts, counts)
            for layer in layers:
                layer.reserve(step)
            outs.append(Plan(blocks[kind]).run(x, step, layers))
            for layer in layers:
                changes = Changes()
                layer.commit(step, tuple(counts), changes)
                changes.apply()
        for row, count in enumerate(counts):
            assert torch.equal(outs[0][row, :count], outs[1][row, :count])
        starts = [start + count for start, count in zip(starts, counts)]


@pytest.mark.parametrize("gate", [{"gate": True}, {"gates": 4}], ids=["wide", "a number a head"])
def test_gated_attention_equals_its_operations(variant: str, gate: dict[str, Any]) -> None:
    torch.manual_seed(2)
    mixer = attention("bfloat16", 4, 2, 40, rope=rope(20), q_norm=norm_of(40), k_norm=norm_of(40), **gate)
    xs = [(each, torch.randn(2, max(each), EMBED)) for each in ([5, 2], [1, 1], [1, 3])]
    for got, want in zip(run(mixer, xs, True, torch.float32), run(mixer, xs, False, torch.float32)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # torch's sigmoid rounds otherwise


def test_a_row_is_the_same_whatever_is_beside_it(variant: str) -> None:
    torch.manual_seed(3)
    mixer = attention("int4", 4, 2, 32, rope=rope(16), gate=True)
    x = torch.randn(3, 6, EMBED)
    together = run(mixer, [([6, 6, 6], x)], True, torch.bfloat16)
    for row in range(3):
        (alone,) = run(mixer, [([6], x[row : row + 1])], True, torch.bfloat16)
        pieces = run(mixer, [([1], x[row : row + 1, t : t + 1]) for t in range(6)], True, torch.bfloat16)
        assert torch.equal(together[row], alone) and torch.equal(torch.cat(pieces), alone)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "int8/8", "int4/8"])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "relu2"])
def test_feed_forward_equals_its_operations(variant: str, kind: str, act: str) -> None:
    torch.manual_seed(4)
    up, down = stored(torch.randn(2 * 160, EMBED), kind), stored(torch.randn(80, 160), kind)
    x, norm, residual = torch.randn(2, 3, EMBED), norm_fixed(), onto(torch.randn(2, 3, 80))
    biases = torch.randn(320), torch.randn(80)
    got = ops.feed_forward(x, up, down, act, norm=norm, up_bias=biases[0], down_bias=biases[1], residual=residual)
    hidden = ops.linear(x, up, biases[0], norm=norm)
    assert torch.equal(got, ops.linear(hidden, down, biases[1], gate=act, residual=residual))


class Apart(Block):
    """Runs at once what the others fuse."""

    fusable = False


def stack(kind: type[Block]) -> list[Block]:
    """Blocks of all sorts: attention and recurrences, norms after them, side by side, sublayers that no body knows."""
    torch.manual_seed(5)

    def mlp(act: str = "silu") -> MLP:
        return MLP(
            ops.quantize(torch.randn(320, EMBED) / 8, "int8"), ops.quantize(torch.randn(EMBED, 160) / 8, "int8"), act
        )

    mixers = [
        CASES[name]() for name in ("plain", "biases, sinks, softcap", "chunks", "no positions", "norm of all heads")
    ]
    recurrent = {name: make("bfloat16", EMBED, EMBED) for name, make in MIXERS.items()}
    return [
        kind(mixers[0], mlp(), norm_fixed(), norm_fixed()),
        kind(mixers[1], mlp(), norm_fixed(), norm_fixed(), norm_of(EMBED), norm_of(EMBED), 0.5),
        kind(mixers[2], mlp("relu2"), norm_fixed(), norm_fixed(), parallel=True),
        kind(mixers[3], mlp("gelu"), norm_fixed(), norm_fixed(), parallel=True),
        kind(mixers[4], mlp("gelu"), norm_fixed(), norm_fixed()),
        kind(mixers[0], None, norm_fixed()),
        kind(recurrent["delta"], mlp(), norm_fixed(), norm_fixed(), norm_of(EMBED), norm_of(EMBED), 0.5),
        kind(recurrent["state space in groups"], mlp(), norm_fixed(), norm_fixed()),
        kind(recurrent["state space"], None, norm_fixed()),
        kind(recurrent["delta with a decay a channel"], mlp("relu2"), norm_fixed(), norm_fixed(), parallel=True),
        kind(recurrent["delta"], mlp("gelu"), norm_fixed(), norm_fixed(), parallel=True),
        kind(recurrent["state space without a norm"], mlp("gelu"), None, norm_fixed(), norm_of(EMBED)),
        kind(
            ParallelHybrid(mixers[1], recurrent["state space in groups"], 0.7, 1.3),
            replace(mlp(), factors=torch.rand(320)),
            norm_fixed(),
            norm_fixed(),
        ),
        kind(
            ParallelHybrid(mixers[0], replace(recurrent["state space"], scale=torch.rand(276)), 0.5),
            mlp("gelu"),
            norm_fixed(),
            norm_fixed(),
            scale=0.5,
        ),
        kind(recurrent["convolution"], mlp(), norm_fixed(), norm_fixed()),
        kind(recurrent["convolution of one, with biases"], None, norm_fixed(), None, norm_of(EMBED), None, 0.5),
        kind(mixers[1], mlp(), norm_fixed(), norm_fixed()),
    ]


def test_a_run_of_blocks_equals_one_after_the_other(variant: str) -> None:
    outs = []
    for kind in (Block, Apart):
        blocks, layout = stack(kind), Layout(2, torch.device("cpu"), torch.float32, rewind=4)
        memories, starts, out = [block.mixer.new_state(layout) for block in blocks], [0, 0], []
        plan = Plan(blocks)
        torch.manual_seed(6)
        for counts in ([3, 7], [1, 1], [0, 1], [4, 4], [2, 1], [1, 1], [1, 1]):
            step = step_of(starts, counts)
            for memory in memories:
                memory.reserve(step)
            x = torch.randn(2, step.width, EMBED)
            y = plan.run(x, step, memories)
            out += [y[row, :count] for row, count in enumerate(counts)]
            starts = list(step.ends)
            for memory in memories:
                changes = Changes()
                memory.commit(step, tuple(counts), changes)
                changes.apply()
        outs.append([*out, *(kept for memory in memories for kept in memory.tensors())])
    assert all(torch.equal(got, want) for got, want in zip(*outs, strict=True))


@pytest.mark.parametrize("after", [None, norm_of(EMBED)], ids=["", "a norm of the sum"])
@pytest.mark.parametrize("joined", [True, False], ids=["on a stream", "alone"])
def test_mixers_side_by_side_give_their_sum(variant: str, joined: bool, after: Norm | None) -> None:
    torch.manual_seed(7)
    both = ParallelHybrid(CASES["plain"](), MIXERS["state space"]("float32", EMBED, EMBED), 0.7, 1.3)
    x, step, layout = torch.randn(2, 3, EMBED), step_of([0, 0], [3, 2]), Layout(2, torch.device("cpu"), torch.float32)
    residual = ops.Residual(torch.randn(2, 3, EMBED), after, 0.5) if joined else None
    memories = [mixer.new_state(layout) for mixer in (both, both.attention, both.other)]
    for memory in memories:
        memory.reserve(step)
    seen, folded = both.attention(x, step, memories[1], norm_fixed()), both.other(x, step, memories[2], norm_fixed())
    want = 0.7 * seen + 1.3 * folded
    want = want if residual is None else ops.add_residual(residual, want)
    got = both(x, step, memories[0], norm_fixed(), residual)
    for row, count in enumerate(step.counts):
        torch.testing.assert_close(got[row, :count], want[row, :count], rtol=1e-5, atol=1e-5)


def test_attention_and_recurrences_wait_together(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block for block in stack(Block) if block.mlp is None or block.mlp.act in ("silu", "relu2")]
    runs, one = [], FusedBodies.run

    def counted(fused: FusedBodies, x: Tensor, *given: Any) -> Tensor:
        runs.append(len(given[3]))
        return one(fused, x, *given)

    monkeypatch.setattr(FusedBodies, "run", counted)
    layout, step = Layout(2, torch.device("cpu"), torch.float32), step_of([0, 0], [2, 1])
    memories = [block.mixer.new_state(layout) for block in blocks]
    for memory in memories:
        memory.reserve(step)
    Plan(blocks).run(torch.randn(2, 2, EMBED), step, memories)
    sublayers = [(block.mlp is not None) + 1 + isinstance(block.mixer, ParallelHybrid) for block in blocks]
    assert runs == [sum(sublayers)]


def test_a_weight_that_was_replaced_is_read(variant: str) -> None:
    x, norm = torch.randn(1, 1, EMBED), norm_fixed()
    up, down = ops.FloatWeight(torch.randn(320, EMBED)), ops.FloatWeight(torch.randn(EMBED, 160))
    sublayer = ops.MLPSublayer(up, down, "silu", norm=norm)

    def fed() -> Tensor:
        graph = ops.FusedGraph(x)
        fusable = graph.fusable(sublayer)
        assert fusable is not None
        graph.add(fusable)
        return graph.flush()

    before = fed()
    down.storage = -down.storage
    torch.testing.assert_close(fed() - x, x - before)
    norm.weight.requires_grad_()
    assert ops.FusedGraph(x).fusable(sublayer) is None  # a gradient is to follow
    with torch.no_grad():
        assert ops.FusedGraph(x).fusable(sublayer) is not None


def test_what_does_not_fit_is_refused(variant: str) -> None:
    up, down = ops.quantize(torch.randn(64, 32), "int8"), ops.quantize(torch.randn(32, 64), "int8")
    with pytest.raises(ValueError, match="do not fit each other"):
        ops.feed_forward(torch.randn(1, 32), up, down, "silu")
    (sublayer,) = attention("int4", 4, 2, 32, rope=rope(16)).sublayers(None, None, 1.0)
    view = ops.KVView(torch.zeros(1, 2, 8, 32), torch.zeros(1, 2, 8, 32))
    x, one = torch.randn(1, 1, EMBED), torch.tensor([1])
    tables = rope(16).rotation(step_of([8], [1]))

    def attend(starts: Tensor, view: ops.KVView) -> Tensor:
        graph = ops.FusedGraph(x, starts, one)
        fusable = graph.fusable(sublayer, view=view, tables=tables)
        assert fusable is not None
        graph.add(fusable)
        return graph.flush()

    with pytest.raises(ValueError, match="ring of 8 slots"):
        attend(torch.tensor([8]), view)
    tables = ops.RopeTables(torch.ones(4, 16), torch.zeros(4, 16))  # of four positions
    attend(torch.tensor([3]), view)
    with pytest.raises(ValueError, match="row 0 starts at 4"):
        attend(torch.tensor([4]), view)
    with pytest.raises(ValueError, match="do not fit 1 rows"):
        attend(one * 0, ops.KVView(torch.zeros(1, 3, 8, 32), view.v))
