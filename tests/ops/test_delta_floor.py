"""A delta rule whose log decay has a floor: a sigmoid takes the place of the softplus (Ling 3.0)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import Norm
from lmstate.ops.recurrent.gated_delta_mixer import gated_delta_mixer
from lmstate.ops.types.mixers import GatedDeltaParams
from tests.ops import fold_properties as properties

HEADS, DIM, KERNEL, FLOOR = 3, 5, 3, -2.0
WIDTH = HEADS * DIM


def weights(channels: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """conv, A, dt_bias, and the norm's weight."""
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    return (
        normal(3 * WIDTH, KERNEL), -torch.linspace(0.3, 4.0, HEADS, dtype=dtype),
        normal(WIDTH if channels else HEADS), 1 + 0.2 * normal(DIM),
    )  # fmt: skip


def draw(
    rows: int, width: int, channels: bool, dtype: torch.dtype = torch.float32
) -> tuple[properties.Inputs, properties.Carry]:
    generator = torch.Generator().manual_seed(width)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    features = 3 * WIDTH + HEADS + (WIDTH if channels else HEADS)
    return (normal(rows, width, features),), (normal(rows, KERNEL - 1, 3 * WIDTH), normal(rows, HEADS, DIM, DIM))


def make(channels: bool, dtype: torch.dtype = torch.float32) -> properties.Fold:
    conv, A, dt_bias, norm = weights(channels, dtype)

    def fold(
        inputs: properties.Inputs, carry: properties.Carry, counts: Tensor
    ) -> tuple[Tensor, properties.Carry]:  # fmt: skip
        z = carry[1].new_zeros(*inputs[0].shape[:2], WIDTH)
        params = GatedDeltaParams(conv, A, dt_bias, Norm(norm, 1e-6), HEADS, DIM, "sigmoid", floor=FLOOR)
        return gated_delta_mixer(inputs[0], z, (carry[0], carry[1]), counts, params)

    return fold


CHANNELS = pytest.mark.parametrize("channels", [False, True])


@CHANNELS
@pytest.mark.parametrize("width", [1, 4, 40])
def test_equals_the_formulas_token_by_token(channels: bool, width: int) -> None:
    (x,), (tail, state) = draw(1, width, channels, torch.float64)
    conv, A, dt_bias, norm = weights(channels, torch.float64)
    y, new = make(channels, torch.float64)((x,), (tail, state), torch.tensor([width]))
    stream = torch.cat([tail, x[..., : 3 * WIDTH]], 1)[0]
    S, wanted = state[0], []
    for t in range(width):
        q, k, v = F.silu((stream[t : t + KERNEL] * conv.T).sum(0)).view(3, HEADS, DIM)
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        beta, decay = x[0, t, 3 * WIDTH :].split([HEADS, len(dt_bias)])
        g = FLOOR * torch.sigmoid(-A[:, None] * (decay + dt_bias).view(HEADS, -1))
        assert (g > FLOOR).all() and (g < 0).all()
        S = g.exp()[..., None] * S
        S = S + k[..., None] * (beta.sigmoid()[:, None] * (v - (k[..., None] * S).sum(1)))[:, None]
        o = DIM**-0.5 * (q[..., None] * S).sum(1)
        wanted.append((0.5 * norm * o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-6)).flatten())
    torch.testing.assert_close(y[0], torch.stack(wanted), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(new[1][0], S, rtol=1e-7, atol=1e-7)


@CHANNELS
@pytest.mark.parametrize("cuts", [(1,) * 40, (3, 4, 1), (64,), (65, 1)])
def test_any_cut_equals_whole(channels: bool, cuts: tuple[int, ...]) -> None:
    properties.check_any_cut_equals_whole(make(channels), *draw(2, 100, channels), cuts, 1e-5)


@CHANNELS
@pytest.mark.parametrize("width", [1, 3, 7])
def test_a_row_is_bit_for_bit_the_row_alone(channels: bool, width: int) -> None:
    properties.check_ragged_equals_alone(
        make(channels), *draw(4, width, channels), [0, 1, width, (width + 1) // 2], 0.0
    )  # fmt: skip


@CHANNELS
@pytest.mark.parametrize("width", [2, 21])
def test_gradients(channels: bool, width: int) -> None:
    inputs, carry = draw(2, width, channels, torch.float64)
    properties.check_gradients(make(channels, torch.float64), inputs, carry, [width, width // 2])
