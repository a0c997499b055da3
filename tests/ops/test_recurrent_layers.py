"""Recurrent layers that run as one body give what their operations give one after the other, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import lmstate.ops as ops
from lmstate.models.layers.gated_delta_net import GatedDelta
from lmstate.models.layers.mamba2 import Mamba2
from lmstate.models.layers.short_conv import ShortConv
from lmstate.ops import Norm, Residual
from lmstate.state import Layout, RecurrentState, Step
from lmstate.state.changes import Changes
from tests.ops.small_mixers import MIXERS, convolution, delta, state_space

EMBED, OUT = 64, 48
CPU = torch.device("cpu")


def run(
    mixer: GatedDelta | Mamba2 | ShortConv, xs: list[tuple[list[int], Tensor]], apart: bool = False
) -> tuple[list[Tensor], RecurrentState]:
    """What a mixer gives for steps `(counts, x)`, and the state that it leaves."""
    memory = mixer.new_state(Layout(len(xs[0][0]), CPU, torch.float32, rewind=4))
    assert isinstance(memory, RecurrentState)
    starts, outs = [0] * len(xs[0][0]), []
    norm, after = Norm(torch.linspace(0.5, 1.5, EMBED), 1e-5), Norm(torch.linspace(1.5, 0.5, OUT), 1e-5)
    for counts, x in xs:
        step = Step(tuple(starts), tuple(counts), CPU, tuple(starts))
        memory.reserve(step)
        residual = Residual(x[..., :OUT].contiguous(), after, 0.3)
        y = mixer.forward(x, step, memory, norm, residual) if apart else mixer(x, step, memory, norm, residual)
        changes = Changes()
        memory.commit(step, tuple(counts), changes)
        changes.apply()
        outs += [y[row, :count] for row, count in enumerate(counts)]
        starts = [start + count for start, count in zip(starts, counts)]
    return outs, memory


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_layer_equals_its_operations(variant: str, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    mixer = MIXERS[name](kind, EMBED, OUT)
    counts = [[3, 7], [1, 1], [0, 1], [4, 4], [1, 1], [1, 1], [1, 1]]  # ragged, with an idle row, past some checkpoints
    xs = [(each, torch.randn(2, max(each), EMBED)) for each in counts]
    added, add = [], ops.FusedGraph.add
    monkeypatch.setattr(ops.FusedGraph, "add", lambda *given: added.append(add(*given)) or added[-1])
    outs, memory = run(mixer, xs)
    assert added and None not in added
    apart, expected = run(mixer, xs, apart=True)
    assert all(torch.equal(got, want) for got, want in zip(outs, apart))
    assert all(torch.equal(got, want) for got, want in zip(memory.tensors(), expected.tensors()))
    passed, wanted = (
        [[one and one.position for one in pair] for pair in each.checkpoints] for each in (memory, expected)
    )
    assert passed == wanted


VERDICTS = (([3, 2], [1, 2]), ([2, 4], [2, 1]), ([4, 4], [2, 3]), ([1, 0], [1, 0]), ([4, 3], [3, 0]), ([3, 4], [1, 2]))


@pytest.mark.parametrize("name", MIXERS)
def test_partly_accepted_steps_equal_those_never_drafted(variant: str, name: str) -> None:
    """What was accepted of a step is scanned by the next one: whatever comes between, nothing else is to be seen."""
    torch.manual_seed(3)
    mixer = MIXERS[name]("int4", EMBED, OUT)
    x = torch.randn(2, 24, EMBED)
    layout = Layout(2, CPU, torch.float32, rewind=4)
    memory, plain = mixer.new_state(layout), mixer.new_state(layout)
    assert isinstance(memory, RecurrentState) and isinstance(plain, RecurrentState)
    lengths, left = [0, 0], 0
    for counts, accepted in VERDICTS:
        drafted = forward(mixer, memory, x, lengths, counts, accepted)
        single = [forward(mixer, plain, x, lengths, counts=[n > at for n in accepted], past=at) for at in range(4)]
        for row, count in enumerate(accepted):
            assert torch.equal(drafted[row, :count], torch.cat([each[row] for each in single])[:count])
        lengths = [length + n for length, n in zip(lengths, accepted)]
        left += memory.unscanned is not None
        for row, length in enumerate(lengths):
            for to in range(memory.earliest_rewind(row, length), length + 1):
                got, want = (rewound(each, row, length, to) for each in (memory, plain))
                assert all(torch.equal(got[part], want[part]) for part in want), (row, to)
    assert left > 2


def forward(
    mixer: GatedDelta | Mamba2 | ShortConv,
    memory: RecurrentState,
    x: Tensor,
    lengths: list[int],
    counts: Sequence[int],
    accepted: Sequence[int] | None = None,
    past: int = 0,
) -> Tensor:
    """A step of so many tokens of x `[R, .., E]` from `past` behind each row's length on; accepts all by default."""
    starts = tuple(length + past for length in lengths)
    step = Step(starts, tuple(map(int, counts)), CPU, starts, speculative=accepted is not None)
    pieces = [row[start : start + n] for row, start, n in zip(x, starts, step.counts)]
    if not step.width:
        return torch.empty(len(lengths), 0, OUT)
    memory.reserve(step)
    y = mixer(torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True), step, memory, None, None)
    changes = Changes()
    memory.commit(step, step.counts if accepted is None else tuple(accepted), changes)
    changes.apply()
    return y


def rewound(memory: RecurrentState, row: int, length: int, to: int) -> Mapping[str, Tensor]:
    """What a copy of a state holds of a row that went back to a position."""
    copied, changes = copy.deepcopy(memory), Changes()
    copied.rewind(row, length, to, changes)
    changes.apply()
    return copied.capture(row, to)


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_row_is_the_same_whatever_is_beside_it(variant: str, name: str, kind: str) -> None:
    torch.manual_seed(2)
    mixer, x = MIXERS[name](kind, EMBED, OUT), torch.randn(3, 6, EMBED)
    together, _ = run(mixer, [([6, 6, 6], x)])
    for row in range(3):
        (alone,), _ = run(mixer, [([6], x[row : row + 1])])
        pieces, _ = run(mixer, [([1], x[row : row + 1, t : t + 1]) for t in range(6)])
        assert torch.equal(together[row], alone) and torch.equal(torch.cat(pieces), alone)


def test_what_does_not_fit_is_refused(variant: str) -> None:
    mixer = replace(delta("int8", EMBED, OUT), gates=ops.FloatWeight(torch.randn(7, EMBED)))
    with pytest.raises(ValueError, match="do not fit"):
        run(mixer, [([1], torch.randn(1, 1, EMBED))])
    space = replace(state_space("int8", EMBED, OUT, None, biases=False), head_dim=23)
    with pytest.raises(ValueError, match="do not fit"):
        run(space, [([1], torch.randn(1, 1, EMBED))])
    short = replace(convolution("int8", EMBED, OUT, 3, biases=False), project=ops.FloatWeight(torch.randn(190, EMBED)))
    with pytest.raises(ValueError, match="three times the 64 features"):
        run(short, [([1], torch.randn(1, 1, EMBED))])
