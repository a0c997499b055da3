"""choose_positions and attend_chosen: the largest scores, the later of two that are the same, however a text is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmstate.ops import cpu, dispatch
from lmstate.ops.attention import choose
from lmstate.ops.attention.attend_latent import attend_latent
from lmstate.ops.attention.choose import attend_chosen, choose_positions, choose_positions_reference

HEADS, DIM, BUDGET = 3, 12, 20


@pytest.fixture(params=["reference", *cpu.usable()], autouse=True)
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = request.param
    library = None if name == "reference" else cpu.open_library(name)
    monkeypatch.setattr(dispatch, "choice", lambda: dispatch.Choice(name, "asked by the test", library))
    return name


def draw(rows: int, length: int, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[R, n, Hi, Di]`, weights and keys of small whole numbers: products of them are exact, and many alike."""
    generator = torch.Generator().manual_seed(length)
    q, weights, keys = (
        torch.randint(-2, 3, shape, generator=generator).float()
        for shape in ((rows, length, heads, DIM), (rows, length, heads), (rows, length, DIM))
    )
    return q, weights, keys


def naive(q: Tensor, weights: Tensor, keys: Tensor) -> list[list[int]]:
    """Of each position of the one row, what it chooses."""
    chosen = []
    for own in range(q.shape[1]):
        scores = (weights[0, own, :, None] * (q[0, own] @ keys[0, : own + 1].T).relu()).sum(0).tolist()
        best = sorted(range(own + 1), key=lambda at: (-scores[at], -at))[:BUDGET]
        chosen.append(sorted(best))
    return chosen


def given(chosen: Tensor) -> list[list[int]]:
    """Positions `[T, k]` as lists, once it is sure that those behind them are -1."""
    rows = [[at for at in row if at >= 0] for row in chosen.tolist()]
    assert chosen.tolist() == [row + [-1] * (chosen.shape[1] - len(row)) for row in rows]
    return rows


@pytest.mark.parametrize("heads", [1, 2, HEADS])
@pytest.mark.parametrize("piece", [1, 7, 64, 150])
def test_any_cut_chooses_the_largest_and_the_later_of_equals(
    piece: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "SCORES", 150 * 50)
    q, weights, keys = draw(1, 150, heads)
    stored = torch.cat([keys, torch.full((1, 3, DIM), float("nan"))], dim=1)[:, None]
    found: list[list[int]] = []
    for start in range(0, 150, piece):
        end = min(150, start + piece)
        places = torch.tensor([start]), torch.tensor([end - start])
        found += given(choose_positions(q[:, start:end], weights[:, start:end], stored, *places, BUDGET)[0])
    assert found == naive(q, weights, keys)


