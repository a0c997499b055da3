"""Quantized keys and values: every promise of the state holds, against feeding a quantized state whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lmstate
from lmstate import kv, ops
from lmstate.ops import AttentionParams, CausalMask, dispatch
from lmstate.ops.attention.attend_quantized import WHOLE, attend_quantized
from lmstate.ops.types import kv_format
from lmstate.ops.types.kv_format import BLOCK
from lmstate.ops.types.params import QuantizedKV
from lmstate.state import Layout, Step, attention_state
from lmstate.state.changes import Changes
from lmstate.state.kv.quantized.blocks import BlockState
from tests.invariants.mirror import Mirror, bytes_held
from tests.zoo import CASES, ours, text

# Full attention, windows, softcaps, sinks, latents, chunks, recurrences beside it.
NAMES = "llama mistral gemma2 gpt_oss llama4 deepseek_v2 deepseek_v3 qwen3_next falcon_h1"
FAMILIES = [name for name in NAMES.split() if name in CASES]
WIDTHS = [8, 4, 3, 2]
every_width = pytest.mark.parametrize("bits", WIDTHS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def fits(case: str, bits: int) -> bool:
    """Latents of 20 numbers fill no bytes in 3 bits each."""
    return bits != 3 or not case.startswith("deepseek")


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()


class Coded(Mirror):
    """A mirror whose oracle is one step of a quantized state over the whole row.

    A number on the edge of two codes may fall to either side where a product is summed in another order. So logits are
    compared by their median over a row: a flipped code moves few of them a little, a wrong token all of them much.
    """

    def __init__(self, case: str, bits: int, rows: int = 1, rewind: int = 16) -> None:
        super().__init__(ours(case), rows, kv=kv.Quantized(bits), rewind=rewind)
        self.bits = bits

    def expected(self, ids: Sequence[int], row: int = 0) -> Tensor:
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


@pytest.mark.parametrize(("case", "bits"), [each for each in product(FAMILIES, WIDTHS) if fits(*each)])
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
def test_each_token_is_quantized_once(bits: int) -> None:
    model = ours("mistral")
    state = model.new_state(kv=kv.Quantized(bits), rewind=8)
    model([ids(140)], state)
    before = state.snapshot()
    for seed in range(3):
        model([ids(9, seed)], state)
        state.rewind(0, 143)
        state.rewind(0, 140)
        for mine, then in zip(state.snapshot().layers, before.layers):
            for name in then:
                n = min(mine[name].shape[-2], then[name].shape[-2])
                assert torch.equal(mine[name][..., -n:, :], then[name][..., -n:, :])


@pytest.mark.parametrize(("bits", "least"), [(8, 1.9), (4, 3.5), (3, 4.5), (2, 6.3)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tokens", [1 << 13, 1 << 16])
def test_bytes_against_bfloat16_with_scales_and_floats_counted(bits: int, least: float, dim: int, tokens: int) -> None:
    layout = Layout(1, torch.device("cpu"), torch.bfloat16, capacity=tokens, kv=kv.Quantized(bits))
    state = attention_state(layout, 2, dim, heads=4, scale=1.0)
    state.reserve(Step((0,), (tokens,), layout.device, (tokens,)))
    state.commit(Step((0,), (tokens,), layout.device, (tokens,)), (tokens,), changes := Changes())
    changes.apply()
    assert 2 * 2 * 2 * dim * tokens / state.nbytes() >= least


def test_the_floats_do_not_grow() -> None:
    """After a long step they are as few as after short ones."""
    model = ours("llama")
    states = [model.new_state(kv=kv.Quantized(4)) for _ in range(2)]
    model([ids(700)], states[0])
    for first in range(0, 700, 10):
        model([ids(700)[first : first + 10]], states[1])
    for state in states:
        for layer in state.layers:
            per_block = sum(buffer.nbytes for buffer in layer.tail.buffers.values())
            assert isinstance(layer, BlockState) and layer.tail.nbytes() <= 2 * per_block


@every_width
def test_memory_is_true_to_the_byte(bits: int) -> None:
    for case in (case for case in FAMILIES if fits(case, bits)):
        state = ours(case).new_state(2, kv=kv.Quantized(bits))
        ours(case)([ids(30), ids(3)], state)
        assert sum(state.memory().values()) == bytes_held(state)


@pytest.mark.parametrize(
    ("bits", "dim"),
    [each for each in product(WIDTHS, [12, 20, 64, 80, 96, 128, 200]) if each[0] != 3 or each[1] % 8 == 0],
)
@pytest.mark.parametrize("size", [1e-6, 1.0, 300.0])
def test_decoded_numbers_are_half_a_step_off_at_most(bits: int, dim: int, size: float) -> None:
    x = torch.randn(50, dim, generator=torch.Generator().manual_seed(dim)) * size
    x[0] = 0
    x[1] = 7.0
    x[2, 0] = 60000.0
    codes, scales = kv_format.encode(x, bits)
    assert (codes.shape[-1], scales.shape[-1]) == kv_format.widths(dim, bits)
    group = kv_format.group_of(dim, bits)
    groups, got = x.unflatten(-1, (-1, group)), kv_format.decode(codes, scales, bits).unflatten(-1, (-1, group))
    most = {8: 127, 4: 7.5, 3: 3.5, 2: 1.5}[bits]
    span = groups.abs().amax(-1) / most
    if bits == 2:  # numbers far from the others are cut off
        span = span.minimum(kv_format.SPREAD * groups.square().mean(-1).sqrt())
        groups = groups.clamp(-most * span[..., None], most * span[..., None])
    # Scales are rounded to float16, whose smallest step is 2^-24.
    rounding = groups.abs().amax(-1) * 2**-10 + 2.0**-24 * 130
    assert ((got - groups).abs() <= (span * 0.51 + rounding)[..., None]).all()


def test_turned_twice_is_as_it_was() -> None:
    for dim in (6, 12, 64, 80, 128):
        x = torch.randn(3, dim)
        torch.testing.assert_close(kv_format.hadamard(kv_format.hadamard(x)), x)
        torch.testing.assert_close(kv_format.hadamard(x).norm(dim=-1), x.norm(dim=-1))


@every_width
def test_codes_of_a_block_are_half_a_step_off_at_most(bits: int) -> None:
    if bits == 8:
        return
    for dim in (8, 40, 64, 200):
        x = torch.randn(2, 3 * BLOCK, dim, generator=torch.Generator().manual_seed(dim)) * torch.linspace(0, 9, dim)
        codes, scales = kv_format.encode_blocks(x, bits)
        assert codes.shape[-1] == dim * bits // 8 and scales.shape[-1] == kv_format.block_scales(dim)
        channels, got = (y.unflatten(1, (3, BLOCK)) for y in (x, kv_format.decode_blocks(codes, scales, bits)))
        middle, rounding = (channels.amax(2) + channels.amin(2))[:, :, None] / 2, channels.abs().amax(2) * 2**-9
        channels, most = channels - middle, {4: 7.5, 3: 3.5, 2: 1.5}[bits]
        span = channels.abs().amax(2) / most
        if bits == 2:  # numbers far from the others are cut off
            span = span.minimum(kv_format.SPREAD * channels.square().mean(2).sqrt())
            channels = channels.clamp(-most * span[:, :, None], most * span[:, :, None])
        assert ((got - middle - channels).abs() <= (span * 0.51 + rounding)[:, :, None]).all()


class Stored:
    """Rows' keys and values stored step by step, and by whom it may be asked what they stand for."""

    def __init__(
        self, bits: int, dim: int, slots: int, rows: int = 3, kv_heads: int = 2, dtype: torch.dtype = torch.float32
    ) -> None:
        def empty(width: int, dtype: torch.dtype, many: int = slots) -> Tensor:
            return torch.zeros(rows, kv_heads, many, width, dtype=dtype)

        codes, scales = kv_format.widths(dim, bits, WHOLE)
        block = scales if bits == 8 else kv_format.block_scales(dim)
        kind = kv_format.code_dtype(bits)
        self.kv = QuantizedKV(
            bits, empty(codes, kind), empty(codes, kind), empty(block, torch.half), empty(scales, torch.half),
            None if bits == 8 else empty(dim, dtype, BLOCK - 1 + 40),
        )  # fmt: skip
        self.bits, self.dim, self.slots, self.dtype = bits, dim, slots, dtype
        self.generator = torch.Generator().manual_seed(dim)
        self.k = self.v = torch.zeros(rows, kv_heads, 0, dim)  # all that was ever stored
        self.lengths = [0] * rows

    def new(self, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(3, max(counts), 6, self.dim, generator=self.generator)
        k, v = (torch.randn(3, max(counts), 2, self.dim, generator=self.generator) for _ in "kv")
        return q, k + 2, v

    def visible(self, k: Tensor, v: Tensor, query: int) -> tuple[Tensor, Tensor]:
        """One row's keys and values `[K, n, D]`, all of them, as a query at this position reads them."""
        by_vector, coded_v = (
            kv_format.hadamard(kv_format.decode(*kv_format.encode(kv_format.hadamard(x), self.bits, WHOLE), self.bits))
            for x in (k, v)
        )
        if self.kv.tail is None:
            return by_vector, coded_v
        n = query // BLOCK * BLOCK
        k = kv_format.hadamard(k).to(self.dtype).float()  # codes are made of what the tail holds
        coded_k = kv_format.decode_blocks(*kv_format.encode_blocks(k[:, :n], self.bits), self.bits)
        return kv_format.hadamard(torch.cat([coded_k, k[:, n:]], 1)), coded_v


@every_width
@every_dtype
def test_a_query_that_is_no_number_sees_none_and_leaves_the_others_alone(bits: int, dtype: torch.dtype) -> None:
    if dtype != torch.float32 and dispatch.choice().library is None:
        pytest.skip("torch's own attention in bfloat16 makes no such promise")
    stored = Stored(bits, 64, 128, dtype=dtype)
    q, k, v = stored.new((40, 40, 40))
    starts, counts, params = torch.zeros(3, dtype=torch.int64), torch.tensor([40, 40, 40]), AttentionParams(0.125)
    broken = q.clone()
    broken[0, 7, 2, 5], broken[1, 9, 4, 0] = torch.nan, torch.inf
    want, got = (attend_quantized(x, (k, v), None, stored.kv, starts, counts, params, dtype=dtype) for x in (q, broken))
    touched = (q != broken).any(-1)
    assert got[touched].isnan().all() and torch.equal(got[~touched], want[~touched])


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(
    ("bits", "dim"),
    [each for each in product(WIDTHS, [4, 12, 16, 20, 64, 76, 80, 128]) if each[0] != 3 or each[1] % 8 == 0],
)
@every_dtype
def test_attention_reads_what_the_codes_stand_for(bits: int, window: int | None, dim: int, dtype: torch.dtype) -> None:
    """Against plain attention of each query by itself over what it should read; rows differ, and rings wrap."""
    stored = Stored(bits, dim, 256 if window else 384, dtype=dtype)
    sinks = torch.randn(6, generator=stored.generator)
    whole: list[tuple[Tensor, Tensor]] = [(torch.zeros(2, 0, dim),) * 2 for _ in range(3)]
    differences: list[Tensor] = []
    for turn, counts in enumerate([(40, 7, 0), (1, 33, 20), (38, 2, 32), (1, 0, 1), (40, 32, 40), (32, 30, 9)] * 2):
        q, k, v = stored.new(counts)
        starts = torch.tensor(stored.lengths)
        params = AttentionParams(dim**-0.5, 3.0, sinks) if turn % 2 else AttentionParams(dim**-0.5)
        out = attend_quantized(
            q, (k, v), None, stored.kv, starts, torch.tensor(counts), params, CausalMask(window),
            dtype=dtype,
        )  # fmt: skip
        for r, count in enumerate(counts):
            k_row, v_row = (torch.cat([old, x[r, :count].transpose(0, 1)], 1) for old, x in zip(whole[r], (k, v)))
            whole[r] = k_row, v_row
            for i in range(0, count, 5):
                at = stored.lengths[r] + i
                keys, values = (x[None, :, : at + 1] for x in stored.visible(k_row, v_row, at))
                alone = ops.attend(
                    q[r : r + 1, i : i + 1], keys, values, torch.tensor([at]), torch.tensor([1]), params,
                    CausalMask(window),
                )  # fmt: skip
                differences.append((out[r, i] - alone[0, 0]).abs().flatten())
            stored.lengths[r] += count
            assert not out[r, count:].any()
    # The seldom number on the edge of two codes falls to either side, where a turned vector is summed in another order.
    error = torch.cat(differences)
    usual, most = (1e-4, 0.05) if dtype == torch.float32 else (0.02, 0.1)
    assert (error < usual).float().mean() > 0.95 and error.max() < most


@every_width
@pytest.mark.parametrize("dim", [24, 64])
def test_a_row_has_the_same_bits_however_its_tokens_come(bits: int, dim: int) -> None:
    """Alone or beside other rows, one token at a time or 32: what speculation needs."""
    if dispatch.choice().library is None:
        pytest.skip("the references promise no bits")
    counts = [30, 20, 32, 1, 7, 32, 32, 15, 4]
    together, alone = (Stored(bits, dim, 256) for _ in range(2))
    for n in counts:
        q, k, v = together.new((n, 0, max(n - 3, 0)))
        starts = torch.tensor(together.lengths)
        got = attend_quantized(
            q, (k, v), None, together.kv, starts, torch.tensor([n, 0, max(n - 3, 0)]),
            AttentionParams(0.125),
        )  # fmt: skip
        for i in range(n):
            one = attend_quantized(
                q[:, i : i + 1], (k[:, i : i + 1], v[:, i : i + 1]), None, alone.kv,
                torch.tensor([together.lengths[0] + i, 0, 0]), torch.tensor([1, 0, 0]), AttentionParams(0.125),
            )  # fmt: skip
            assert torch.equal(one[0, 0], got[0, i])
        together.lengths = [together.lengths[0] + n, 0, together.lengths[2] + max(n - 3, 0)]


@every_width
@pytest.mark.parametrize("slack", [(0, 16), (0, 60), (40, 3), (60, 0), (3, 200)])
def test_a_snapshot_of_a_window_goes_into_another_slack(bits: int, slack: tuple[int, int]) -> None:
    """What a window's blocks hold for going back differs; what a query needs of them does not."""
    model = ours("mistral")
    undisturbed, restored = (model.new_state(kv=kv.Quantized(bits), rewind=n) for n in slack)
    for seed in range(31):
        model([ids(10, seed)], undisturbed)
    restored.restore(0, undisturbed.snapshot())
    farthest = 310
    for seed in range(70):
        farthest = max(farthest, restored.lengths[0])
        assert restored.rewind_cost(0, min(restored.lengths[0], max(310, farthest - slack[1]))) == 0
        new = ids(1 + seed % 3, 50 + seed)
        if seed % 5 == 4:
            back = restored.lengths[0] - min(4, slack[1])
            restored.rewind(0, back)
            undisturbed.rewind(0, back)
        torch.testing.assert_close(model([new], restored), model([new], undisturbed), rtol=0, atol=1e-4)


def check_floats(mirror: Coded, row: int) -> None:
    """The newest keys are those of a state that was fed the row whole, as many as a query may need."""
    mirror.check()
    whole = mirror.model.new_state(kv=kv.Quantized(mirror.bits))
    mirror.model([mirror.rows[row]], whole)
    for mine, theirs in zip(mirror.state.snapshot(row).layers, whole.snapshot().layers):
        count = min(mine["1.k"].shape[1], theirs["1.k"].shape[1])
        assert count >= min(BLOCK - 1, len(mirror.rows[row]))
        torch.testing.assert_close(mine["1.k"][:, -count:], theirs["1.k"][:, -count:], rtol=0, atol=1e-2)


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("moved", [None, 340, 300])
def test_a_long_step_leaves_the_floats_of_idle_rows(bits: int, moved: int | None) -> None:
    mirror = Coded("llama", bits, rows=2, rewind=8)
    mirror.extend([ids(10), ids(345, 1)])
    mirror.extend([ids(90, 2), []])
    check_floats(mirror, 1)
    mirror.model([ids(120, 3), []], mirror.state, commit=False)
    if moved is not None:
        mirror.rewind(1, moved)
    mirror.state.commit([50, 0])
    mirror.rows[0] += ids(120, 3)[:50]
    check_floats(mirror, 1)


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("to", [239, 200, 190, 170])
def test_floats_that_a_snapshot_did_not_have_are_not_taken_for_there(bits: int, to: int) -> None:
    """Neither when the slots of a long step are given back."""
    mirror, source = Coded("llama", bits, rewind=70), Coded("llama", bits, rewind=0)
    source.extend([ids(200)])
    mirror.restore(0, source.state.snapshot(), source.rows[0])
    mirror.extend([ids(40, 1)])
    mirror.rewind(0, to)
    check_floats(mirror, 0)


def test_drop_is_refused() -> None:
    model = ours("llama")
    state = model.new_state(kv=kv.Quantized(8))
    model([ids(20)], state)
    with pytest.raises(lmstate.UnsupportedError, match="never a second time"):
        state.drop(0, 3, 5)
    assert state.lengths == [20]


def test_bits_that_there_are_not_are_refused() -> None:
    with pytest.raises(lmstate.StateError, match="8, 4, 3 and 2"):
        kv.Quantized(5)


@pytest.mark.parametrize("dim", [1, 3, 10, 66, 127])
def test_a_width_that_fills_no_bytes_is_refused_with_those_that_do(dim: int) -> None:
    def attended(bits: int | None, x: Sequence[Tensor]) -> Tensor:
        stored = None if bits is None else kv.Quantized(bits)
        layout = Layout(1, torch.device("cpu"), torch.float32, capacity=32, kv=stored)
        state = attention_state(layout, 2, x[0].shape[-1], heads=2, scale=dim**-0.5)
        step = Step((0,), (20,), layout.device, (20,))
        state.reserve(step)
        return state.attend(x[0], (x[1], x[2]), step, AttentionParams(scale=dim**-0.5))

    x = torch.randn(3, 1, 20, 2, dim, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attended(8, [*x]), attended(None, [*x]), atol=0.05, rtol=0)
    for bits, fitting in ((4, 2), (3, 8), (2, 4)):
        if dim % fitting:
            with pytest.raises(ValueError, match=rf"multiple of {fitting} do; Quantized\(bits=8\) stores any"):
                attended(bits, [*x])
        attended(bits, [*x[..., :1].expand(*x.shape[:-1], fitting * dim)])
