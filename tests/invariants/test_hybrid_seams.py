"""The seam between prefill and decode in recurrent layers, as reported in transformers#45513.

After a prefill, a forward of several tokens took the path of a fresh prompt there: it started from an empty
convolution tail and an empty carry, and every logit was wrong. Where one forward ends must not show in the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from lmstate.models.model import Model
from lmstate.state import LayerState, RecurrentState
from tests.zoo import ours, text

BOUND = 1e-4
PREFILL, MORE = 37, 16


def folds(model: Model) -> Iterator[LayerState]:
    """The recurrent layers' states of an empty state of the model."""
    for layer in model.new_state().layers:
        yield from (part for part in layer.leaves() if isinstance(part, RecurrentState))


# The zoo's kinds with recurrent layers, less the cases of theirs that run without any.
NONE = ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid-attention")
RECURRENT = [
    case
    for kind in ("delta", "ssm", "conv", "linear")
    for case in import_module(f"tests.zoo.{kind}").CASES
    if case not in NONE
]


@pytest.mark.parametrize("case", RECURRENT)
def test_tokens_after_a_prefill_are_alike_in_one_forward_or_in_many(case: str) -> None:
    model, ids = ours(case), text(PREFILL + MORE, rows=2)
    assert any(folds(model)), "a case of another kind: it belongs in NONE"
    whole = model(ids)[:, PREFILL:]
    together, apart = model.new_state(2), model.new_state(2)
    for state in (together, apart):
        model(ids[:, :PREFILL], state, logits="none")
    at_once = model(ids[:, PREFILL:], together, logits="all")
    singly = torch.cat([model(ids[:, at : at + 1], apart, logits="all") for at in range(PREFILL, PREFILL + MORE)], 1)
    torch.testing.assert_close(at_once, singly, atol=BOUND, rtol=BOUND)
    torch.testing.assert_close(at_once, whole, atol=BOUND, rtol=BOUND)
    torch.testing.assert_close(singly, whole, atol=BOUND, rtol=BOUND)
    for one, other in zip(together.layers, apart.layers):
        for a, b in zip(one.capture(0, PREFILL + MORE).values(), other.capture(0, PREFILL + MORE).values()):
            torch.testing.assert_close(a, b, atol=BOUND, rtol=BOUND)


def test_an_emptied_carry_is_noticed() -> None:
    """What the report describes: the same forward from an empty carry differs everywhere."""
    model, ids = ours("qwen3_5"), text(PREFILL + MORE)
    state = model.new_state()
    model(ids[:, :PREFILL], state, logits="none")
    for layer in state.layers:
        if isinstance(layer, RecurrentState):
            layer.carry = tuple(map(torch.zeros_like, layer.carry))
    wrong = model(ids[:, PREFILL:], state, logits="all")
    assert ((wrong - model(ids)[:, PREFILL:]).abs().amax(-1) > 100 * BOUND).all()
