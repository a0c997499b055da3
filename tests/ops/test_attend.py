"""Attention: the reference against a plain loop over positions, the native bodies against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lmstate.ops as ops
from lmstate.ops import AttentionParams, CausalMask, dispatch
from lmstate.ops.attention.attend import _attend_on_device, attend_reference
from lmstate.ops.attention.attend_whole import attend_whole_reference
from lmstate.ops.attention.kv_store import append_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def filled(
    rows: list[tuple[int, int]], size: int, kv: int, dim: int, dim_v: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Rings for rows of (start, count), NaN where nothing was ever stored, and the same keys and values unrolled."""
    k = torch.full((len(rows), kv, size, dim), torch.nan, dtype=dtype)
    v = torch.full((len(rows), kv, size, dim_v), torch.nan, dtype=dtype)
    all_k, all_v = [], []
    for r, (start, count) in enumerate(rows):
        end = start + count
        keys, values = torch.randn(end, kv, dim).to(dtype), torch.randn(end, kv, dim_v).to(dtype)
        for position in range(end):
            k[r, :, position % size], v[r, :, position % size] = keys[position], values[position]
        all_k.append(keys.float())
        all_v.append(values.float())
    return k, v, all_k, all_v


def by_hand(
    q: Tensor,
    all_k: list[Tensor],
    all_v: list[Tensor],
    rows: list[tuple[int, int]],
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """Attention one query and one head at a time, in float64, with the definition of what a query sees spelled out."""
    out = torch.zeros(*q.shape[:3], all_v[0].shape[-1], dtype=torch.float64)
    group = q.shape[2] // all_k[0].shape[1]
    for r, (start, count) in enumerate(rows):
        for i in range(count):
            own = start + i
            seen = [
                p
                for p in range(own + 1)
                if (window is None or p > own - window) and (chunk is None or p // chunk == own // chunk)
            ]
            for h in range(q.shape[2]):
                keys, values = all_k[r][seen, h // group].double(), all_v[r][seen, h // group].double()
                scores = keys @ q[r, i, h].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if slopes is not None:
                    scores = scores - slopes[h].double() * (own - torch.tensor(seen))
                if biases is not None:
                    of_head = biases[h] if biases.ndim == 2 else biases[r, i, h]
                    scores = scores + of_head[[min(own - p, len(of_head) - 1) for p in seen]].double()
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h : h + 1].double()])
                weights = scores.softmax(0)[: len(seen)]
                out[r, i, h] = weights @ values
    return out.float()


def told(
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    biases: Tensor | None = None,
) -> tuple[AttentionParams, CausalMask]:
    return AttentionParams(scale, softcap, sinks, slopes, biases), CausalMask(window, chunk)


RULES = {
    "plain": {},
    "window": {"window": 7},
    "chunk": {"chunk": 8},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "slopes": {"slopes": True},
    "biases": {"biases": True},
    "biases of each query": {"biases": 4},
    "all": {"window": 6, "softcap": 2.0, "sinks": True, "slopes": True, "biases": True},
}


def biases(heads: int, distances: int = 150) -> Tensor:
    return torch.randn(heads, distances, generator=torch.Generator().manual_seed(7))


def rule_of(name: str, heads: int, rows: int = 4, tokens: int = 5) -> dict:
    rule = dict(RULES[name])
    if "sinks" in rule:
        rule["sinks"] = torch.randn(heads)
    if "slopes" in rule:
        rule["slopes"] = torch.rand(heads)
    if "biases" in rule:
        own = rule["biases"] == 4
        rule["biases"] = biases(rows * tokens * heads, 11).view(rows, tokens, heads, 11) if own else biases(heads, 11)
    return rule


def of_pairs(dtype: torch.dtype, otherwise: float) -> float:
    """How near attention comes: queries and weights are rounded to bfloat16 where pairs of it are multiplied."""
    library = dispatch.choice().library
    return 0.03 if dtype == torch.bfloat16 and library is not None and library.dense.rounds_to_bf16 else otherwise


