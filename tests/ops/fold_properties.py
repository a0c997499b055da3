"""The promise of every fold, checked on any operation of the shape `(inputs, carry, counts) -> (outputs, carry)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Inputs = tuple[Tensor, ...]
Carry = tuple[Tensor, ...]
Fold = Callable[[Inputs, Carry, Tensor], tuple[Tensor, Carry]]


def full(inputs: Inputs) -> Tensor:
    rows, width = inputs[0].shape[:2]
    return torch.full((rows,), width)


def assert_same(got: tuple[Tensor, Carry], wanted: tuple[Tensor, Carry], tolerance: float) -> None:
    for a, b in zip((got[0], *got[1]), (wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def check_any_cut_equals_whole(fold: Fold, inputs: Inputs, carry: Carry, cuts: Sequence[int], tolerance: float) -> None:
    """`cuts` are the sizes of the pieces; the last piece is what remains."""
    whole = fold(inputs, carry, full(inputs))
    pieces, state, first, width = [], carry, 0, inputs[0].shape[1]
    for size in (*cuts, width - sum(cuts)):
        piece = tuple(x[:, first : first + size] for x in inputs)
        y, state = fold(piece, state, full(piece))
        pieces.append(y)
        first += size
    assert first == width
    assert_same((torch.cat(pieces, 1), state), whole, tolerance)


def check_ragged_equals_alone(
    fold: Fold, inputs: Inputs, carry: Carry, counts: Sequence[int], tolerance: float
) -> None:
    """Padding holds NaN, and rows with different counts (0 too) give what each gives alone."""
    padded = tuple(x.clone() for x in inputs)
    for x in padded:
        for row, count in enumerate(counts):
            x[row, count:] = float("nan")
    before = tuple(c.clone() for c in carry)
    y, new = fold(padded, carry, torch.tensor(counts))
    assert y.isfinite().all()
    for old, c in zip(before, carry, strict=True):
        assert torch.equal(old, c), "the given carry was written"
    for row, count in enumerate(counts):
        one = slice(row, row + 1)
        own = tuple(c[one] for c in carry)
        if count == 0:
            for a, b in zip(new, own, strict=True):
                assert torch.equal(a[one], b), "a row without tokens changed its carry"
            continue
        alone = fold(tuple(x[one, :count] for x in inputs), own, torch.tensor([count]))
        assert_same((y[one, :count], tuple(c[one] for c in new)), alone, tolerance)


def check_gradients(fold: Fold, inputs: Inputs, carry: Carry, counts: Sequence[int]) -> None:
    """Gradients of outputs and new carry with respect to inputs and carry, against finite differences in float64."""
    leaves = tuple(x.double().requires_grad_() for x in (*inputs, *carry))

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        y, new = fold(leaves[: len(inputs)], leaves[len(inputs) :], torch.tensor(counts))
        return (y, *new)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
