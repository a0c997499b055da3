"""bfloat16 in 12 bits is the same number for number, in every body, or it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lmstate.ops as ops
from lmstate.models.block import Block
from lmstate.models.compiled import traceable
from lmstate.models.fingerprint import fingerprint
from lmstate.models.layers.identity import Identity
from lmstate.models.layers.mlp import MLP
from lmstate.models.network import Network
from lmstate.models.stack import Plan
from lmstate.ops import Bfloat12Weight, FloatWeight, dispatch
from lmstate.state import Layout, Step
from tests.zoo import ours

SHAPES = ((1, 64), (4, 128), (7, 64), (33, 320), (130, 1024))


def special(n: int, k: int) -> Tensor:
    """Numbers of usual magnitudes, and the first row's of all kinds that there are."""
    matrix = torch.randn(n, k).bfloat16()
    matrix[0, :8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e38, 1e-39, -1e-41, 2e-38])
    matrix[-1, -3:] = torch.tensor([-1e-39, 1e30, -1e-10])
    matrix[0, 9] = torch.nan
    return matrix


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def packed(matrix: Tensor) -> Bfloat12Weight:
    weight = ops.to_bfloat12(FloatWeight(matrix))
    assert isinstance(weight, Bfloat12Weight)
    return weight


@pytest.fixture
def tolerant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small matrix of special numbers has more of them than a real one."""
    monkeypatch.setattr("lmstate.ops.weights.bfloat12.MOST_RARE", 0.5)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_number_changes(
    variant: str, shape: tuple[int, int], tolerant: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    matrix = special(*shape)
    weight = packed(matrix)
    ids = torch.randint(0, shape[0], (2, 3))
    for native in (True, False):
        if not native:
            monkeypatch.setattr(dispatch, "native", lambda *_: None)
        assert torch.equal(bits(weight.dequantize(torch.bfloat16)), bits(matrix))
        assert torch.equal(bits(weight.dequantize(torch.float32).bfloat16()), bits(matrix.float().bfloat16()))
        middle = weight.dequantize(torch.bfloat16, shape[0] // 3, shape[0] // 2)
        assert torch.equal(bits(middle), bits(matrix[shape[0] // 3 :][: shape[0] // 2]))
        torch.testing.assert_close(weight.rows(ids), matrix[ids].float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(bits(weight.plain().matrix), bits(matrix))


def test_a_matrix_of_usual_numbers_takes_three_quarters(variant: str) -> None:
    matrix = torch.randn(256, 512).bfloat16() / 50
    assert packed(matrix).nbytes < 0.76 * matrix.nbytes


def test_rare_numbers_are_multiplied_too(variant: str, tolerant: None) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(19, 192).bfloat16()
    matrix[:, 5::17] *= 2.0 ** torch.randint(-40, 12, (19, 11))
    weight = packed(matrix)
    assert len(weight._rare) > 50
    for rows in (1, 3, 4, 6, 32):
        x = torch.randn(rows, 192).bfloat16().float()  # which no processor rounds
        want = x.double() @ matrix.double().T
        torch.testing.assert_close(ops.linear(x, weight).double(), want, atol=1e-2, rtol=1e-5)


def test_what_saves_nothing_stays_as_it_is(variant: str) -> None:
    anything = torch.randint(-(2**15), 2**15, (16, 64), dtype=torch.int16).view(torch.bfloat16)
    for matrix in (anything, torch.randn(8, 96).bfloat16(), torch.randn(8, 64), torch.zeros(0, 64).bfloat16()):
        weight = FloatWeight(matrix)
        assert ops.to_bfloat12(weight) is weight
    int8 = ops.quantize(torch.randn(8, 64), "int8")
    assert ops.to_bfloat12(int8) is int8


def test_a_damaged_packing_is_refused(variant: str, tolerant: None) -> None:
    weight = packed(special(5, 64))
    n, k = weight.shape
    with pytest.raises(ValueError, match="12 bits is uint8"):
        Bfloat12Weight(weight.storage[:-1], n, k)
    with pytest.raises(ValueError, match="12 bits is uint8"):
        Bfloat12Weight(weight.storage[:50], n, k)
    for damage in (
        lambda w: w._rare[0, 0].add_(1),
        lambda w: w._rare[0, 1].fill_(64),
        lambda w: w._first[1].fill_(-1),
        lambda w: w._first[-1].add_(1),
    ):
        damaged = Bfloat12Weight(weight.storage.clone(), n, k)
        damage(damaged)
        with pytest.raises(ValueError, match="damaged"):
            Bfloat12Weight(damaged.storage, n, k)


def test_a_run_of_layers_gives_what_its_products_give(variant: str) -> None:
    torch.manual_seed(0)
    up, down = packed(torch.randn(256, 64).bfloat16() / 8), packed(torch.randn(64, 128).bfloat16() / 8)
    norm = ops.Norm(torch.rand(64) + 0.5, 1e-5)
    block = Block(Identity(), MLP(up, down), mlp_norm=norm)
    x, counts = torch.randn(2, 3, 64), (3, 2)
    step = Step((0, 0), counts, x.device, (3, 3))
    memory = block.mixer.new_state(Layout(2, x.device, torch.float32))
    apart = x + ops.linear(ops.linear(x, up, norm=norm), down, gate="silu")
    assert torch.equal(step.packed(Plan([block]).run(x, step, [memory])), step.packed(apart))


def test_a_model_is_the_same_model_however_its_numbers_lie(variant: str) -> None:
    model = ours("llama")
    matrices = [torch.randn(96, 64).bfloat16(), torch.randn(5, 128).bfloat16()]
    held = [packed(matrix) for matrix in matrices]
    assert fingerprint(model.config, held) == fingerprint(model.config, list(map(FloatWeight, matrices)))
    assert fingerprint(model.config, held[:1]) != fingerprint(model.config, held[1:])


def test_plain_keeps_what_is_shared_and_changes_nothing_else(variant: str) -> None:
    model = ours("llama")
    assert traceable(model.network) is model.network, "there is nothing to change"
    embed = packed(torch.randn(*model.embed.shape[:1], 64).bfloat16())
    other = Network(model.config, embed, model.blocks, model.norm, embed)
    flat = traceable(other)
    assert isinstance(flat.embed, FloatWeight) and flat.head is flat.embed and flat.blocks is model.blocks
    assert torch.equal(flat.embed.matrix, embed.dequantize(torch.bfloat16)) and other.embed is embed
