"""gated_delta_rule: one recurrence, two bodies, scalar and channel gates, against transformers' own functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmstate.ops.recurrent.gated_delta_rule import RECURRENT_UP_TO, chunked, gated_delta_rule, recurrent
from tests.ops import fold_properties as properties

HEADS, DK, DV = 4, 8, 6
SCALE = DK**-0.5
GATES = pytest.mark.parametrize("gate", ["scalar", "channel"])


def draw(rows, width, gate="scalar", key_heads=2, dtype=torch.float32, strength=1.0, beta=1.0):
    """q, k, v, g, beta and a carry; `strength` is the mean of -g, `beta` its upper limit."""
    generator = torch.Generator().manual_seed(width + key_heads)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    uniform = lambda *shape: torch.rand(*shape, generator=generator, dtype=dtype)  # noqa: E731
    g = -2 * strength * uniform(rows, width, HEADS, *((DK,) if gate == "channel" else ()))
    q, k = normal(rows, width, key_heads, DK), normal(rows, width, key_heads, DK)
    inputs = (q, k, normal(rows, width, HEADS, DV), g, beta * uniform(rows, width, HEADS))
    return inputs, (normal(rows, HEADS, DK, DV),)


def fold(inputs: tuple[Tensor, ...], carry: tuple[Tensor, ...], counts: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    y, new = gated_delta_rule(*inputs, carry[0], counts, scale=SCALE, normalize=True)
    return y, (new,)


@GATES
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("width", [1, 5, 32, 75, 300])
def test_chunked_equals_recurrent(gate: str, key_heads: int, strength: float, width: int) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        inputs, (carry,) = draw(2, width, gate, key_heads, dtype, strength, beta=2.0)
        a = chunked(*inputs, carry, scale=SCALE, normalize=True)
        b = recurrent(*inputs, carry, scale=SCALE, normalize=True)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@GATES
def test_one_token_that_forgets_everything_leaves_the_others_exact(gate: str) -> None:
    inputs, (carry,) = draw(1, 64, gate, strength=0.01)
    inputs[3][:, 20] = -5000.0
    a = chunked(*inputs, carry, scale=SCALE, normalize=True)
    b = recurrent(*inputs, carry, scale=SCALE, normalize=True)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@GATES
@pytest.mark.parametrize("cuts", [(1,) * 40, (3, 4, 1), (64,), (65, 1), (31, 1, 33)])
def test_any_cut_equals_whole(gate: str, cuts: tuple[int, ...]) -> None:
    properties.check_any_cut_equals_whole(fold, *draw(2, 100, gate), cuts, 1e-5)


@GATES
@pytest.mark.parametrize("width", [1, RECURRENT_UP_TO, RECURRENT_UP_TO + 1, 70])
def test_ragged_rows_equal_each_row_alone(gate: str, width: int) -> None:
    properties.check_ragged_equals_alone(fold, *draw(4, width, gate), [0, 1, width, (width + 1) // 2], 1e-5)


@GATES
@pytest.mark.parametrize("width", [2, 37])
def test_gradients(gate: str, width: int) -> None:
    inputs, carry = draw(2, width, gate, dtype=torch.float64)
    properties.check_gradients(fold, inputs, carry, [width, width // 2])


def test_a_carry_below_float32_is_refused() -> None:
    inputs, (carry,) = draw(1, 2)
    with pytest.raises(ValueError, match="float32"):
        gated_delta_rule(*inputs, carry.bfloat16(), torch.tensor([2]), scale=SCALE)


@pytest.mark.parametrize("module", ["qwen3_next", "olmo_hybrid"])
@pytest.mark.parametrize("width", [1, 3, 16, 130])
def test_equals_transformers_gated_delta_rule(module: str, width: int) -> None:
    peer = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    inputs, (carry,) = draw(2, width, "scalar", beta=2.0 if module == "olmo_hybrid" else 1.0)
    y = gated_delta_rule(*inputs, carry, torch.tensor([width] * 2), scale=SCALE, normalize=True)
    for oracle in (peer.torch_chunk_gated_delta_rule, peer.torch_recurrent_gated_delta_rule):
        wanted = oracle(*inputs, initial_state=carry, output_final_state=True, use_qk_l2norm_in_kernel=True)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3, 16, 130])
def test_equals_transformers_kimi_delta_attention(width: int) -> None:
    peer = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    inputs, (carry,) = draw(2, width, "channel", key_heads=HEADS)
    y = gated_delta_rule(*inputs, carry, torch.tensor([width] * 2), scale=SCALE, normalize=True)
    for oracle in (peer.chunk_kimi_delta_attention, peer.recurrent_kimi_delta_attention):
        wanted = oracle(*inputs, initial_state=carry, output_final_state=True, use_qk_l2norm_in_kernel=True)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


@GATES
def test_ten_thousand_tokens_of_decode_do_not_drift_from_the_chunked_form(gate: str) -> None:
    inputs, (carry,) = draw(1, 10_000, gate, strength=0.003)
    exact_y, exact = chunked(*(x.double() for x in inputs), carry.double(), scale=SCALE, normalize=True)
    with torch.inference_mode():
        step_y, step = recurrent(*inputs, carry, scale=SCALE, normalize=True)
        whole_y, whole = chunked(*inputs, carry, scale=SCALE, normalize=True)
    size = exact.abs().max()
    errors = {
        "recurrent carry": (step - exact).abs().max() / size,
        "chunked carry": (whole - exact).abs().max() / size,
        "between them": (step - whole).abs().max() / size,
        "between their outputs": (step_y - whole_y).abs().max() / exact_y.abs().max(),
    }
    print(f"\n{gate} gate, 10,000 tokens:", ", ".join(f"{name} {float(e):.1e}" for name, e in errors.items()))
    assert max(errors.values()) < 1e-5
