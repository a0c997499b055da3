"""latent_attend: softmax over everything a query sees, by blocks and over a ring, without expanding keys or values."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from lmstate.ops import cpu, dispatch
from lmstate.ops.attention.attend_latent import attend_latent, attend_latent_reference
from lmstate.ops.dense.per_head import per_head_matmul
from lmstate.ops.types.params import AttentionSums

HEADS, LATENT, ROPE = 3, 8, 4
SCALE = 0.3
SINKS = torch.tensor([-1.0, 0.5, 3.0])


@pytest.fixture(params=["reference", *cpu.usable()], autouse=True)
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = request.param
    library = None if name == "reference" else cpu.open_library(name)
    monkeypatch.setattr(dispatch, "choice", lambda: dispatch.Choice(name, "asked by the test", library))
    return name


@pytest.fixture(params=["one block", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small blocks":
        module = sys.modules["lmstate.ops.attention.attend_latent"]
        monkeypatch.setattr(module, "STORED_BLOCK", 8)
        monkeypatch.setattr(module, "SCORES", 8 * HEADS * 5)


def draw(rows: int, length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Per position: q_latent, q_rope, latent, rope_key."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((HEADS, LATENT), (HEADS, ROPE), (LATENT,), (ROPE,))
    return tuple(torch.randn(rows, length, *shape, generator=generator, dtype=dtype) for shape in shapes)


def naive(stream: tuple[Tensor, ...], window: int | None = None, sinks: Tensor | None = None) -> Tensor:
    """Every position over all before it, scores written out: [R, length, H, Lat]."""
    q_latent, q_rope, latent, rope_key = stream
    scores = torch.einsum("rthc,rsc->rhts", q_latent, latent) + torch.einsum("rthd,rsd->rhts", q_rope, rope_key)
    ages = torch.arange(latent.shape[1])[:, None] - torch.arange(latent.shape[1])
    unseen = (ages < 0) | (ages >= (window or latent.shape[1]))
    scores = (scores * SCALE).masked_fill(unseen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand_as(scores[..., :1])], dim=-1)
    weights = scores.softmax(-1)[..., : latent.shape[1]]
    return torch.einsum("rhts,rsc->rthc", weights, latent)


def ring(stream: Tensor, end: int, size: int) -> Tensor:
    """The last `size` positions before `end`, each in its slot; slots never written hold NaN."""
    slots = torch.full((stream.shape[0], size, *stream.shape[2:]), float("nan"), dtype=stream.dtype)
    for position in range(max(0, end - size), end):
        slots[:, position % size] = stream[:, position]
    return slots


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("window", [None, 1, 5, 20])
@pytest.mark.parametrize("piece", [1, 3, 17, 50])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_any_cut_over_a_ring_equals_scores_written_out(window: int | None, piece: int, sinks: Tensor | None) -> None:
    stream = draw(2, 50)
    size = 64 if window is None else window - 1 + piece
    outputs = []
    for start in range(0, 50, piece):
        end = min(start + piece, 50)
        queries = (x[:, start:end] for x in stream[:2])
        stored = (ring(x, end, size) for x in stream[2:])
        places = torch.tensor([start] * 2), torch.tensor([end - start] * 2)
        outputs.append(attend_latent(*queries, *stored, *places, scale=SCALE, window=window, sinks=sinks))
    torch.testing.assert_close(torch.cat(outputs, 1), naive(stream, window, sinks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("planes", [1, 4, 60])
def test_columns_tell_what_each_slot_received(planes: int) -> None:
    """Of two rows and two calls, the second of which takes several native ones."""
    stream, lengths = draw(2, 50), [50, 45]
    q_latent, q_rope, latent, rope_key = stream
    scores = torch.einsum("rthc,rsc->rths", q_latent, latent) + torch.einsum("rthd,rsd->rths", q_rope, rope_key)
    unseen = torch.ones(50, 50, dtype=torch.bool).triu(1)[:, None]
    given = (scores * SCALE).masked_fill(unseen, float("-inf")).softmax(-1).mean(2)  # [R, T, S]
    ends, wanted = torch.tensor(lengths), torch.zeros(2, 1, planes, 64)
    for r, length in enumerate(lengths):
        for token in range(length):
            wanted[r, 0, max(0, token + planes - length), :50] += given[r, token]
    columns, outputs = AttentionSums(torch.zeros(2, 1, planes, 64), ends), []
    for start, width in ((0, 10), (10, 40)):
        queries, counts = (x[:, start : start + width] for x in stream[:2]), (ends - start).clamp(max=width)
        stored = (ring(x, start + width, 64).nan_to_num() for x in stream[2:])
        outputs.append(
            attend_latent(*queries, *stored, torch.tensor([start] * 2), counts, scale=SCALE, columns=columns)
        )
    torch.testing.assert_close(columns.sums, wanted, rtol=1e-5, atol=1e-5)
    read, whole = torch.cat(outputs, 1), naive(stream)
    for r, length in enumerate(lengths):
        torch.testing.assert_close(read[r, :length], whole[r, :length], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("blocks")
def test_ragged_rows_equal_each_row_alone_and_padding_is_invisible() -> None:
    stream = draw(3, 30)
    wanted = naive(stream)
    starts, counts = [3, 0, 20], [7, 0, 2]
    queries = tuple(torch.full((3, 7, *x.shape[2:]), float("nan")) for x in stream[:2])
    for r, (start, count) in enumerate(zip(starts, counts)):
        for padded, x in zip(queries, stream[:2]):
            padded[r, :count] = x[r, start : start + count]
    rings = tuple(torch.cat([ring(x[r : r + 1], starts[r] + counts[r], 32) for r in range(3)]) for x in stream[2:])
    y = attend_latent(*queries, *rings, torch.tensor(starts), torch.tensor(counts), scale=SCALE)
    for r, (start, count) in enumerate(zip(starts, counts)):
        torch.testing.assert_close(y[r, :count], wanted[r, start : start + count], rtol=1e-5, atol=1e-5)
        assert not y[r, count:].any()


def test_absorbed_equals_attention_over_expanded_keys_and_values() -> None:
    q_latent, q_rope, latent, rope_key = draw(1, 20, torch.float64)
    generator = torch.Generator().manual_seed(0)
    up_key, up_value = (torch.randn(HEADS, 6, LATENT, generator=generator, dtype=torch.float64) for _ in range(2))
    q_nope = q_latent[..., :6]
    absorbed = torch.einsum("rthd,hdc->rthc", q_nope, up_key)
    places = torch.tensor([0]), torch.tensor([20])
    read = attend_latent(absorbed, q_rope, latent, rope_key, *places, scale=SCALE)
    got = torch.einsum("rthc,hdc->rhtd", read, up_value)

    keys = torch.einsum("rsc,hdc->rhsd", latent, up_key)
    keys = torch.cat([keys, rope_key[:, None].expand(-1, HEADS, -1, -1)], -1)
    queries = torch.cat([q_nope, q_rope], -1).transpose(1, 2)
    values = torch.einsum("rsc,hdc->rhsd", latent, up_value)
    wanted = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=SCALE)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_scores_far_apart_do_not_overflow() -> None:
    stream = tuple(100 * x for x in draw(1, 20))
    places = torch.tensor([0]), torch.tensor([20])
    torch.testing.assert_close(attend_latent(*stream, *places, scale=SCALE), naive(stream), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("blocks")
def test_gradients() -> None:
    stream = tuple(x.requires_grad_() for x in draw(1, 12, torch.float64))
    places = torch.tensor([0]), torch.tensor([12])

    def run(*leaves: Tensor) -> Tensor:
        return attend_latent(*leaves, *places, scale=SCALE, window=7)

    assert torch.autograd.gradcheck(run, stream, fast_mode=True)


WIDE = ((16, 512, 64), (5, 96, 0), (12, 41, 7))


def draw_wide(rows: int, tokens: int, stored: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """q_latent, q_rope, latent, rope_key, the stored ones with a NaN in every slot past `stored`."""
    heads, dim, rope = sizes
    generator = torch.Generator().manual_seed(dim)
    queries = [torch.randn(rows, tokens, heads, width, generator=generator) for width in (dim, rope)]
    slots = [torch.full((rows, stored + 9, width), float("nan")) for width in (dim, rope)]
    for each in slots:
        each[:, :stored] = torch.randn(rows, stored, each.shape[2], generator=generator)
    return [*queries, *(each.to(dtype) for each in slots)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", WIDE)
def test_wide_latents_of_every_dtype_agree_with_float64(
    body: str, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    stream = draw_wide(2, 3, 700, sizes, dtype)
    starts, counts = torch.tensor([697, 500]), torch.tensor([3, 2])
    got = attend_latent(*stream, starts, counts, scale=0.05)
    want = attend_latent_reference(*(each.double() for each in stream), starts, counts, scale=0.05)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert got.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", WIDE)
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    body: str, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    if body == "reference":
        pytest.skip("torch's products, which the reference uses, round by the number of rows")
    stream, starts = draw_wide(3, 8, 700, sizes, dtype), torch.tensor([692, 250, 3])
    together = attend_latent(*stream, starts, torch.tensor([8, 8, 5]), scale=0.05)
    threads = torch.get_num_threads()
    for row, count in enumerate((8, 8, 5)):
        own = [each[row : row + 1] for each in stream]
        for t in range(count):
            torch.set_num_threads(1 + t % 2)
            some = slice(t, t + 1)
            alone = attend_latent(
                own[0][:, some], own[1][:, some], *own[2:], starts[row : row + 1] + t, torch.tensor([1]), scale=0.05
            )
            assert torch.equal(alone[0, 0], together[row, t])
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 128, 512), (3, 7, 50), (2, 5, 64)])
def test_a_matrix_for_each_head(body: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrices = (torch.randn(shape) / shape[1] ** 0.5).to(dtype)
    x = torch.randn(2, 5, shape[0], shape[1] + 3)[..., 3:]  # a part of a projection
    got = per_head_matmul(x, matrices)
    want = torch.einsum("rtha,hab->rthb", x.double(), matrices.double())
    tolerance = 1e-5 if body != "reference" or dtype == torch.float32 else 0.05
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    if body != "reference":
        assert torch.equal(torch.cat([per_head_matmul(x[:, t : t + 1], matrices) for t in range(5)], dim=1), got)


def test_what_does_not_fit_is_refused(body: str) -> None:
    if body == "reference":
        pytest.skip("the reference checks nothing")
    q_latent, q_rope, latent, rope_key = draw(1, 4)
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="do not fit latents"):
        attend_latent(q_latent, q_rope[..., :2], latent, rope_key, one, one, scale=SCALE)
    with pytest.raises(ValueError, match="ring of 4 slots"):
        attend_latent(q_latent, q_rope, latent, rope_key, 3 * one, 2 * one, scale=SCALE)
    with pytest.raises(ValueError, match="do not fit x"):
        per_head_matmul(q_latent, torch.randn(HEADS, LATENT + 1, 4))
