"""The native recurrences against their references, on every variant that this processor runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cpu.mixers import MixerBodies
from lmstate.ops.cpu.recurrent import RUN, RecurrentBodies
from lmstate.ops.recurrent.causal_conv import causal_conv
from lmstate.ops.recurrent.gated_delta_mixer import gated_delta_mixer
from lmstate.ops.recurrent.gated_delta_rule import gated_delta_rule
from lmstate.ops.recurrent.gated_norm import gated_norm, gated_norm_reference
from lmstate.ops.recurrent.linear_attention import linear_attention
from lmstate.ops.recurrent.mamba2_mixer import mamba2_mixer
from lmstate.ops.recurrent.rg_lru import rg_lru
from lmstate.ops.recurrent.selective_scan import selective_scan
from lmstate.ops.recurrent.ssd import ssd
from lmstate.ops.types.mixers import GatedDeltaParams, Mamba2Params
from lmstate.ops.types.params import Gate, Norm
from tests.ops import fold_properties as properties
from tests.ops.fold_properties import Carry, Inputs

REFERENCE = dispatch.Choice("reference", "asked by the test", None, exact=True)


@dataclass(frozen=True)
class Case:
    """An operation with its weights: `inputs` [R, T, ...], which a caller may cut, and `carry` [R, ...] are shapes."""

    inputs: tuple[tuple[int, ...], ...]
    carry: tuple[tuple[int, ...], ...]
    run: Callable[[Inputs, Carry, Tensor], tuple[Tensor, Carry]]

    def draw(self, rows: int, width: int) -> tuple[Inputs, Carry]:
        generator = torch.Generator().manual_seed(width)
        inputs = tuple(torch.randn(rows, width, *shape, generator=generator) for shape in self.inputs)
        carry = (torch.randn(rows, *shape, generator=generator) for shape in self.carry)
        return inputs, tuple(part if part.dim() > 1 else part.abs() for part in carry)  # a number a row is no sign


def conv(width: int, kernel: int, bias: bool, silu: bool) -> Case:
    weight = torch.randn(width, kernel, generator=torch.Generator().manual_seed(0))

    def run(inputs: Inputs, carry: Carry, counts: Tensor) -> tuple[Tensor, Carry]:
        offset = weight[:, 0].contiguous() if bias else None
        y, tail = causal_conv(*inputs, carry[0], weight, offset, counts, "silu" if silu else None)
        return y, (tail,)

    return Case(((width,),), ((kernel - 1, width),), run)


def delta(key_heads: int, heads: int, key_dim: int, value_dim: int, channels: bool, normalize: bool) -> Case:
    def run(inputs: Inputs, carry: Carry, counts: Tensor) -> tuple[Tensor, Carry]:
        q, k, v, g, beta = inputs
        if not normalize:
            q, k = q / key_dim**0.5, k / key_dim**0.5
        y, new = gated_delta_rule(
            q, k, v, -g.abs(), beta.abs() / (1 + beta.abs()), carry[0], counts, scale=key_dim**-0.5, normalize=normalize
        )
        return y, (new,)

    gate = (heads, key_dim) if channels else (heads,)
    keys = (key_heads, key_dim)
    return Case((keys, keys, (heads, value_dim), gate, (heads,)), ((heads, key_dim, value_dim),), run)


def plain(heads: int, dim: int, value_dim: int) -> Case:
    slope = torch.linspace(0.0, 2.0, heads)

    def run(inputs: Inputs, carry: Carry, counts: Tensor) -> tuple[Tensor, Carry]:
        decay = (-slope).expand(inputs[2].shape[:3])
        y, new = linear_attention(*inputs, decay, carry[0], counts)
        return y / dim, (new,)

    return Case(((heads, dim), (heads, dim), (heads, value_dim)), ((heads, dim, value_dim),), run)


def state_space(heads: int, head_dim: int, groups: int, states: int, extras: bool) -> Case:
    A = -torch.linspace(0.1, 3.0, heads)
    D, bias = (torch.linspace(-1.0, 1.0, heads), torch.linspace(-2.0, 2.0, heads)) if extras else (None, None)
    limits = (0.05, 1.5) if extras else (0.0, float("inf"))

    def run(inputs: Inputs, carry: Carry, counts: Tensor) -> tuple[Tensor, Carry]:
        x, dt, B, C = inputs
        y, new = ssd(x, dt, A, B, C / states, D, carry[0], counts, dt_bias=bias, dt_limits=limits)
        return y, (new,)

    shapes = ((heads, head_dim), (heads,), (groups, states), (groups, states))
    return Case(shapes, ((heads, head_dim, states),), run)


def scan(channels: int, states: int, skip: bool, raw: bool = False) -> Case:
    A = -torch.linspace(0.1, 5.0, channels * states).view(channels, states)

    def run(inputs: Inputs, carry: Carry, counts: Tensor) -> tuple[Tensor, Carry]:
        x, dt, B, C = inputs[:4]
        D = torch.linspace(-1.0, 1.0, channels) if skip else None
        if raw:
            y, new = selective_scan(x, 8 * dt, A, B, C, D, carry[0], counts, softplus=True, gate=inputs[4])
        else:
            y, new = selective_scan(x, dt.abs(), A, B, C, D, carry[0], counts)
        return y, (new,)

    gate = ((channels,),) if raw else ()
    return Case(((channels,), (channels,), (states,), (states,), *gate), ((channels, states),), run)


def lru(width: int) -> Case:
    param = torch.linspace(-4.0, 4.0, width)

    def run(inputs: Inputs, carry: Carry, counts: Tensor) -> tuple[Tensor, Carry]:
        h, seen = carry
        return rg_lru(*inputs, param, (h, seen), counts)

    return Case(((width,), (width,), (width,)), ((width,), ()), run)


def whole_delta(key_heads: int, heads: int, key_dim: int, value_dim: int, channels: bool) -> Case:
    generator = torch.Generator().manual_seed(0)
    keys, values, decays = key_heads * key_dim, heads * value_dim, heads * (key_dim if channels else 1)
    conv = torch.randn(2 * keys + values, 4, generator=generator)
    dt_bias, norm = torch.randn(decays, generator=generator), Norm(torch.rand(value_dim, generator=generator), 1e-5)
    act: Gate = "sigmoid" if channels else "silu"
    A = -torch.linspace(0.1, 3.0, heads)
    params = GatedDeltaParams(conv, A, dt_bias, norm, key_heads, key_dim, act, beta_scale=2.0 if channels else 1.0)

    def run(inputs: Inputs, carry: Carry, counts: Tensor) -> tuple[Tensor, Carry]:
        tail, state = carry
        return gated_delta_mixer(*inputs, (tail, state), counts, params)

    features = 2 * keys + values
    return Case(
        ((features + heads + decays,), (values,)), ((3, features), (heads, key_dim, value_dim)), run
    )  # fmt: skip


def whole_ssd(heads: int, head_dim: int, groups: int, states: int, extras: bool) -> Case:
    generator = torch.Generator().manual_seed(0)
    inner, features = heads * head_dim, heads * head_dim + 2 * groups * states
    conv, some = torch.randn(features, 3, generator=generator), torch.randn(heads, generator=generator)
    norm = Norm(torch.rand(inner, generator=generator), 1e-5)
    params = Mamba2Params(
        conv, conv[:, 0].contiguous() if extras else None, -torch.linspace(0.1, 3.0, heads), some if extras else None,
        some if extras else None, head_dim, groups, (0.05, 1.5) if extras else (0.0, float("inf")),
        norm if extras else None, norm_groups=groups,
    )  # fmt: skip

    def run(inputs: Inputs, carry: Carry, counts: Tensor) -> tuple[Tensor, Carry]:
        tail, state = carry
        y, new = mamba2_mixer(*inputs, (tail, state), counts, params)
        return (y if extras else y / states), new

    return Case(((features + heads,), (inner,)), ((2, features), (heads, head_dim, states)), run)


CASES = {
    "conv of 4": conv(1100, 4, bias=True, silu=True),
    "conv of 2": conv(9, 2, bias=False, silu=False),
    "conv of 3": conv(40, 3, bias=True, silu=False),
    "conv of 7": conv(35, 7, bias=False, silu=True),
    "conv of 1": conv(20, 1, bias=False, silu=True),
    "delta": delta(2, 4, 64, 64, channels=False, normalize=True),
    "delta of odd sizes": delta(3, 3, 13, 37, channels=False, normalize=False),
    "delta with a decay a channel": delta(1, 2, 20, 48, channels=True, normalize=True),
    "lightning": plain(3, 24, 40),
    "ssd": state_space(4, 64, 1, 128, extras=True),
    "ssd of odd sizes": state_space(6, 7, 3, 19, extras=False),
    "scan": scan(70, 16, skip=True),
    "scan of odd sizes": scan(13, 5, skip=False),
    "scan of raw steps, gated": scan(70, 16, skip=True, raw=True),
    "rg_lru": lru(530),
    "a mixer of deltas": whole_delta(2, 4, 128, 128, channels=False),
    "a mixer of deltas with a decay a channel": whole_delta(2, 2, 20, 64, channels=True),
    "a mixer of deltas of odd sizes": whole_delta(3, 3, 13, 37, channels=False),
    "a state space mixer": whole_ssd(8, 64, 2, 128, extras=True),
    "a state space mixer of odd sizes": whole_ssd(6, 7, 3, 19, extras=False),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
WIDTHS = (1, 2, 5, RUN, RUN + 1, 2 * RUN + 7)


@EACH
@pytest.mark.parametrize("width", WIDTHS)
def test_native_equals_reference(variant: str, case: Case, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, carry = case.draw(3, width)
    counts = torch.tensor([width, 0, (width + 1) // 2])
    native = case.run(inputs, carry, counts)
    monkeypatch.setattr(dispatch, "choice", lambda: REFERENCE)
    wanted = case.run(inputs, carry, counts)
    for row, count in enumerate(counts.tolist()):
        torch.testing.assert_close(native[0][row, :count], wanted[0][row, :count], rtol=1e-5, atol=1e-5)
    for got, want in zip(native[1], wanted[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for name, case in CASES.items() if "of deltas" in name])
@pytest.mark.parametrize("width", WIDTHS)
def test_answers_that_nobody_wants_change_no_bit(variant: str, case: Case, width: int) -> None:
    (inputs, gate), carry = case.draw(3, width)
    counts = torch.tensor([width, 0, (width + 1) // 2])
    wanted = case.run((inputs, gate), carry, counts)
    answers, new = case.run((inputs, None), carry, counts)
    assert answers.shape == (3, width, 0)
    assert all(torch.equal(got, want) for got, want in zip(new, wanted[1], strict=True))


@EACH
@pytest.mark.parametrize("width", [1, 6, RUN])
def test_padding_is_never_read_and_the_carry_never_written(variant: str, case: Case, width: int) -> None:
    properties.check_ragged_equals_alone(case.run, *case.draw(4, width), [0, 1, width, (width + 1) // 2], 0.0)


@EACH
def test_any_cut_is_bit_for_bit_the_whole(variant: str, case: Case) -> None:
    properties.check_any_cut_equals_whole(case.run, *case.draw(2, RUN), (1, 1, 2, 5, 1, RUN // 2 - 3), 0.0)


@EACH
def test_threads_change_no_bit(variant: str, case: Case) -> None:
    inputs, carry = case.draw(3, 20)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        several = case.run(inputs, carry, properties.full(inputs))
    finally:
        torch.set_num_threads(before)
    properties.assert_same(case.run(inputs, carry, properties.full(inputs)), several, 0.0)


@EACH
def test_inputs_that_are_parts_of_one_projection_need_no_copy(variant: str, case: Case) -> None:
    inputs, carry = case.draw(2, 9)
    together = torch.cat([torch.full((2, 9, 3), float("nan")), *(x.flatten(2) for x in inputs)], -1)
    parts = together.split([3, *(x.flatten(2).shape[-1] for x in inputs)], -1)[1:]
    views = tuple(part.unflatten(-1, x.shape[2:]) for part, x in zip(parts, inputs, strict=True))
    assert not any(view.is_contiguous() for view in views)
    counts = properties.full(inputs)
    properties.assert_same(case.run(views, carry, counts), case.run(inputs, carry, counts), 0.0)


def test_the_native_bodies_run(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    recurrences = ("causal_conv", "gated_delta_rule", "ssd", "selective_scan", "rg_lru")
    bodies = [*((RecurrentBodies, name) for name in recurrences), (MixerBodies, "gated_delta"), (MixerBodies, "mamba2")]
    for kind, name in bodies:
        body, told = getattr(kind, name), f"{kind.__name__}.{name}"
        monkeypatch.setattr(kind, name, lambda *a, body=body, told=told, **b: (called.append(told), body(*a, **b))[1])
    for case in CASES.values():
        inputs, carry = case.draw(2, 3)
        case.run(inputs, carry, properties.full(inputs))
    assert len(called) == len(CASES) and len(set(called)) == 7


def test_gradients_go_through_the_references(variant: str) -> None:
    for case in CASES.values():
        inputs, carry = case.draw(1, 3)
        inputs = tuple(x.requires_grad_() for x in inputs)
        y, _ = case.run(inputs, carry, properties.full(inputs))
        y.sum().backward()
        assert all(x.grad is not None for x in inputs)


def test_shapes_that_do_not_fit_are_refused(variant: str) -> None:
    q, v, gate = torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4)
    carry, counts = torch.zeros(1, 4, 8, 9), torch.tensor([2])
    with pytest.raises(ValueError, match="the carry must be"):
        gated_delta_rule(q, q, v, gate, gate, carry, counts, scale=1.0)
    with pytest.raises(ValueError, match="counts must be"):
        gated_delta_rule(q, q, v, gate, gate, carry[..., :8], counts.int(), scale=1.0)


@pytest.mark.parametrize("gate_last", [False, True])
@pytest.mark.parametrize("act", ["silu", "sigmoid"])
@pytest.mark.parametrize(("groups", "width", "shared"), [(1, 300, False), (4, 16, True), (3, 21, False), (5, 7, True)])
def test_the_gated_norm_equals_its_reference(
    variant: str, groups: int, width: int, shared: bool, act: Gate, gate_last: bool
) -> None:
    torch.manual_seed(0)
    y, wide = torch.randn(2, 3, groups * width), torch.randn(2, 3, groups * width + 5)
    gate = wide[..., 5:]
    norm = Norm(torch.rand(width if shared else groups * width), 1e-5)
    got = gated_norm(y, gate, norm, act=act, groups=groups, gate_last=gate_last)
    wanted = gated_norm_reference(y, gate, norm, act=act, groups=groups, gate_last=gate_last)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    alone = gated_norm(y[1:, 2:], gate[1:, 2:], norm, act=act, groups=groups, gate_last=gate_last)
    assert torch.equal(alone[0, 0], got[1, 2])