@pytest.mark.parametrize("rows", [[(0, 9), (0, 9)], [(0, 5), (0, 9)], [(12, 1), (3, 4), (5, 0)], [(20, 9), (2, 9)]])
@pytest.mark.parametrize("name", RULES)
def test_reference_equals_a_loop_over_positions(rows: list[tuple[int, int]], name: str) -> None:
    torch.manual_seed(0)
    rule = rule_of(name, 6, len(rows), max(count for _, count in rows))
    k, v, all_k, all_v = filled(rows, 16 if "window" in rule else 32, 2, 8, 16, torch.float32)
    starts, counts = torch.tensor(rows).T
    q = torch.randn(len(rows), int(counts.max()), 6, 8)
    want = by_hand(q, all_k, all_v, rows, 0.3, **rule)
    got = attend_reference(q, k, v, starts, counts, *told(0.3, **rule))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    # Without reading starts and counts on the host, as on another device: unwritten slots must be finite there.
    got = _attend_on_device(q, k.nan_to_num(), v.nan_to_num(), starts, counts, *told(0.3, **rule))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_long_windowed_prompt_in_blocks_equals_a_loop_over_positions() -> None:
    torch.manual_seed(0)
    rows = [(5, 1030)]
    k, v, all_k, all_v = filled(rows, 1100, 1, 8, 8, torch.float32)
    q = torch.randn(1, 1030, 1, 8)
    got = attend_reference(
        q, k, v, torch.tensor([5]), torch.tensor([1030]), AttentionParams(0.3), CausalMask(window=20)
    )
    torch.testing.assert_close(got, by_hand(q, all_k, all_v, rows, 0.3, window=20), atol=1e-5, rtol=1e-4)


def test_reference_is_differentiable() -> None:
    q = torch.randn(1, 4, 2, 8, dtype=torch.float32, requires_grad=True)
    k, v = torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    attend_reference(q, k, v, torch.tensor([2]), torch.tensor([4]), AttentionParams(1.0)).sum().backward()
    assert q.grad is not None and q.grad.abs().sum() > 0


