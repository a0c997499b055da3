"""Blocks: what rows, forks, marks and snapshots share, who holds it, and what it costs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import random
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch

import lmstate
from lmstate import CapacityError, StateError
from lmstate.ops.dispatch import references
from lmstate.ops.types.block_table import BLOCK_TOKENS, KVBlock
from lmstate.state.blocks import BlockPool, held_by
from lmstate.state.layers.block_store import FIRST_ENTRIES, BlockStore
from lmstate.state.layers.slots import SlotState
from tests.zoo import ours, text

ATTENTION = ["llama", "mistral", "deepseek_v3", "gemma3", "falcon_h1"]
LONG = 5 * BLOCK_TOKENS + 7


def ids(count: int, seed: int = 0) -> list[int]:
    return text(count, seed=seed)[0].tolist()


def stores(state: lmstate.State) -> list[BlockStore]:
    leaves = [part for layer in state.layers for leaf in layer.leaves() for part in getattr(leaf, "members", [leaf])]
    return [leaf.content for leaf in leaves if isinstance(leaf, SlotState) and isinstance(leaf.content, BlockStore)]


def reachable(state: lmstate.State, *snapshots: lmstate.Snapshot) -> int:
    """Bytes of the blocks that are held, by looking."""
    found: dict[int, KVBlock] = {}
    for store in stores(state):
        found |= {id(block): block for row in store.rows for block in row.blocks if block is not None}
    captured = [layer for snapshot in snapshots for layer in snapshot.layers]
    captured += [layer for row in state._rows for mark in row.marks for layer in mark.layers.values()]
    for layer in captured:
        found |= {id(held): held for held in held_by(layer) if isinstance(held, KVBlock)}
    return sum(block.nbytes for block in found.values())


@pytest.mark.parametrize("case", ATTENTION)
def test_forks_and_snapshots_hold_the_same_blocks(case: str) -> None:
    model, pool = ours(case), BlockPool()
    state = model.new_state(pool=pool)
    model([ids(LONG)], state)
    before = pool.nbytes
    state.select([0] * 4)
    snapshot = state.snapshot(2)
    state.mark(1)
    twin = copy.deepcopy(state)
    other = model.new_state(2, pool=pool)
    other.restore(1, snapshot)
    assert pool.nbytes == before
    # A row that goes on copies the block that it has in part, and nothing else.
    model([[], [5], [], []], state)
    assert pool.nbytes - before == sum(store.spec.nbytes for store in stores(state))
    assert twin.lengths == [LONG] * 4


@pytest.mark.parametrize("case", ATTENTION)
def test_whoever_writes_changes_nobody_else(case: str) -> None:
    model = ours(case)
    state = model.new_state()
    model([ids(LONG)], state)
    snapshot = state.snapshot()
    expected = {name: tensor.clone() for layer in snapshot.layers for name, tensor in layer.items()}
    state.select([0, 0])
    model([[3, 4, 5], [6]], state)
    state.rewind(0, LONG - 10)
    model([ids(30, 9), [8, 9]], state)
    alone = model.new_state()
    model([[*ids(LONG), 6, 8]], alone)
    torch.testing.assert_close(model([[], [7]], state)[1], model([[9, 7]], alone)[0], atol=1e-4, rtol=1e-4)
    assert all(torch.equal(tensor, expected[name]) for layer in snapshot.layers[-1:] for name, tensor in layer.items())


@pytest.mark.parametrize("case", ["llama", "deepseek_v3"])
def test_a_long_row_beside_short_ones_costs_the_sum_of_the_lengths(case: str) -> None:
    model, lengths = ours(case), [4000] + [100] * 7
    state = model.new_state(8)
    model([ids(length, seed) for seed, length in enumerate(lengths)], state, logits="none")
    straight = model.new_state()
    model([ids(64 * BLOCK_TOKENS)], straight, logits="none")
    each = sum(straight.memory().values()) / (64 * BLOCK_TOKENS)
    assert sum(state.memory().values()) <= 1.1 * each * sum(lengths) + 8 * BLOCK_TOKENS * each


def test_a_window_gives_up_what_nobody_may_see_again() -> None:
    model, pool = ours("mistral"), BlockPool()
    state = model.new_state(pool=pool)
    model([ids(3000)], state)
    [span] = {store.window_span for store in stores(state)}
    assert span is not None
    for store in stores(state):
        held = sum(block is not None for block in store.rows[0].blocks)
        assert held * BLOCK_TOKENS <= span + 2 * BLOCK_TOKENS
    assert pool.nbytes == reachable(state)


@pytest.mark.parametrize("case", ATTENTION)
def test_blocks_in_use_are_those_that_somebody_holds(case: str) -> None:
    model, pool, chance = ours(case), BlockPool(), random.Random(case)
    state = model.new_state(3, pool=pool)
    kept: list[lmstate.Snapshot] = []
    for turn in range(60):
        row = chance.randrange(3)
        match chance.choice(["feed", "draft", "rewind", "select", "snapshot", "restore", "mark", "leave"]):
            case "feed":
                model([ids(chance.choice([0, 1, 40, 90]), turn * 3 + r) for r in range(3)], state)
            case "draft":
                model([ids(chance.choice([1, 20, 70]), turn * 3 + r) for r in range(3)], state, commit=False)
                state.commit([chance.randrange(n + 1) for n in state.pending])
            case "rewind":
                state.rewind(row, chance.randrange(state.lengths[row] + 1))
            case "select":
                state.select([chance.choice([None, 0, 1, 2]) for _ in range(3)])
            case "snapshot":
                kept = [*kept[-2:], state.snapshot(row)]
            case "restore" if kept:
                state.restore(row, chance.choice(kept))
            case "mark":
                state.mark(row)
            case "leave":
                state.remove(row)
                assert state.add(chance.choice([None, *kept])) == row
        assert pool.nbytes == reachable(state, *kept)
    del state, kept
    gc.collect()
    assert pool.nbytes == 0


@pytest.mark.parametrize("limit", ["4GiB", 1e9, -1])
def test_a_limit_that_is_no_number_of_bytes_is_refused(limit: Any) -> None:
    with pytest.raises(StateError, match="pool"):
        BlockPool(limit)


@pytest.mark.parametrize("case", ["llama", "deepseek_v3", "falcon_h1"])
def test_a_full_pool_refuses_and_changes_nothing(case: str) -> None:
    model, pool = ours(case), BlockPool()
    state = model.new_state(2, pool=pool)
    first = model([ids(70), ids(10)], state)
    pool.limit = pool.nbytes
    memory = pool.nbytes
    with pytest.raises(CapacityError, match="blocks"):
        model([ids(80, 1), []], state)
    assert state.lengths == [70, 10] and state.pending == [0, 0] and pool.nbytes == memory
    snapshot = state.snapshot(0)
    state.rewind(0, 0)
    pool.limit = None
    state.restore(0, snapshot)
    again = model([[], []], state)
    assert torch.equal(again[1], first[1])
    straight = model.new_state()
    torch.testing.assert_close(model([[5], []], state)[0], model([[*ids(70), 5]], straight)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "mistral", "deepseek_v3", "mamba2", "qwen3_next-dense", "rwkv"])
def test_rows_join_and_leave_while_others_keep_their_numbers(case: str) -> None:
    model = ours(case)
    state = model.new_state(2)
    model([ids(9), ids(4, 1)], state)
    snapshot = state.snapshot(0)
    model([[], [5, 6]], state, commit=False)
    assert state.add(snapshot) == 2 and state.pending == [0, 2, 0]
    state.remove(0)
    assert state.add() == 0
    state.commit()
    assert state.lengths == [0, 6, 9] and state.tokens(2) == ids(9)
    got = model([[1], [], [7]], state)
    for row, tokens in ((0, [1]), (1, [*ids(4, 1), 5, 6]), (2, [*ids(9), 7])):
        torch.testing.assert_close(got[row], model([tokens])[0, -1], atol=1e-4, rtol=1e-4)
    state.remove(1)
    for refused in (lambda: state.tokens(1), lambda: state.remove(1), lambda: model([[1], [2], [3]], state)):
        with pytest.raises(StateError, match="removed"):
            refused()
    assert state.lengths == [1, 0, 10]


def test_a_snapshot_that_does_not_fit_adds_no_row() -> None:
    state, other = ours("llama").new_state(2), ours("mistral").new_state()
    ours("mistral")([ids(5)], other)
    with pytest.raises(lmstate.SnapshotError):
        state.add(other.snapshot())
    assert state.rows == 2


@pytest.mark.parametrize("kv", [None, lmstate.kv.Quantized(8), lmstate.kv.Quantized(4)])
@pytest.mark.parametrize("case", ["llama", "mistral", "deepseek_v3"])
def test_references_read_and_write_blocks_in_every_part_of_a_long_step(
    case: str, kv: lmstate.kv.Quantized | None
) -> None:
    model, tokens = ours(case), ids(700)
    with references():
        whole, cut = model.new_state(kv=kv), model.new_state(kv=kv)
        got = model([tokens], whole)
        for first in range(0, 700, 100):
            expected = model([tokens[first : first + 100]], cut)
        torch.testing.assert_close(got, expected, atol=0.02 if kv else 1e-4, rtol=1e-3)


@pytest.mark.parametrize("case", ["llama", "mistral", "deepseek_v3"])
def test_tables_grow_with_the_longest_row(case: str) -> None:
    """Token by token past the first sizes of a table, beside a short row: what layers made of it is made anew."""
    model, tokens = ours(case), ids(2 * FIRST_ENTRIES * BLOCK_TOKENS + 5)
    state, straight = model.new_state(2), model.new_state(2)
    for size in (FIRST_ENTRIES, 2 * FIRST_ENTRIES):
        model([tokens[state.lengths[0] : size * BLOCK_TOKENS - 2], [1, 2]], state, logits="none")
        for token in tokens[size * BLOCK_TOKENS - 2 : size * BLOCK_TOKENS + 2]:
            got = model([[token], [3]], state)
    model([tokens[: state.lengths[0] - 1], state.tokens(1)[:-1]], straight, logits="none")
    torch.testing.assert_close(got, model([[token], [3]], straight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("through", ["prefill", "restore"])
def test_a_pool_of_several_threads_holds_its_limit(through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pool = ours("llama"), BlockPool()
    states = [model.new_state(pool=pool) for _ in range(2)]
    alone = model.new_state()
    model([ids(70)], alone)
    captured = alone.snapshot()
    copied = tuple({name: tensor.clone() for name, tensor in layer.items()} for layer in captured.layers)
    snapshot = dataclasses.replace(captured, layers=copied)
    sizes = [block.nbytes for block in alone.blocks()]
    pool.limit = 2 * sum(sizes) - min(sizes)  # room for both but for one block
    together, require = Barrier(2), BlockPool.require

    def slow(self: BlockPool, nbytes: int) -> None:
        """Another thread, if it may, asks as well before what is granted here is taken."""
        require(self, nbytes)
        with contextlib.suppress(BrokenBarrierError):
            together.wait(0.1)
        together.reset()

    monkeypatch.setattr(BlockPool, "require", slow)

    def fill(state: lmstate.State) -> bool:
        try:
            if through == "prefill":
                model([ids(70)], state)
            else:
                state.restore(0, snapshot)
        except CapacityError:
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        done = list(threads.map(fill, states))
    assert done.count(True) <= 1 and pool.nbytes <= pool.limit
    assert [bool(state.lengths[0]) for state in states] == done


def test_a_pool_that_nobody_asks_forgets_blocks_that_ended() -> None:
    model = ours("mistral")
    state = model.new_state(rows=1)
    with torch.no_grad():
        for at in range(40):
            model([[(at + place) % 50 for place in range(256)]], state, logits="none", rewindable=False)
    pools = {id(pool): pool for layer in state.layers if (pool := getattr(layer.content, "pool", None)) is not None}
    assert pools
    for pool in pools.values():
        assert len(pool._sizes) < 100