@pytest.mark.parametrize("rate", [2, 3, 7])
@pytest.mark.parametrize("piece", [1, 4, 150])
def test_keys_of_several_tokens_are_seen_once_all_of_them_are(rate: int, piece: int) -> None:
    q, weights, _ = draw(1, 150)
    keys = draw(1, 150 // rate)[2]
    found: list[list[int]] = []
    for start in range(0, 150, piece):
        end = min(150, start + piece)
        places = torch.tensor([start]), torch.tensor([end - start])
        chosen = choose_positions(q[:, start:end], weights[:, start:end], keys[:, None], *places, BUDGET, rate)
        found += given(chosen[0])
    for own in range(150):
        seen = (own + 1) // rate
        scores = (weights[0, own, :, None] * (q[0, own] @ keys[0, :seen].T).relu()).sum(0).tolist()
        assert found[own] == sorted(sorted(range(seen), key=lambda at: (-scores[at], -at))[:BUDGET])


def test_threads_do_not_change_what_is_chosen() -> None:
    q, weights, keys = draw(2, 150)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            places = torch.tensor([0, 0]), torch.tensor([150, 120])
            found.append(choose_positions(q, weights, keys[:, None], *places, BUDGET))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ragged_rows_choose_as_each_row_alone(dtype: torch.dtype) -> None:
    q, weights, keys = draw(3, 90)
    starts, counts = [60, 0, 85], [9, 0, 5]
    padded = [torch.full((3, 9, *x.shape[2:]), float("nan")) for x in (q, weights)]
    for r, (start, count) in enumerate(zip(starts, counts)):
        for into, x in zip(padded, (q, weights)):
            into[r, :count] = x[r, start : start + count]
    chosen = choose_positions(*padded, keys[:, None].to(dtype), torch.tensor(starts), torch.tensor(counts), BUDGET)
    for r, (start, count) in enumerate(zip(starts, counts)):
        wanted = naive(*(x[r : r + 1] for x in (q, weights, keys)))[start : start + count]
        assert given(chosen[r]) == wanted + [[]] * (9 - count)


def test_a_short_row_chooses_all_that_it_sees() -> None:
    q, weights, keys = draw(1, 5)
    chosen = choose_positions(q, weights, keys[:, None], torch.tensor([0]), torch.tensor([5]), BUDGET)
    assert chosen.shape == (1, 5, 5)
    assert given(chosen[0]) == [list(range(own + 1)) for own in range(5)]


def test_real_numbers_choose_as_the_reference_does() -> None:
    generator = torch.Generator().manual_seed(0)
    q, weights, keys = (
        torch.randn(shape, generator=generator) for shape in ((2, 30, 8, 128), (2, 30, 8), (2, 1, 700, 128))
    )
    places = torch.tensor([660, 500]), torch.tensor([30, 30])
    chosen = choose_positions(q, weights, keys, *places, 64)
    wanted = choose_positions_reference(q.double(), weights.double(), keys.double(), *places, 64)
    assert torch.equal(chosen, wanted)


@pytest.mark.parametrize("gathered", [1, 1 << 23])
def test_attention_to_chosen_positions_is_that_to_nothing_else(gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "GATHERED", gathered)
    generator = torch.Generator().manual_seed(1)
    q_latent, q_rope, latent, rope_key = (
        torch.randn(2, *shape, generator=generator) for shape in ((4, 6, 16), (4, 6, 8), (1, 40, 16), (1, 40, 8))
    )
    chosen = torch.full((2, 4, 9), -1)
    for r in range(2):
        for t in range(4):
            count = 9 - 4 * r - t
            chosen[r, t, :count] = torch.randperm(40, generator=generator)[:count].sort().values
    seen = attend_chosen(q_latent, q_rope, latent, rope_key, chosen, scale=0.3)
    for r in range(2):
        for t in range(4):
            at = chosen[r, t][chosen[r, t] >= 0]
            scores = q_latent[r, t] @ latent[r, 0, at].T + q_rope[r, t] @ rope_key[r, 0, at].T
            wanted = (scores * 0.3).softmax(-1) @ latent[r, 0, at]
            torch.testing.assert_close(seen[r, t], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, 8)], ids=["", "sinks"])
def test_a_choice_of_everything_gives_the_bits_of_plain_attention(body: str, sinks: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(2)
    q_latent, q_rope, latent, rope_key = (
        torch.randn(1, *shape, generator=generator) for shape in ((50, 8, 32), (50, 8, 8), (1, 130, 32), (1, 130, 8))
    )
    starts, counts = torch.tensor([80]), torch.tensor([50])
    chosen = torch.arange(130).expand(1, 50, 130)
    chosen = chosen.masked_fill(chosen > torch.arange(80, 130)[:, None], -1)
    seen = attend_chosen(q_latent, q_rope, latent, rope_key, chosen, scale=0.3, sinks=sinks)
    plain = attend_latent(q_latent, q_rope, latent[:, 0], rope_key[:, 0], starts, counts, scale=0.3, sinks=sinks)
    torch.testing.assert_close(seen, plain, rtol=1e-5, atol=1e-5)
    assert body == "reference" or torch.equal(seen, plain)


def test_what_does_not_fit_is_refused(body: str) -> None:
    q, weights, keys = draw(1, 10)
    if body != "reference":
        with pytest.raises(ValueError, match="row 0 does not fit"):
            choose_positions(q, weights, keys[:, None], torch.tensor([3]), torch.tensor([10]), BUDGET)
        with pytest.raises(ValueError, match="not stored"):
            attend_chosen(*(torch.zeros(1, 1, 2, n) for n in (8, 4)), *(torch.zeros(1, 1, 9, n) for n in (8, 4)),
                          torch.tensor([[[9]]]), scale=1.0)  # fmt: skip
