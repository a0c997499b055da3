"""Recurrent layers that run as one body give what their operations give one after the other, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lmstate.ops as ops
from lmstate.models.mixers import gated_delta, mamba2
from lmstate.models.mixers.gated_delta import GatedDelta
from lmstate.models.mixers.mamba2 import GatedNorm, Mamba2
from lmstate.ops import Norm, Residual
from lmstate.state import FoldState, Layout, Step

EMBED = 64
CPU = torch.device("cpu")


def delta(kind: str, channels: bool = False) -> GatedDelta:
    key_heads, heads, key_dim, value_dim = 2, 4, 16, 40
    features, values, decays = 2 * key_heads * key_dim + heads * value_dim, heads * value_dim, heads * key_dim
    decays = decays if channels else heads
    return GatedDelta(
        ops.quantize(torch.randn(features + values, EMBED) / 8, kind),
        ops.FloatWeight(torch.randn(heads + decays, EMBED) / 8),
        ops.quantize(torch.randn(48, values) / 8, kind),
        torch.randn(features, 4),
        -torch.linspace(0.1, 3.0, heads),
        torch.randn(decays),
        Norm(torch.rand(value_dim) + 0.5, 1e-6),
        key_heads,
        key_dim,
        value_dim,
        gate_act="sigmoid" if channels else "silu",
        beta_scale=2.0 if channels else 1.0,
    )


def state_space(kind: str, norm: GatedNorm | None, biases: bool) -> Mamba2:
    heads, head_dim, groups, states = 4, 24, 2, 20
    inner, features = heads * head_dim, heads * head_dim + 2 * groups * states
    return Mamba2(
        ops.quantize(torch.randn(inner + features + heads, EMBED) / 8, kind),
        ops.quantize(torch.randn(48, inner) / 8, kind),
        torch.randn(features, 4),
        torch.randn(features) if biases else None,
        -torch.linspace(0.1, 3.0, heads),
        torch.randn(heads),
        torch.randn(heads),
        groups,
        states,
        head_dim,
        norm,
        (0.05, 1.5),
        torch.randn(inner + features + heads) if biases else None,
        torch.randn(48) if biases else None,
    )


INNER = 96
MIXERS = {
    "delta": lambda kind: delta(kind),
    "delta with a decay a channel": lambda kind: delta(kind, channels=True),
    "state space": lambda kind: state_space(kind, GatedNorm(Norm(torch.rand(INNER), 1e-5)), biases=False),
    "state space in groups": lambda kind: state_space(kind, GatedNorm(Norm(torch.rand(INNER), 1e-5), 2, True), True),
    "state space without a norm": lambda kind: state_space(kind, None, biases=True),
}


def run(mixer: GatedDelta | Mamba2, xs: list[tuple[list[int], Tensor]]) -> tuple[list[Tensor], FoldState]:
    """What a mixer gives for steps `(counts, x)`, and the state that it leaves."""
    memory = mixer.new_state(Layout(len(xs[0][0]), CPU, torch.float32, rewind=4))
    assert isinstance(memory, FoldState)
    starts, outs = [0] * len(xs[0][0]), []
    norm, after = Norm(torch.linspace(0.5, 1.5, EMBED), 1e-5), Norm(torch.linspace(1.5, 0.5, 48), 1e-5)
    for counts, x in xs:
        step = Step(tuple(starts), tuple(counts), CPU, tuple(starts))
        memory.reserve(step)
        y = mixer(x, step, memory, norm, Residual(x[..., :48].contiguous(), after, 0.3))
        install = memory.commit(step, tuple(counts))
        assert install is not None
        install()
        outs += [y[row, :count] for row, count in enumerate(counts)]
        starts = [start + count for start, count in zip(starts, counts)]
    return outs, memory


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_layer_equals_its_operations(variant: str, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    mixer = MIXERS[name](kind)
    counts = [[3, 7], [1, 1], [0, 1], [4, 4], [1, 1], [1, 1], [1, 1]]  # ragged, with an idle row, past some anchors
    xs = [(each, torch.randn(2, max(each), EMBED)) for each in counts]
    outs, memory = run(mixer, xs)
    fused = []
    for module, layer in ((gated_delta, "delta_layer"), (mamba2, "ssd_layer")):
        monkeypatch.setattr(module, layer, lambda *given, **more: fused.append(given))
    apart, expected = run(mixer, xs)
    assert fused, "the body was not asked"
    assert all(torch.equal(got, want) for got, want in zip(outs, apart))
    assert all(torch.equal(got, want) for got, want in zip(memory.tensors(), expected.tensors()))
    assert [each.positions for each in memory.anchors] == [each.positions for each in expected.anchors]


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_row_is_the_same_whatever_is_beside_it(variant: str, name: str, kind: str) -> None:
    torch.manual_seed(2)
    mixer, x = MIXERS[name](kind), torch.randn(3, 6, EMBED)
    together, _ = run(mixer, [([6, 6, 6], x)])
    for row in range(3):
        (alone,), _ = run(mixer, [([6], x[row : row + 1])])
        pieces, _ = run(mixer, [([1], x[row : row + 1, t : t + 1]) for t in range(6)])
        assert torch.equal(together[row], alone) and torch.equal(torch.cat(pieces), alone)


def test_what_does_not_fit_is_refused(variant: str) -> None:
    mixer = delta("int8")
    mixer.gates = ops.FloatWeight(torch.randn(7, EMBED))
    with pytest.raises(ValueError, match="do not fit"):
        run(mixer, [([1], torch.randn(1, 1, EMBED))])
    space = state_space("int8", None, biases=False)
    space.head_dim = 23
    with pytest.raises(ValueError, match="do not fit"):
        run(space, [([1], torch.randn(1, 1, EMBED))])
