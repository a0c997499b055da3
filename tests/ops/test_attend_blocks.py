"""choose_blocks and attend_blocks: the blocks of the best keys and the query's own, and attention to nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmstate.ops import cpu, dispatch
from lmstate.ops.attention import attend_blocks as module
from lmstate.ops.attention.attend import attend
from lmstate.ops.attention.attend_blocks import attend_blocks, choose_blocks, choose_blocks_reference
from lmstate.ops.attention.kv_store import append
from lmstate.ops.types.block_table import BLOCK_TOKENS, dense
from lmstate.ops.types.params import AttentionParams
from lmstate.state import AttentionState, Layout, Step

DIM, SIZE, LENGTH, GROUPS = 8, 5, 43, 2


@pytest.fixture(params=["reference", *cpu.usable()], autouse=True)
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = request.param
    library = None if name == "reference" else cpu.open_library(name)
    monkeypatch.setattr(dispatch, "choice", lambda: dispatch.Choice(name, "asked by the test", library))
    return name


def whole_numbers(*shape: int) -> Tensor:
    """Small ones: products of them are exact, and many alike."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(shape[1])).float()


@pytest.mark.parametrize("local", [0, 1, 2])
@pytest.mark.parametrize("piece", [1, 6, LENGTH])
@pytest.mark.parametrize("scores", [1, 1 << 24])
def test_any_cut_chooses_the_best_blocks_the_own_ones_and_the_later_of_equals(
    local: int, piece: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SCORES", scores)
    q, keys = whole_numbers(1, LENGTH, GROUPS, DIM), whole_numbers(1, LENGTH + 3, DIM)[:, None]
    found: list[list[list[int]]] = []
    for start in range(0, LENGTH, piece):
        end = min(LENGTH, start + piece)
        places = torch.tensor([start]), torch.tensor([end - start])
        chosen = choose_blocks(q[:, start:end], keys, *places, budget=3, size=SIZE, local=local)
        found += [[[at for at in group if at >= 0] for group in token] for token in chosen[0].tolist()]
    for own in range(LENGTH):
        for group in range(GROUPS):
            products = (keys[0, 0, : own + 1] @ q[0, own, group]).tolist()
            best = [max(products[at : at + SIZE]) for at in range(0, own + 1, SIZE)]
            mine = own // SIZE
            best = [float("inf") if mine - local < at <= mine else score for at, score in enumerate(best)]
            wanted = sorted(sorted(range(len(best)), key=lambda at: (-best[at], -at))[:3])
            assert found[own][group] == wanted


@pytest.mark.parametrize("heads", [1, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ragged_rows_choose_as_the_reference_does(heads: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(heads)
    q, keys = (torch.randn(shape, generator=generator) for shape in ((3, 9, heads, 36), (3, 1, 300, 36)))
    keys, (starts, counts) = keys.to(dtype), torch.tensor([[250, 0, 130], [9, 0, 5]])
    for r in range(3):
        q[r, counts[r] :], keys[r, :, starts[r] + counts[r] :] = float("nan"), float("nan")
    chosen = choose_blocks(q, keys, starts, counts, budget=4, size=24, local=1)
    wanted = choose_blocks_reference(q, keys.float().nan_to_num(), starts, counts, budget=4, size=24, local=1)
    assert torch.equal(chosen, wanted)


def test_threads_do_not_change_what_is_chosen() -> None:
    generator, threads, found = torch.Generator().manual_seed(3), torch.get_num_threads(), []
    q, keys = (torch.randn(shape, generator=generator) for shape in ((2, 90, GROUPS, DIM), (2, 1, 700, DIM)))
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            places = torch.tensor([600, 20]), torch.tensor([90, 70])
            found.append(choose_blocks(q, keys, *places, budget=3, size=SIZE, local=1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_rows_that_do_not_fit_are_refused(body: str) -> None:
    if body != "reference":
        with pytest.raises(ValueError, match="row 0 does not fit"):
            choose_blocks(whole_numbers(1, 4, GROUPS, DIM), whole_numbers(1, 1, 6, DIM), torch.tensor([3]),
                          torch.tensor([4]), budget=3, size=SIZE, local=1)  # fmt: skip


@pytest.mark.parametrize("gathered", [1, 1 << 23])
@pytest.mark.parametrize("groups", [2, 4])
def test_attention_to_chosen_blocks_is_that_to_nothing_else(
    gathered: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GATHERED", gathered)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, *shape, generator=generator) for shape in ((4, 4, DIM), (2, LENGTH, DIM), (2, LENGTH, 12))
    )
    starts, counts = torch.tensor([39, 12]), torch.tensor([4, 3])
    chosen = torch.full((2, 4, groups, 3), -1)
    for r, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        for t in range(count):
            for group in range(groups):
                before = torch.randperm((start + t) // SIZE, generator=generator)[: (t + group) % 3]
                blocks = sorted([*before.tolist(), (start + t) // SIZE])
                chosen[r, t, group, : len(blocks)] = torch.tensor(blocks)
    seen = attend_blocks(q, k, v, chosen, starts, counts, AttentionParams(0.3), size=SIZE)
    assert not seen[1, 3].any()
    for r, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        for t in range(count):
            for head in range(4):
                blocks = [at for at in chosen[r, t, head * groups // 4].tolist() if at >= 0]
                at = [p for block in blocks for p in range(block * SIZE, (block + 1) * SIZE) if p <= start + t]
                weights = (k[r, head // 2, at] @ q[r, t, head] * 0.3).softmax(-1)
                torch.testing.assert_close(seen[r, t, head], weights @ v[r, head // 2, at], rtol=1e-5, atol=1e-5)


def test_a_choice_of_everything_gives_the_bits_of_plain_attention(body: str) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(1, *shape, generator=generator) for shape in ((50, 8, 32), (2, 130, 32), (2, 130, 32))
    )  # fmt: skip
    places = torch.tensor([80]), torch.tensor([50])
    own = torch.arange(80, 130)[:, None] // SIZE
    chosen = torch.arange(26).expand(50, 26).masked_fill(torch.arange(26) > own, -1)[None, :, None].expand(1, 50, 2, 26)
    seen = attend_blocks(q, k, v, chosen, *places, AttentionParams(0.3), size=SIZE)
    plain = attend(q, k, v, *places, AttentionParams(0.3))
    torch.testing.assert_close(seen, plain, rtol=1e-5, atol=1e-5)
    assert body == "reference" or torch.equal(seen, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [2, 4])
def test_blocks_of_a_table_are_read_where_they_are_with_the_same_bits(groups: int, dtype: torch.dtype) -> None:
    """Rows of different lengths; the last block of each is not whole, and some queries are padding."""
    generator, size = torch.Generator().manual_seed(5), 2 * BLOCK_TOKENS
    layout = Layout(2, torch.device("cpu"), dtype, capacity=1000)
    state, ends = AttentionState(layout, 2, 32), (700, 330)
    state.reserve(Step((0, 0), ends, layout.device, ends))
    keys, values = (torch.randn(2, 700, 2, 32, generator=generator) for _ in "kv")
    k, v = state.stored("k"), state.stored("v")
    append(keys, values, k, v, torch.zeros(2, dtype=torch.int64), torch.tensor(ends))
    starts, counts = torch.tensor([693, 326]), torch.tensor([7, 4])
    chosen = torch.full((2, 7, groups, 4), -1)
    for r, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
        for t in range(count):
            own = (start + t) // size
            for group in range(groups):
                before = torch.randperm(own, generator=generator)[: (t + group) % 3].sort().values
                blocks = [*before.tolist(), own] if (t + group) % 4 else before.tolist()
                chosen[r, t, group, : len(blocks)] = torch.tensor(blocks)
    q = torch.randn(2, 7, 8, 32, generator=generator)
    others = chosen, starts, counts, AttentionParams(0.3)
    seen, put_together = (attend_blocks(q, *held, *others, size=size) for held in ((k, v), (dense(k), dense(v))))
    assert torch.equal(seen, put_together)
