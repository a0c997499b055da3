"""Quantised keys and values: every promise of the state holds, against feeding a quantised state whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lmstate
from lmstate import kv, ops
from lmstate.ops import kv_codes
from lmstate.ops.attend_quantized import attend_quantized
from tests.invariants.mirror import Mirror, bytes_held
from tests.zoo import CASES, ours, text

# Full attention, windows, softcaps, sinks, latents, chunks, recurrences beside it.
NAMES = "llama mistral gemma2 gpt_oss llama4 deepseek_v2 deepseek_v3 qwen3_next falcon_h1"
FAMILIES = [name for name in NAMES.split() if name in CASES]
every_family = pytest.mark.parametrize("case", FAMILIES)
every_width = pytest.mark.parametrize("bits", [8, 4])


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()


class Coded(Mirror):
    """A mirror whose oracle is one step of a quantised state over the whole row.

    A number on the edge of two codes may fall to either side where a product is summed in another order. So logits are
    compared by their median over a row: a flipped code moves few of them a little, a wrong token all of them much.
    """

    def __init__(self, case: str, bits: int, rows: int = 1, rewind: int = 16) -> None:
        super().__init__(ours(case), rows, kv=kv.Quantized(bits), rewind=rewind)
        self.bits = bits

    def expected(self, ids: Sequence[int]) -> Tensor:
        key = tuple(ids)
        if key not in self._known:
            state = self.model.new_state(kv=kv.Quantized(self.bits))
            self._known[key] = self.model([list(ids)], state, logits="all")[0]
        return self._known[key]


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(got: Tensor, expected: Tensor) -> None:
        assert got.shape == expected.shape
        difference = (got - expected).abs() / expected.std()
        assert float(difference.median()) < 0.02

    monkeypatch.setattr("tests.invariants.mirror.close", close)


@every_width
@every_family
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_cut_equals_whole(case: str, bits: int, data: st.DataObject) -> None:
    mirror = Coded(case, bits, rows=3, rewind=data.draw(st.sampled_from([0, 8])))
    widths = st.sampled_from([0, 1, 2, 5, 17, 33])
    for turn in range(4):
        new = [ids(data.draw(widths), 10 * turn + row) for row in range(3)]
        if turn % 2:
            mirror.draft(new, [data.draw(st.integers(0, len(row))) for row in new])
        else:
            mirror.extend(new, "all")
        row = data.draw(st.integers(0, 2))
        mirror.rewind(row, data.draw(st.integers(0, len(mirror.rows[row]))))
        mirror.check()
    mirror.select([1, 1, None])
    mirror.restore(2, mirror.state.snapshot(0), list(mirror.rows[0]))
    mirror.extend([ids(3, 90), ids(4, 91), ids(5, 92)])
    mirror.check()


@every_width
def test_each_token_is_quantised_once(bits: int) -> None:
    model = ours("mistral")
    state = model.new_state(kv=kv.Quantized(bits), rewind=8)
    model([ids(40)], state)
    before = state.snapshot()
    for seed in range(3):
        model([ids(9, seed)], state)
        state.rewind(0, 43)
        state.rewind(0, 40)
        for mine, then in zip(state.snapshot().layers, before.layers):
            for name in then:
                n = min(mine[name].shape[-2], then[name].shape[-2])
                assert torch.equal(mine[name][..., -n:, :], then[name][..., -n:, :])


@pytest.mark.parametrize(("bits", "least"), [(8, 1.9), (4, 3.5)])
@pytest.mark.parametrize("dim", [64, 128])
def test_bytes_against_bfloat16_with_scales_counted(bits: int, least: float, dim: int) -> None:
    codes, scales = kv_codes.widths(dim, bits)
    assert 2 * dim / (codes + 2 * scales) >= least


@every_width
def test_memory_is_true_to_the_byte(bits: int) -> None:
    for case in FAMILIES:
        state = ours(case).new_state(2, kv=kv.Quantized(bits))
        ours(case)([ids(30), ids(3)], state)
        assert sum(state.memory().values()) == bytes_held(state)


@every_width
@pytest.mark.parametrize("dim", [10, 12, 64, 80, 96, 128, 200])
@pytest.mark.parametrize("size", [1e-6, 1.0, 300.0])
def test_decoded_numbers_are_half_a_step_off_at_most(bits: int, dim: int, size: float) -> None:
    x = torch.randn(50, dim, generator=torch.Generator().manual_seed(dim)) * size
    x[0] = 0
    x[1] = 7.0
    x[2, 0] = 60000.0
    codes, scales = kv_codes.encode(x, bits)
    assert codes.shape[-1], scales.shape[-1] == kv_codes.widths(dim, bits)
    group = kv_codes.group_of(dim)
    groups, got = x.unflatten(-1, (-1, group)), kv_codes.decode(codes, scales, bits).unflatten(-1, (-1, group))
    span = groups.abs().amax(-1) / 127 if bits == 8 else (groups.amax(-1) - groups.amin(-1)) / 15
    # Scales and lows are rounded to float16, whose smallest step is 2^-24.
    rounding = groups.abs().amax(-1) * 2**-10 + 2.0**-24 * 130
    assert ((got - groups).abs() <= (span * 0.51 + rounding)[..., None]).all()


def test_turned_twice_is_as_it_was() -> None:
    for dim in (6, 12, 64, 80, 128):
        x = torch.randn(3, dim)
        torch.testing.assert_close(kv_codes.turned(kv_codes.turned(x)), x)
        torch.testing.assert_close(kv_codes.turned(x).norm(dim=-1), x.norm(dim=-1))


@every_width
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("width", [1, 3, 40])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_attention_reads_what_the_codes_stand_for(bits: int, window: int | None, width: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(width)
    slots = 100
    q = torch.randn(3, width, 6, dim, generator=generator)
    held = [kv_codes.encode(torch.randn(3, 2, slots, dim, generator=generator), bits) for _ in "kv"]
    # A row that has wrapped (only where a window says that it may), a row in the middle, and one that is idle.
    starts = torch.tensor([131 if window else 55, 20, 7])
    counts = torch.tensor([width, max(1, width - 1), 0])
    k, v = (kv_codes.decode(*coded, bits) for coded in held)
    for softcap, sinks in ((None, None), (3.0, torch.randn(6, generator=generator))):
        got = attend_quantized(
            q, *held, starts, counts, bits=bits, scale=dim**-0.5, window=window, softcap=softcap, sinks=sinks
        )  # fmt: skip
        wanted = ops.attend(q, k, v, starts, counts, scale=dim**-0.5, window=window, softcap=softcap, sinks=sinks)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


def test_drop_is_refused() -> None:
    model = ours("llama")
    state = model.new_state(kv=kv.Quantized(8))
    model([ids(20)], state)
    with pytest.raises(lmstate.UnsupportedError, match="never a second time"):
        state.drop(0, 3, 5)
    assert state.lengths == [20]


def test_bits_that_there_are_not_are_refused() -> None:
    with pytest.raises(lmstate.StateError, match="8 and 4"):
        kv.Quantized(3)
