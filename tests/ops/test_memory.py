"""Memory for weights and blocks: apart, on cache lines; and weights are the same there."""

from __future__ import annotations

from itertools import pairwise
from weakref import ref

import pytest
import torch

import lmstate.ops as ops
from lmstate.ops import memory
from lmstate.state.blocks import BlockSpec, Buffer

CPU = torch.device("cpu")


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


def whole(pieces: memory.Pieces, size: int) -> torch.Tensor:
    """A piece as bytes."""
    piece = pieces.take(size)
    tensor = piece.tensor(0, (size,), torch.uint8)
    assert tensor.data_ptr() == piece.address
    return tensor


def test_pieces_that_end_are_used_again_and_no_other_ones() -> None:
    pieces, size = memory.Pieces(), 24_000
    held = [whole(pieces, size).fill_(number % 200 + 1) for number in range(1000)]  # in three slabs
    views = {number: held[number].view(torch.int16)[5:9] for number in range(0, 1000, 77)}
    kept = {view.data_ptr() - 10 for view in views.values()}
    del held
    again = [whole(pieces, size) for _ in range(1000)]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in again)
    places = sorted(kept | {tensor.data_ptr() for tensor in again})
    assert len(places) == 1000 + len(views) and all(b - a >= size for a, b in pairwise(places))
    assert all((view.view(torch.uint8) == number % 200 + 1).all() for number, view in views.items())


def test_empty_slabs_go_back_but_for_one() -> None:
    pieces = memory.Pieces()
    held = [whole(pieces, 24_000) for _ in range(2000)]
    slabs = [ref(slab.memory) for slab in {id(taken.slab): taken.slab for taken in pieces._taken.values()}.values()]
    assert len(slabs) == 6
    del held
    assert whole(pieces, 24_000).data_ptr() and sum(slab() is not None for slab in slabs) == 1


def test_large_pieces_and_empty_ones_have_memory_of_their_own() -> None:
    pieces = memory.Pieces()
    assert whole(pieces, pieces.SLAB).fill_(1).all()
    assert not pieces.take(pieces.SLAB).tensor(0, (0, 3), torch.float32).numel()
    assert not pieces._taken


def test_parts_of_a_piece_are_tensors_of_their_own() -> None:
    piece = memory.Pieces().take(1000)
    parts = [piece.tensor(0, (5, 10), torch.float32).fill_(1), piece.tensor(256, (3, 100), torch.bfloat16).fill_(2)]
    assert [part.data_ptr() - piece.address for part in parts] == [0, 256]
    assert all(part._base is None and part.is_contiguous() for part in parts)
    assert bool((parts[0] == 1).all()) and bool((parts[1] == 2).all())


def test_blocks_of_a_row_lie_in_large_pages_and_begin_as_zeros() -> None:
    buffers = {"k": Buffer((2,), 63, torch.bfloat16, CPU), "v": Buffer((), 5, torch.float32, CPU)}
    spec = BlockSpec(buffers)
    used = spec.new(1, zeroed=True)[0]
    for tensor in used.tensors:
        tensor.fill_(1)
    del used, tensor
    block = spec.new(1, zeroed=True)[0]
    assert [tensor.shape for tensor in block.tensors] == [(2, 64, 63), (64, 5)]
    assert all(tensor.is_contiguous() and not tensor.any() for tensor in block.tensors)
    assert block.pointers == tuple(tensor.data_ptr() for tensor in block.tensors)
    assert block.nbytes == sum(tensor.nbytes for tensor in block.tensors)
    assert all(pointer % 64 == 0 for pointer in block.pointers)
    assert block.pointers[0] in {
        address + taken.at
        for taken in memory.pieces._taken.values()
        for address in [torch.frombuffer(taken.slab.memory, dtype=torch.uint8).data_ptr()]
    }


def test_who_asks_first_for_the_tensors_of_a_block_decides_nothing() -> None:
    block = BlockSpec({"k": Buffer((2,), 8, torch.float32, CPU)}).new(1, zeroed=True)[0]
    assert not block.requires_grad(0)
    with torch.inference_mode():
        (made,) = block.tensors
    assert not made.is_inference() and block.tensors[0] is made
    made.requires_grad_()
    assert block.requires_grad(0)