def test_append_writes_a_wrapped_ring_and_skips_padding() -> None:
    k, v = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8)
    new = torch.arange(1.0, 7.0).view(2, 3, 1, 1).expand(2, 3, 1, 8)
    append_reference(new, new, k, v, torch.tensor([3, 1]), torch.tensor([3, 1]))
    assert k[:, 0, :, 0].tolist() == [[2, 3, 0, 1], [0, 4, 0, 0]]
    assert torch.equal(k, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "dim_v"), [(4, 4, 8, 8), (6, 2, 64, 64), (5, 1, 24, 40), (7, 7, 128, 72), (8, 2, 512, 512)]
)
@pytest.mark.parametrize("name", RULES)
def test_native_equals_a_loop_over_positions(
    variant: str, dtype: torch.dtype, heads: int, kv: int, dim: int, dim_v: int, name: str
) -> None:
    torch.manual_seed(0)
    rule = rule_of(name, heads)
    rows = [(70, 3), (0, 5), (9, 0), (63, 1)]
    k, v, all_k, all_v = filled(rows, 80 if "window" not in rule else 13, kv, dim, dim_v, dtype)
    starts, counts = torch.tensor(rows).T
    q = torch.randn(len(rows), 5, heads, dim)
    got = ops.attend(q, k, v, starts, counts, *told(0.2, **rule))
    near = of_pairs(dtype, 2e-5)
    torch.testing.assert_close(got, by_hand(q, all_k, all_v, rows, 0.2, **rule), atol=near, rtol=near)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_equals_the_reference_over_many_parts(variant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = [(8190, 4), (9300, 1), (511, 2)]  # across the places where the positions are cut
    starts, counts = torch.tensor(rows).T
    k, v = torch.randn(3, 1, 9400, 32).to(dtype), torch.randn(3, 1, 9400, 32).to(dtype)
    q = torch.randn(3, 4, 2, 32)
    want = attend_reference(q, k.float(), v.float(), starts, counts, AttentionParams(0.5))
    got = ops.attend(q, k, v, starts, counts, AttentionParams(0.5))
    torch.testing.assert_close(got, want, atol=of_pairs(dtype, 1e-5), rtol=1e-4)


@pytest.mark.parametrize("rule", [{}, {"window": 300}, {"chunk": 200}, {"biases": biases(6)}])
def test_a_query_has_the_same_bits_whatever_stands_beside_it(variant: str, rule: dict) -> None:
    torch.manual_seed(0)
    size = 340 if rule.keys() & {"window", "chunk"} else 1000
    rows = [(500, 32), (600, 7), (0, 20)]
    k, v, *_ = filled(rows, size, 2, 24, 24, torch.bfloat16)
    q = torch.randn(3, 32, 6, 24)
    starts, counts = torch.tensor(rows).T
    together = ops.attend(q, k, v, starts, counts, *told(0.2, **rule))
    for r, (start, count) in enumerate(rows):
        for i in (0, count // 2, count - 1):
            alone = ops.attend(
                q[r : r + 1, i : i + 1],
                k[r : r + 1],
                v[r : r + 1],
                torch.tensor([start + i]),
                torch.tensor([1]),
                *told(0.2, **rule),
            )
            assert torch.equal(alone[0, 0], together[r, i])
        assert (together[r, count:] == 0).all()


@pytest.mark.parametrize("rule", [{}, {"window": 50}, {"chunk": 128}, {"biases": biases(4)}])
def test_a_long_prompt_has_the_bits_of_its_tokens_one_by_one(variant: str, rule: dict) -> None:
    torch.manual_seed(0)
    rows = [(300, 600), (0, 530), (20, 0)]  # more new tokens than one native call takes
    starts, counts = torch.tensor(rows).T
    k, v = torch.randn(3, 2, 960, 16), torch.randn(3, 2, 960, 16)
    q = torch.randn(3, 600, 4, 16)
    together = ops.attend(q, k, v, starts, counts, *told(0.4, **rule))
    torch.testing.assert_close(
        together, attend_reference(q, k, v, starts, counts, *told(0.4, **rule)), atol=1e-5, rtol=1e-4
    )
    for i in (0, 31, 32, 511, 512, 529, 599):
        one = (counts > i).long()
        alone = ops.attend(q[:, i : i + 1], k, v, starts + i, one, *told(0.4, **rule))
        assert torch.equal(alone[:, 0], together[:, i])


@pytest.mark.parametrize(("heads", "kv"), [(6, 2), (3, 3), (4, 1)])
def test_queries_that_see_everything_have_biases_of_their_own(variant: str, heads: int, kv: int) -> None:
    torch.manual_seed(0)
    q, bias = torch.randn(1, 70, heads, 16), torch.randn(heads, 70, 70)
    k, v = torch.randn(1, kv, 70, 16), torch.randn(1, kv, 70, 16)
    sizes, params = torch.tensor([70]), AttentionParams(0.4)
    got = ops.attend_whole(q, k, v, sizes, sizes, params, bias)
    weights = (torch.einsum("rthd,rhsd->rhts", q, k.repeat_interleave(heads // kv, 1)) * 0.4 + bias).softmax(-1)
    want = torch.einsum("rhts,rhsd->rthd", weights, v.repeat_interleave(heads // kv, 1))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(attend_whole_reference(q, k, v, sizes, sizes, params, bias), want, atol=1e-5, rtol=1e-4)


def test_neither_threads_nor_the_ring_s_size_change_a_bit(variant: str) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(1, 1, 2000, 16), torch.randn(1, 1, 2000, 16)
    q, starts, counts = torch.randn(1, 2, 3, 16), torch.tensor([1500]), torch.tensor([2])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = ops.attend(q, k, v, starts, counts, AttentionParams(1.0))
        torch.set_num_threads(3)
        assert torch.equal(ops.attend(q, k, v, starts, counts, AttentionParams(1.0)), one)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(ops.attend(q, k[:, :, :1600], v[:, :, :1600], starts, counts, AttentionParams(1.0)), one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_append_equals_the_reference(variant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    starts, counts = torch.tensor([14, 0, 3]), torch.tensor([5, 2, 0])
    both = torch.randn(3, 5, 6, 24)  # keys and values side by side, as one projection leaves them
    both[0, 0, 0, :8] = torch.tensor([0.0, -0.0, 6e-8, 1e-5, 65520.0, -1e-9, torch.inf, torch.nan])
    k_new, v_new = both[:, :, :3], both[:, :, 3:]
    native = torch.zeros(3, 3, 16, 24, dtype=dtype), torch.zeros(3, 3, 16, 24, dtype=dtype)
    plain = torch.zeros(3, 3, 16, 24, dtype=dtype), torch.zeros(3, 3, 16, 24, dtype=dtype)
    ops.append(k_new, v_new, *native, starts, counts)
    append_reference(k_new, v_new, *plain, starts, counts)
    for a, b in zip(native, plain):
        torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)


def test_errors_say_what_does_not_fit(variant: str) -> None:
    q, ring = torch.randn(1, 2, 4, 8), torch.zeros(1, 2, 16, 8)
    one = torch.tensor([1])
    with pytest.raises(ValueError, match=r"row 0 starts at 20 with 1 new tokens"):
        ops.attend(q, ring, ring, torch.tensor([20]), one, AttentionParams(1.0))
    with pytest.raises(ValueError, match="do not fit rings"):
        ops.attend(torch.randn(1, 2, 3, 8), ring, ring, one, one, AttentionParams(1.0))
    with pytest.raises(ValueError, match=r"starts must be int64 \[1\]"):
        ops.attend(q, ring, ring, one.int(), one, AttentionParams(1.0))
    with pytest.raises(ValueError, match="do not fit a ring of 16 slots"):
        new = torch.randn(1, 17, 2, 8)
        ops.append(new, new, ring, ring, one, torch.tensor([17]))
