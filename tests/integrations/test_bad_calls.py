"""What a StateCache is asked for and cannot do: told, with everything as it was; and models that train in part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from transformers import DynamicCache

from lmstate.errors import StateError
from lmstate.integrations.transformers import StateCache
from tests.integrations.models import DECODERS, call, decoder, text

WRONG: dict[str, Callable[[StateCache], Any]] = {
    "crop by half a token": lambda cache: cache.crop(-2.5),  # type: ignore[arg-type]
    "rewind to a float": lambda cache: cache.rewind(to=2.5),  # type: ignore[arg-type]
    "rewind to a text": lambda cache: cache.rewind(to="3"),  # type: ignore[arg-type]
    "rewind to True": lambda cache: cache.rewind(to=True),
    "cost of a float": lambda cache: cache.rewind_cost(2.5),  # type: ignore[arg-type]
    "a row that is no list": lambda cache: cache.batch_select_indices(torch.tensor(1)),
    "rows on two axes": lambda cache: cache.batch_select_indices(torch.tensor([[0, 1]])),
    "rows that are floats": lambda cache: cache.batch_select_indices([0.5, 1.0]),  # type: ignore[list-item]
    "a mask of another batch": lambda cache: cache.batch_select_indices([True]),
    "no rows": lambda cache: cache.batch_select_indices([]),
    "a beam mask of another batch": lambda cache: cache.reorder_cache(torch.tensor([True, False, True])),
    "a row that is not there": lambda cache: cache.reorder_cache(torch.tensor([0, 2])),
    "no copies": lambda cache: cache.batch_repeat_interleave(0),
    "fork to none": lambda cache: cache.fork(0),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "mamba2"])
def test_bad_arguments_are_told_and_change_nothing(name: str, what: str) -> None:
    model = decoder(name)
    cache, other = StateCache(model), StateCache(model)
    for each in (cache, other):
        call(model, text(30, rows=2), each)
    with pytest.raises((StateError, IndexError)):
        WRONG[what](cache)
    assert (cache.rows, cache.get_seq_length()) == (2, 30)
    assert torch.equal(call(model, text(3, rows=2), cache), call(model, text(3, rows=2), other))


@pytest.mark.parametrize("to", [torch.tensor(25), numpy.int64(25)])
@pytest.mark.parametrize("name", ["gemma3", "mamba2"])
def test_a_number_of_torch_or_numpy_is_a_number(name: str, to: Any) -> None:
    model = decoder(name)
    cache = StateCache(model)
    call(model, text(30), cache)
    cache.rewind(to=to)
    call(model, text(3), cache)
    assert int(to) == 25 and cache.get_seq_length() == 28 and type(cache.recomputed) is int


@pytest.mark.parametrize("options", [{"rewind": "x"}, {"rewind": -1}, {"anchors": 1.5}])
def test_options_out_of_range_are_told(options: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=next(iter(options))):
        StateCache(decoder("gemma3"), **options)


@pytest.mark.parametrize("name", DECODERS)
def test_a_model_that_trains_in_part_has_the_gradients_that_it_has_with_the_dynamic_cache(name: str) -> None:
    model = decoder(name)
    if StateCache(model).feeds_singly:
        pytest.skip("fed singly, transformers' convolution writes over what backward needs, in any cache")
    names = [key for key, _ in model.named_parameters() if key.endswith(("q_proj.weight", "o_proj.weight"))]
    before = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
    found = []
    try:
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key in names)
        for make in (lambda: DynamicCache(config=model.config), lambda: StateCache(model)):
            model.zero_grad()
            cache, total = make(), torch.zeros(())
            for part in text(20).split(7, dim=1):
                out = model(input_ids=part, past_key_values=cache)
                total = total + out.logits.logsumexp(-1).sum()
            if not total.requires_grad:
                pytest.skip("no attention in it")
            try:
                total.backward()
            except RuntimeError:
                if found:
                    raise
                pytest.skip("transformers' own cache cannot do it, either")
            found.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    finally:
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(before[key])
        model.zero_grad()
    assert found[0].keys() == found[1].keys() != set()
    for key, grad in found[0].items():
        torch.testing.assert_close(found[1][key], grad, atol=1e-4, rtol=1e-4)
