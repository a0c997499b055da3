"""Blocks in slabs: read and written together they hold what each block alone holds, whoever had its place before."""

from __future__ import annotations

import random
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor

import lmstate.ops as ops
from lmstate.ops import dispatch
from lmstate.ops.attention.attend_latent import attend_latent, attend_latent_reference
from lmstate.ops.types.block_table import BLOCK_TOKENS, BlockTable, RowBlocks
from lmstate.ops.types.slab_table import SlabRows, SlabTable
from lmstate.ops.types.slabs import FEWEST, BufferShape, Slab, Slabs
from tests.ops.test_attend import RULES, by_hand, rule_of, told
from tests.other_device import DEVICE, OtherDevice

CPU = torch.device("cpu")
SHAPES = [BufferShape((3,), 8, torch.float32), BufferShape((), 5, torch.bfloat16)]


def tables(rows: list[RowBlocks], device: torch.device, shapes: list[BufferShape]) -> list[SlabTable]:
    pointers, places = np.zeros((len(rows), 1), dtype=np.int64), SlabRows(rows)
    return [
        SlabTable(places, i, pointers, *(s.heads or (1,)), s.width, torch.zeros(0, dtype=s.dtype, device=device))
        for i, s in enumerate(shapes)
    ]


def alone(table: BlockTable, r: int, low: int, end: int) -> Tensor:
    """The same span, block by block."""
    return BlockTable.span(table, range(r, r + 1), low, end)


def slabs_of(rows: list[RowBlocks]) -> dict[int, Slab]:
    return {id(block.slab): block.slab for row in rows for block in row.blocks}


