"""Scans of channels, and gated norms: their references' numbers, and the same bits for any cut, row and neighbor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lmstate.ops.cuda import recurrent
from lmstate.ops.recurrent import gated_norm, rg_lru, selective_scan, wkv
from lmstate.ops.recurrent.scan import running_peaks
from lmstate.ops.types.params import Norm
from lmstate.ops.types.recurrences import RGLRUOperands, SelectiveScanOperands

Carry = Sequence[Tensor]
Body = Callable[[list[Tensor], Carry, Tensor], tuple[Tensor, Carry]]
"""Inputs `[R, T, ...]`, carry and counts -> outputs and carry."""

TOKENS = 9
COUNTS = (TOKENS, 4, 0)


def holds(body: Body, reference: Body, inputs: list[Tensor], carry: Carry) -> None:
    """The kernel gives what its reference gives of ragged rows, and the same bits for any cut, alone or in any order.

    Padding holds NaN, which reaches nothing.
    """
    counts = torch.tensor(COUNTS)
    poisoned = [x.clone() for x in inputs]
    for x in poisoned:
        for row, count in enumerate(COUNTS):
            x[row, count:] = torch.nan
    y, new = body(poisoned, carry, counts)
    expected, end = reference(inputs, carry, counts)
    for row, count in enumerate(COUNTS):
        torch.testing.assert_close(y[row, :count], expected[row, :count], rtol=2e-5, atol=1e-5)
        assert not y[row, count:].any()
    for own, other in zip(new, end, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-5, atol=1e-5)
    for own, before in zip(new, carry):
        assert torch.equal(own[2], before[2]), "an idle row keeps its carry"
    for cut in ([1] * TOKENS, [4, 5], [1, 7, 1]):
        first, state, pieces = 0, [part[:1] for part in carry], []
        for size in cut:
            piece, state = body([x[:1, first : first + size] for x in inputs], state, torch.tensor([size]))
            pieces.append(piece)
            first += size
        assert torch.equal(torch.cat(pieces, 1), y[:1])
        assert all(torch.equal(own, whole[:1]) for own, whole in zip(state, new))
    turned = [2, 0, 1]
    y_turned, _ = body([x[turned] for x in poisoned], [part[turned] for part in carry], counts[turned])
    assert torch.equal(y_turned, y[turned])


@pytest.mark.parametrize(("softplus", "gates"), [(True, True), (False, False)])
def test_the_selective_scan(softplus: bool, gates: bool) -> None:
    x, z, B, C = (torch.randn(3, TOKENS, width) for width in (70, 70, 12, 12))
    dt = torch.randn(3, TOKENS, 70) * 6 - 3 if softplus else torch.rand(3, TOKENS, 70)
    A, D = -torch.rand(70, 12), torch.randn(70) if gates else None

    def body(inputs: list[Tensor], carry: Carry, counts: Tensor) -> tuple[Tensor, Carry]:
        x, dt, B, C, *gate = inputs
        known = x, dt, A, B, C, D, *carry, counts, softplus, gate[0] if gate else None
        y, new = recurrent.selective_scan(SelectiveScanOperands(*known))
        return y, (new,)

    def reference(inputs: list[Tensor], carry: Carry, counts: Tensor) -> tuple[Tensor, Carry]:
        x, dt, B, C, *gate = inputs
        given = (x, dt, A, B, C, D, *carry, counts)
        y, new = selective_scan.selective_scan(*given, softplus=softplus, gate=gate[0] if gate else None)
        return y, (new,)

    holds(body, reference, [x, dt, B, C, *([z] if gates else [])], [torch.randn(3, 70, 12)])


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_the_rg_lru(scale: float) -> None:
    inputs = [torch.randn(3, TOKENS, 140) for _ in range(3)]
    param, seen = torch.randn(140) * scale - 4 * (scale < 1), torch.tensor([0.0, 1.0, 0.0])
    carry = [torch.randn(3, 140) * seen[:, None], seen]
    holds(
        lambda inputs, carry, counts: recurrent.rg_lru(RGLRUOperands(*inputs, param, *carry, counts)),
        lambda inputs, carry, counts: rg_lru.rg_lru(*inputs, param, (carry[0], carry[1]), counts),
        inputs,
        carry,
    )


def test_the_averages_of_rwkv() -> None:
    inputs = [torch.randn(3, TOKENS, 140) * 8, torch.randn(3, TOKENS, 140)]
    decay, bonus = -torch.rand(140) * 4, torch.randn(140)
    fresh = torch.tensor([0.0, 1.0, 1.0])[:, None]
    carry = [torch.randn(3, 140) * fresh, torch.rand(3, 140) * fresh, torch.randn(3, 140) * fresh]
    holds(
        lambda inputs, carry, counts: recurrent.wkv(*inputs, decay, bonus, tuple(carry), counts, wkv.NOTHING),
        lambda inputs, carry, counts: wkv.wkv(*inputs, decay, bonus, (carry[0], carry[1], carry[2]), counts),
        inputs,
        carry,
    )


def test_running_peaks_are_those_of_the_reference_to_the_bit() -> None:
    kept, added = -torch.rand(2, 7, 130).double(), torch.randn(2, 7, 130).double()
    added[1, 3:] = -torch.inf
    peak = torch.randn(2, 130)
    assert torch.equal(recurrent.running_peaks(kept, added, peak), running_peaks(kept, added, peak))


@pytest.mark.parametrize("act", ["silu", "sigmoid"])
@pytest.mark.parametrize(("groups", "weights", "gate_last"), [(1, 1, False), (4, 1, True), (4, 4, False)])
def test_gated_norms(act: str, groups: int, weights: int, gate_last: bool) -> None:
    y, gate, norm = torch.randn(2, 5, 96), torch.randn(2, 5, 96), Norm(torch.rand(96 * weights // groups), 1e-5)
    own = recurrent.gated_norm(y, gate, norm, act, groups, gate_last)
    given = {"act": act, "groups": groups, "gate_last": gate_last}
    torch.testing.assert_close(own, gated_norm.gated_norm_reference(y, gate, norm, **given), rtol=1e-5, atol=1e-6)
    one = recurrent.gated_norm(y[1:, 2:3], gate[1:, 2:3], norm, act, groups, gate_last)
    assert torch.equal(one, own[1:, 2:3])


def test_gates_alone() -> None:
    y, gate = torch.randn(2, 5, 90), torch.randn(2, 5, 180)[..., ::2]
    torch.testing.assert_close(recurrent.gated_norm(y, gate, None, "sigmoid"), y * gate.sigmoid())
