"""Memory for weights and blocks: apart, on cache lines; and weights are the same there."""

from __future__ import annotations

from itertools import pairwise
from weakref import ref

import pytest
import torch

import lmstate.ops as ops
from lmstate.ops import memory
from lmstate.state.blocks import Buffer


@pytest.mark.parametrize("large", [True, False])
def test_pieces_are_zeroed_and_do_not_touch(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGE", memory.LARGE and large)
    monkeypatch.setattr(memory, "CHUNK", 4096)
    monkeypatch.setattr(memory, "_chunk", torch.empty(0, dtype=torch.uint8))
    pieces = [memory.zeroed(size) for size in (1, 63, 64, 65, 700, 1000, 900, 1000, 900, 5000, 0, 3)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0 or not len(piece)
        assert not piece.any()
        piece.fill_(number + 1)
    assert all(bool((piece == number + 1).all()) for number, piece in enumerate(pieces))


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_weight_is_the_same_there(kind: str) -> None:
    weight = ops.quantize(torch.randn(50, 96), kind)
    moved = weight.in_large_pages()
    assert moved.kind == kind and torch.equal(moved.storage, weight.storage)
    assert torch.equal(moved.dequantize(), weight.dequantize())
    assert (moved.storage.data_ptr() != weight.storage.data_ptr()) == memory.LARGE


def test_there_is_memory_to_spare() -> None:
    assert memory.spare() > 2**20


def test_pieces_that_end_are_used_again_and_no_other_ones() -> None:
    pieces, size = memory.Pieces(), 24_000
    held = [pieces.empty((size,), torch.uint8).fill_(number % 200 + 1) for number in range(1000)]  # in three slabs
    views = {number: held[number].view(torch.int16)[5:9] for number in range(0, 1000, 77)}
    kept = {view.data_ptr() - 10 for view in views.values()}
    del held
    again = [pieces.empty((size,), torch.uint8) for _ in range(1000)]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in again)
    places = sorted(kept | {tensor.data_ptr() for tensor in again})
    assert len(places) == 1000 + len(views) and all(b - a >= size for a, b in pairwise(places))
    assert all((view.view(torch.uint8) == number % 200 + 1).all() for number, view in views.items())


def test_empty_slabs_go_back_but_for_one() -> None:
    pieces = memory.Pieces()
    held = [pieces.empty((12, 1000), torch.bfloat16) for _ in range(2000)]
    slabs = [ref(slab.memory) for slab in {id(taken.slab): taken.slab for taken in pieces._taken.values()}.values()]
    assert len(slabs) == 6
    del held
    assert pieces.empty((12, 1000), torch.bfloat16).data_ptr() and sum(slab() is not None for slab in slabs) == 1


def test_large_pieces_and_empty_ones_have_memory_of_their_own() -> None:
    pieces = memory.Pieces()
    assert not pieces.empty((0, 3), torch.float32).numel()
    assert pieces.empty((pieces.SLAB,), torch.uint8).fill_(1).all()
    assert not pieces._taken


def test_blocks_of_a_row_lie_in_large_pages_and_begin_as_zeros() -> None:
    Buffer((2,), 64, torch.bfloat16, torch.device("cpu")).zeros().fill_(1)
    block = Buffer((2,), 64, torch.bfloat16, torch.device("cpu")).zeros()
    assert block.shape == (2, 64, 64) and block.is_contiguous() and not block.any()
    assert block.data_ptr() in {
        address + taken.at
        for taken in memory.pieces._taken.values()
        for address in [torch.frombuffer(taken.slab.memory, dtype=torch.uint8).data_ptr()]
    }