def test_rows_that_grow_end_and_begin_again_hold_their_own_numbers() -> None:
    draw, slabs = random.Random(0), Slabs(SHAPES, CPU)
    rows, held = [RowBlocks()] * 4, [[torch.zeros(0, 3, 8), torch.zeros(0, 1, 5)] for _ in range(4)]
    made = tables(rows, CPU, SHAPES)
    most, many = 0, False
    for _ in range(300):
        counts = [draw.choice((0, 1, 1, 3, 64, 150)) for _ in rows]
        if draw.random() < 0.3:  # a row ends
            r = draw.randrange(4)
            rows[r], held[r] = RowBlocks(), [each[:0] for each in held[r]]
            made[0].forget()
        starts = [len(own[0]) for own in held]
        for r, (start, count) in enumerate(zip(starts, counts)):
            missing = -(-(start + count) // BLOCK_TOKENS) - len(rows[r].blocks)
            rows[r] = RowBlocks((*rows[r].blocks, *slabs.take(missing, zeroed=True)))
        new = [torch.randn(4, max(counts), *(s.heads or (1,)), s.width) for s in SHAPES]
        for i, table in enumerate(made):
            table.write(new[i], torch.tensor(starts), torch.tensor(counts))
            for r, count in enumerate(counts):
                held[r][i] = torch.cat([held[r][i], new[i][r, :count].to(table.dtype).float()])
        for i, table in enumerate(made):
            for r, own in enumerate(held):
                end = len(own[i])
                low = draw.randint(0, end)
                want = own[i][low:].transpose(0, 1)[None]
                assert torch.equal(table.span(range(r, r + 1), low, end).float(), want)
                assert torch.equal(alone(table, r, low, end).float(), want)
            assert torch.equal(table.dense(), BlockTable.dense(table)), "what lies behind a row's end is of zeros"
        most, many = max(most, sum(len(row.blocks) for row in rows)), many or len(slabs_of(rows)) > 1
    assert many
    assert len(slabs._leases) == sum(len(row.blocks) for row in rows)
    assert sum(slab.blocks for slab in slabs._slabs) <= 6 * most + FEWEST


def test_a_row_whose_blocks_follow_each_other_is_read_where_it_lies() -> None:
    rows = [RowBlocks(tuple(Slabs(SHAPES, CPU).take(5, zeroed=True)))]
    table = tables(rows, CPU, SHAPES)[0]
    read = table.span(range(1), 70, 300)
    assert read.untyped_storage().data_ptr() == rows[0].blocks[0].tensors[0].untyped_storage().data_ptr()
    tracked = table.span(range(1), 70, 300, tracked=True)
    assert torch.equal(read, tracked)
    assert tracked.untyped_storage().data_ptr() != read.untyped_storage().data_ptr()


def test_blocks_come_back_once_no_graph_reads_them_and_empty_slabs_end() -> None:
    slabs = Slabs(SHAPES, CPU)
    first = slabs.take(FEWEST, zeroed=True)
    tracked, weight = first[3].index, torch.ones(1, requires_grad=True)
    loss = (first[3].tensors[0].add_(weight)[0, 1:] * weight).sum()  # a view of a block is what is saved
    del first
    again = slabs.take(FEWEST - 1, zeroed=True)
    assert tracked not in {block.index for block in again} and len(slabs._slabs) == 1
    assert not any(tensor.any() for block in again for tensor in block.tensors)
    loss.backward()
    del loss
    more = slabs.take(200, zeroed=False)
    assert more[0].index == tracked and more[0].slab is again[0].slab
    slab = ref(slabs._slabs[1])
    del more
    again += slabs.take(1, zeroed=True)
    assert slab() is None


def test_a_fault_loses_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    slabs = Slabs(SHAPES, CPU)
    del slabs.take(FEWEST, zeroed=True)[:]
    with monkeypatch.context() as patched:
        patched.setattr(Slab, "clear", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            slabs.take(5, zeroed=True)
    assert {block.index for block in slabs.take(FEWEST, zeroed=True)} == {*range(1, FEWEST + 1)}


def test_what_was_discarded_is_not_read_with_its_block() -> None:
    rows = [RowBlocks(tuple(Slabs(SHAPES, CPU).take(2, zeroed=True))) for _ in range(2)]
    for table, shape in zip(tables(rows, CPU, SHAPES), SHAPES):
        new = torch.randn(2, 70, *(shape.heads or (1,)), shape.width)
        new[:, 41:] = torch.nan
        starts = torch.tensor([60, 3])
        table.write(new, starts, torch.tensor([60, 70]))
        table.write(new, starts, torch.tensor([4, 41]))  # the rest was discarded, of the second row a block too
        assert table.read((0, 1), (range(1), range(1)), 2).isfinite().all()
        table.write(new, torch.tensor([64, 44]), torch.tensor([5, 41]))
        assert table.read((0, 1), (range(2), range(2)), 2).isfinite().all()


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_gradients_follow_what_is_read_while_more_is_written(name: str) -> None:
    shapes = [BufferShape((2,), 8, torch.float32)] * 2
    leaves = {"q": torch.randn(1, 1, 2, 8), "k": torch.randn(1, 1, 2, 8), "v": torch.randn(1, 1, 2, 8)}
    leaves["sinks"] = torch.randn(2)
    leaves[name].requires_grad_()

    def gradient(kind: type[BlockTable]) -> Tensor:
        rows = [RowBlocks(tuple(Slabs(shapes, CPU).take(2, zeroed=True)))]
        pointers, like = np.zeros((1, 1), dtype=np.int64), torch.zeros(0)
        first = SlabRows(rows) if kind is SlabTable else rows
        k, v = (kind(first, i, pointers, 2, 8, like) for i in range(2))
        loss, params = torch.zeros(()), ops.AttentionParams(0.3, None, leaves["sinks"])
        with dispatch.references():
            for start in range(3):
                at = torch.tensor([start]), torch.tensor([1])
                ops.append(leaves["k"], leaves["v"], k, v, *at)
                loss = loss + ops.attend(leaves["q"], k, v, *at, params).square().sum()
        return torch.autograd.grad(loss, leaves[name])[0]

    torch.testing.assert_close(gradient(SlabTable), gradient(BlockTable))


def test_pointers_are_those_of_the_tensors() -> None:
    for block in Slabs(SHAPES, CPU).take(3, zeroed=True):
        assert block.pointers == tuple(tensor.data_ptr() for tensor in block.tensors)
        assert [tensor.shape for tensor in block.tensors] == [(3, 64, 8), (64, 5)]
        assert all(tensor._base is None for tensor in block.tensors)
        assert block.nbytes == sum(tensor.nbytes for tensor in block.tensors)


SPANS = [
    [(70, 1), (300, 1), (5, 1), (129, 1)],
    [(70, 3), (300, 0), (0, 5), (129, 1)],
    [(128, 1), (128, 1), (64, 40), (3000, 1), (20, 2)],
    [(0, 90), (0, 90)],
    [(0, 0), (0, 2)],
    [(30, 0), (9, 0), (500, 20), (7, 0)],
]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("spans", SPANS)
def test_rows_attended_to_together_equal_a_loop_over_positions(name: str, spans: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    rule = rule_of(name, 6, len(spans), max(count for _, count in spans))
    all_k, all_v = ([torch.randn(sum(span), 2, dim) for span in spans] for dim in (8, 16))
    starts, counts = torch.tensor(spans).T
    q = torch.randn(len(spans), int(counts.max()), 6, 8)
    want = by_hand(q, all_k, all_v, spans, 0.3, **rule)
    shapes = [BufferShape((2,), 8, torch.float32), BufferShape((2,), 16, torch.float32)]
    with OtherDevice():
        slabs = Slabs(shapes, torch.device(DEVICE))
        rows = [RowBlocks(tuple(slabs.take(-(-sum(span) // BLOCK_TOKENS), zeroed=True))) for span in spans]
        k, v = tables(rows, torch.device(DEVICE), shapes)
        for new, table in ((all_k, k), (all_v, v)):
            padded = torch.nn.utils.rnn.pad_sequence(new, batch_first=True).to(DEVICE)
            table.write(padded, torch.zeros_like(starts), starts + counts)
        params, mask = told(0.3, **rule)
        there = {name: x.to(DEVICE) for name, x in params._asdict().items() if isinstance(x, torch.Tensor)}
        params = params._replace(**there)
        got = ops.attend(q.to(DEVICE), k, v, starts, counts, params, mask)
        torch.testing.assert_close(got.cpu(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("spans", SPANS)
def test_latents_attended_to_together_are_those_of_each_row(spans: list[tuple[int, int]], window: int | None) -> None:
    torch.manual_seed(0)
    rows, starts, counts = len(spans), *torch.tensor(spans).T
    stored = [torch.randn(rows, int((starts + counts).max()), 1, dim) for dim in (16, 8)]
    q = [torch.randn(rows, int(counts.max()), 3, dim) for dim in (16, 8)]
    rings = (x.transpose(1, 2)[:, 0].contiguous() for x in stored)
    want = attend_latent_reference(*q, *rings, starts, counts, scale=0.3, window=window)
    shapes = [BufferShape((), 16, torch.float32), BufferShape((), 8, torch.float32)]
    with OtherDevice():
        slabs = Slabs(shapes, torch.device(DEVICE))
        held = [RowBlocks(tuple(slabs.take(-(-sum(span) // BLOCK_TOKENS), zeroed=True))) for span in spans]
        latents = tables(held, torch.device(DEVICE), shapes)
        for new, table in zip(stored, latents):
            table.write(new.to(DEVICE), torch.zeros_like(starts), starts + counts)
        queries = (each.to(DEVICE) for each in q)
        got = attend_latent(*queries, *latents, starts, counts, scale=0.3, window=window)
        torch.testing.assert_close(got.cpu(), want, atol=1e-5, rtol=1e-5)
