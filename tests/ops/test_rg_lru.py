"""rg_lru: Griffin's recurrence, which treats the first token of a sequence, and only that one, in its own way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmstate.ops.recurrent.rg_lru import PIECE, RECURRENT_UP_TO, chunked, recurrent, rg_lru
from tests.ops import fold_properties as properties

FEATURES = 8


def draw(rows, width, dtype=torch.float32, fresh=False):
    """x, input gate, recurrence gate; Lambda; the carry (h, seen), of which every second row is fresh, or all."""
    generator = torch.Generator().manual_seed(width)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    seen = torch.zeros(rows, dtype=dtype) if fresh else (torch.arange(rows) % 2).to(dtype)
    carry = (normal(rows, FEATURES) * seen[:, None], seen)
    return tuple(normal(rows, width, FEATURES) for _ in range(3)), normal(FEATURES), carry


def fold_with(param: Tensor) -> properties.Fold:
    return lambda inputs, carry, counts: rg_lru(*inputs, param, carry, counts)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9999, 1.0])
@pytest.mark.parametrize("width", [1, 2, 17, 300, PIECE + 70])
def test_chunked_equals_recurrent(keep: float, width: int) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        (decay, update, _), _, (h, _) = draw(2, width, dtype)
        decay = keep + (1 - keep) * decay.sigmoid()
        for got, want in zip(chunked(decay, update, h), recurrent(decay, update, h), strict=True):
            assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("cuts", [(1,) * 40, (3, 4, 1), (64,), (65, 1)])
def test_any_cut_equals_whole(cuts: tuple[int, ...]) -> None:
    inputs, param, carry = draw(2, 140)
    properties.check_any_cut_equals_whole(fold_with(param), inputs, carry, cuts, 1e-6)


@pytest.mark.parametrize("width", [1, RECURRENT_UP_TO, RECURRENT_UP_TO + 1, 100])
def test_ragged_rows_equal_each_row_alone(width: int) -> None:
    inputs, param, carry = draw(6, width)
    counts = [0, 0, 1, width, width, (width + 1) // 2]
    properties.check_ragged_equals_alone(fold_with(param), inputs, carry, counts, 1e-6)


def test_only_the_first_token_of_a_sequence_is_not_scaled_down() -> None:
    inputs, param, carry = draw(2, 3, fresh=True)
    y, (_, seen) = fold_with(param)(inputs, carry, torch.tensor([0, 3]))
    assert seen.tolist() == [0, 1]
    torch.testing.assert_close(y[1, 0], inputs[0][1, 0] * inputs[1][1, 0].sigmoid())
    assert not torch.allclose(y[1, 1], inputs[0][1, 1] * inputs[1][1, 1].sigmoid(), atol=1e-3)


@pytest.mark.parametrize("width", [2, 40])
def test_gradients(width: int) -> None:
    inputs, param, (h, seen) = draw(2, width, torch.float64)

    def fold(inputs, carry, counts):
        y, (new, _) = rg_lru(*inputs, param, (carry[0], seen), counts)
        return y, (new,)

    properties.check_gradients(fold, inputs, (h,), [width, width // 2])


def test_equals_transformers_rg_lru() -> None:
    peer = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    config = peer.RecurrentGemmaConfig(lru_width=FEATURES, num_attention_heads=2, hidden_size=FEATURES)
    layer = peer.RecurrentGemmaRglru(config)
    torch.manual_seed(0)
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2, 60, FEATURES)
    heads = x.unflatten(-1, (2, -1))

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return (torch.einsum("rthi,hij->rthj", heads, weight) + bias).flatten(2)

    with torch.no_grad():
        gates = (
            gate(layer.input_gate_weight, layer.input_gate_bias),
            gate(layer.recurrent_gate_weight, layer.recurrent_gate_bias),
        )
        wanted = layer(x, torch.arange(60).expand(2, -1))
        carry = (torch.zeros(2, FEATURES), torch.zeros(2))
        y, (h, _) = rg_lru(x, *gates, layer.recurrent_param, carry, torch.tensor([60, 60]))
    torch.testing.assert_close((y, h), (wanted, layer.recurrent_states), rtol=1e-5, atol=1e-5)
