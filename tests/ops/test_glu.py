"""Gates: the native bodies against the reference."""

from __future__ import annotations

import pytest
import torch

import lmstate.ops as ops
from lmstate.ops.cpu import abi
from lmstate.ops.dense.activations import glu_reference, swigluoai

GATES = [*ops.ACTIVATIONS, "swigluoai"]


@pytest.mark.parametrize("act", GATES)
@pytest.mark.parametrize("width", [1, 5, 16, 50])
def test_native_equals_the_reference(variant: str, act: str, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 2 * width) * 4
    gate, up = x.double().chunk(2, -1)
    want = swigluoai(gate, up) if act == "swigluoai" else ops.activation(act)(gate) * up
    exact = 1e-6 if act in abi.GATES else 5e-6  # torch's own gelu cancels where the gate is negative
    torch.testing.assert_close(ops.glu(x, act).double(), want, atol=exact, rtol=1e-5)
    torch.testing.assert_close(glu_reference(x, act).double(), want, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("act", GATES)
def test_extreme_gates_stay_what_they_are(variant: str, act: str) -> None:
    gate = torch.tensor([-1e4, -100.0, -88.5, 88.5, 100.0, 1e4, 0.0, torch.nan])
    for x in (torch.cat([gate, torch.ones(8)]), torch.cat([torch.ones(8), gate])):
        torch.testing.assert_close(ops.glu(x, act), glu_reference(x, act), atol=1e-30, rtol=1e-6, equal_nan=True)


def test_an_unknown_activation_and_an_odd_width_are_refused(variant: str) -> None:
    with pytest.raises(ValueError, match="no activation is called 'swish'"):
        ops.glu(torch.randn(2, 8), "swish")
    with pytest.raises(ValueError, match="two halves"):
        ops.glu(torch.randn(2, 7), "silu")
