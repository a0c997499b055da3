"""Many new tokens over keys and values in bfloat16: the native body rounds queries and weights to it where it may."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lmstate.ops as ops
from lmstate.ops import AttentionParams, CausalMask
from lmstate.ops.attention.attend import attend_reference

ROWS = [(70, 40), (0, 133), (9, 33), (400, 5), (257, 0), (31, 64)]
SEEN = 533


def rings(rows: list[tuple[int, int]], size: int, kv: int, dim: int, dim_v: int) -> tuple[Tensor, Tensor]:
    """Keys and values in bfloat16, NaN in the slots that were never written."""
    k, v = (torch.randn(len(rows), kv, size, d).bfloat16() for d in (dim, dim_v))
    for r, (start, count) in enumerate(rows):
        k[r, :, start + count :], v[r, :, start + count :] = torch.nan, torch.nan
    return k, v


def expected(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, counts: Tensor, rule: tuple[AttentionParams, CausalMask]
) -> Tensor:
    return attend_reference(q.bfloat16().float(), k.float(), v.float(), starts, counts, *rule)


@pytest.mark.parametrize(
    ("heads", "kv", "dim", "dim_v"), [(4, 4, 8, 8), (6, 2, 64, 64), (5, 1, 24, 40), (7, 7, 128, 72), (8, 2, 256, 256)]
)
@pytest.mark.parametrize("name", ["plain", "window", "chunk", "softcap", "sinks", "slopes", "biases", "all"])
def test_it_is_attention(variant: str, heads: int, kv: int, dim: int, dim_v: int, name: str) -> None:
    torch.manual_seed(0)
    params = AttentionParams(
        dim**-0.5,
        softcap=2.0 if name in ("softcap", "all") else None,
        sinks=torch.randn(heads) if name in ("sinks", "all") else None,
        slopes=torch.rand(heads) if name in ("slopes", "all") else None,
        biases=torch.randn(heads, 40) if name in ("biases", "all") else None,
    )
    mask = CausalMask(window=50 if name in ("window", "all") else None, chunk=48 if name == "chunk" else None)
    k, v = rings(ROWS, SEEN if mask == CausalMask() else 199, kv, dim, dim_v)  # windows wrap
    starts, counts = torch.tensor(ROWS).T
    q = torch.randn(len(ROWS), int(counts.max()), heads, dim)
    got = ops.attend(q, k, v, starts, counts, params, mask)
    want = expected(q, k, v, starts, counts, (params, mask))
    real = torch.arange(q.shape[1]) < counts[:, None]
    torch.testing.assert_close(got[real], want[real], atol=0.015, rtol=0.01)
    assert (got[~real] == 0).all()


@pytest.mark.parametrize("rule", [{}, {"window": 300}, {"chunk": 200}])
def test_a_query_has_the_same_bits_beside_other_tokens_rows_and_threads(variant: str, rule: dict[str, int]) -> None:
    torch.manual_seed(0)
    rows = [(500, 300), (600, 77), (0, 120)]
    k, v = (torch.randn(3, 2, 900, 24).bfloat16() for _ in range(2))
    starts, counts = torch.tensor(rows).T
    q, told, threads = torch.randn(3, 300, 6, 24), (AttentionParams(0.2), CausalMask(**rule)), torch.get_num_threads()
    together = ops.attend(q, k, v, starts, counts, *told)
    try:
        for r, (start, count) in enumerate(rows):
            torch.set_num_threads(1 + r)
            first, n = 20, count - 30
            alone = ops.attend(
                q[r : r + 1, first : first + n], k[r : r + 1], v[r : r + 1], torch.tensor([start + first]),
                torch.tensor([n]), *told,
            )  # fmt: skip
            assert torch.equal(alone[0], together[r, first : first + n])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kv", [1, 3])
@pytest.mark.parametrize(
    "rows", [[(100, 1), (700, 0)], [(600, 1), (0, 1), (255, 2), (256, 1), (513, 2), (9, 1), (0, 0)]]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_of_ragged_rows_has_the_same_bits_however_many_threads_share_it(
    variant: str, threads: int, kv: int, rows: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    starts, counts = torch.tensor(rows).T
    k, v = (torch.randn(len(rows), kv, 702, 64).to(dtype) for _ in range(2))
    q, told = torch.randn(len(rows), 2, 3 * kv, 64), (AttentionParams(0.2), CausalMask())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = ops.attend(q, k, v, starts, counts, *told)
        for r, count in enumerate(counts.tolist()):
            own = [x[r : r + 1] for x in (q[:, :count], k, v, starts, counts)]
            assert torch.equal(together[r, :count], ops.attend(*own, *told)[0])
            assert not together[r, count:].any()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("heads", "kv", "dim", "dim_v"), [(3, 1, 64, 64), (8, 2, 128, 64), (20, 1, 40, 24), (2, 2, 320, 320)]
)
@pytest.mark.parametrize("rule", [{}, {"window": 70}])
def test_one_query_has_the_bits_that_it_has_among_many(
    variant: str, heads: int, kv: int, dim: int, dim_v: int, rule: dict[str, int]
) -> None:
    """Few queries read keys as they are stored, many of them laid out in pairs: the sums are the same.

    Also where a cut of few tokens lies across a multiple of 256, at which sums are cut.
    """
    torch.manual_seed(0)
    tokens, start = 130, 470
    k, v = rings([(start, tokens)], 613, kv, dim, dim_v)
    q, told = torch.randn(1, tokens, heads, dim), (AttentionParams(dim**-0.5), CausalMask(**rule))
    together = ops.attend(q, k, v, torch.tensor([start]), torch.tensor([tokens]), *told)
    for cuts in ([1] * 10 + [120], [3, 7, 40, 80], [33, 97], [40, 3, 3, 84], [39, 4, 87], [37, 8, 85]):
        at = 0
        for n in cuts:
            part = ops.attend(q[:, at : at + n], k, v, torch.tensor([start + at]), torch.tensor([n]), *told)
            assert torch.equal(part, together[:, at : at + n])
            at += n
        assert at == tokens


def test_rows_enough_for_all_threads_have_the_bits_of_few(variant: str) -> None:
    """A task has all chunks of positions where there are tasks enough, else one: the parts come together alike."""
    torch.manual_seed(0)
    k, v = (torch.randn(1, 2, 1100, 32).bfloat16() for _ in range(2))
    q, threads = torch.randn(1, 400, 2, 32), torch.get_num_threads()
    starts, counts, told = (
        torch.tensor([700]),
        torch.tensor([400]),
        (AttentionParams(0.2, sinks=torch.randn(2)), CausalMask()),
    )
    try:
        outputs = []
        for n in (1, 16):
            torch.set_num_threads(n)
            outputs.append(ops.attend(q, k, v, starts, counts, *told))
        assert torch.equal(*outputs)
    finally:
        torch.set_num_threads(threads)
