"""Memory for weights: zeroed, apart, on cache lines; and weights are the same there."""

from __future__ import annotations

import pytest
import torch

import lmstate.ops as ops
from lmstate.ops import memory


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
