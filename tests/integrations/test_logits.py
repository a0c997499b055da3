"""Logits through a StateCache are those of transformers' own cache, however the text is cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from lmstate.integrations.transformers import StateCache
from lmstate.integrations.transformers.cache.history import CACHES
from lmstate.integrations.transformers.cache.hooks import cache_name
from tests.integrations.models import DECODERS, call, decoder, text
from tests.sweeps import sampled

CUTS = (0, 30, 31, 32, 37, 50, 51, 60)  # a prompt past every window, single tokens, several at once


@pytest.mark.parametrize("name", DECODERS)
def test_logits_equal_those_with_the_dynamic_cache(name: str) -> None:
    model, ids = decoder(name), text(60, rows=2)
    ours, theirs = StateCache(model), DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids).logits
    for a, b in itertools.pairwise(CUTS):
        logits = call(model, ids[:, a:b], ours, a)
        # Where transformers forgets the carry between such calls, the whole text is what both should give.
        expected = whole[:, a:b] if ours.feeds_singly else call(model, ids[:, a:b], theirs, a)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        assert ours.get_seq_length() == b
    torch.testing.assert_close(logits, whole[:, CUTS[-2] :], atol=1e-4, rtol=1e-4)
    assert len(ours) == len(theirs) == model.config.num_hidden_layers
    assert ours.is_sliding == theirs.is_sliding
    assert ours.get_max_length() == theirs.get_max_length()
    if not any(theirs.is_linear):
        for held, wanted in zip(ours, theirs):
            for x, y in zip(held, wanted):
                assert (x is None) == (y is None) and (x is None or torch.equal(x, y))


@pytest.mark.parametrize("given", CACHES)
@pytest.mark.parametrize("name", ("llama", "mamba2"))
def test_a_cache_is_taken_under_any_of_its_names(name: str, given: str) -> None:
    model, ids, cache = decoder(name), text(40), StateCache(decoder(name))
    with torch.no_grad():
        whole = model(ids).logits
        parts = [model(part, **{given: cache}, use_cache=True).logits for part in ids.split((25, 1, 14), dim=1)]
    assert cache.get_seq_length() == 40
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


QUESTIONS: dict[str, Callable[[Any, int], Any]] = {
    "length": lambda cache, layer: cache.get_seq_length(layer),
    "most": lambda cache, layer: cache.get_max_length(layer),
    "offset": lambda cache, layer: cache.get_query_offset(layer),
    "mask of one": lambda cache, layer: cache.get_mask_sizes(1, layer),
    "mask of many": lambda cache, layer: cache.get_mask_sizes(7, layer),
    "has carries": lambda cache, layer: cache.has_previous_state(layer),
    "sliding": lambda cache, layer: cache.is_sliding[layer],
    "dummy": lambda cache, layer: cache.is_dummy[layer],
    "rows": lambda cache, layer: cache.batch_size,
    "begun": lambda cache, layer: cache.is_initialized,
    "goes back": lambda cache, layer: cache.is_croppable or None,
}


@pytest.mark.parametrize("name", DECODERS)
def test_what_the_dynamic_cache_answers_ours_answers_too(name: str) -> None:
    model, ids = decoder(name), text(40, rows=2)
    ours, theirs = StateCache(model), DynamicCache(config=model.config)
    answered = set()
    for a, b in itertools.pairwise((0, 5, 6, 30, 31, 40)):
        for cache in (ours, theirs):
            call(model, ids[:, a:b], cache, a)
        for (question, ask), layer in itertools.product(QUESTIONS.items(), range(len(theirs))):
            try:
                answer = ask(theirs, layer)
            except (AttributeError, ValueError):  # of this layer it may not be asked
                continue
            if answer is not None:
                answered.add(question)
                assert ask(ours, layer) == answer, question
    assert {"sliding", "begun"} <= answered and ours.is_croppable


@pytest.mark.parametrize("name", DECODERS)
def test_a_rewound_text_was_never_fed(name: str) -> None:
    model, ids = decoder(name), text(60, rows=2)
    cache = StateCache(model)
    call(model, ids[:, :30], cache)
    for at in range(30, 40):
        call(model, ids[:, at : at + 1], cache)
    call(model, text(8, rows=2, seed=5), cache)
    expected = StateCache(model)
    call(model, ids[:, :34], expected)
    for to in (34, 12):
        cost = cache.rewind_cost(to)
        before = cache.recomputed
        assert cache.rewind(to=to) == cost == cache.recomputed - before
        assert cache.get_seq_length() == to
    logits = call(model, ids[:, 12:34], cache)
    torch.testing.assert_close(
        logits[:, -1], call(model, ids[:, 33:34], _to(expected, 33))[:, -1], atol=1e-4, rtol=1e-4
    )


def _to(cache: StateCache, length: int) -> StateCache:
    cache.rewind(to=length)
    return cache


@pytest.mark.parametrize("name", ("llama", "mistral", "deepseek_v3", "falcon_h1"))
def test_bfloat16_gives_what_the_dynamic_cache_gives(name: str) -> None:
    import copy

    model, ids = copy.deepcopy(decoder(name)).to(torch.bfloat16), text(60, rows=2)
    ours, theirs = StateCache(model), DynamicCache(config=model.config)
    for a, b in itertools.pairwise(CUTS):
        assert torch.equal(call(model, ids[:, a:b], ours, a), call(model, ids[:, a:b], theirs, a))


@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_gradients_flow_through_what_is_cached(name: str) -> None:
    model, ids = decoder(name), text(30)
    grads = []
    for cache in (StateCache(model), DynamicCache(config=model.config)):
        model.zero_grad()
        model(ids[:, :20], past_key_values=cache, use_cache=True)
        model(ids[:, 20:], past_key_values=cache, use_cache=True).logits.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ("gemma3", "qwen3_next", "falcon_h1", "lfm2"))
def test_inference_mode_and_no_grad_may_alternate(name: str) -> None:
    model, ids = decoder(name), text(60)
    cache = StateCache(model)
    with torch.inference_mode():
        model(ids[:, :30], past_key_values=cache, use_cache=True)
    call(model, ids[:, 30:59], cache)
    with torch.inference_mode():
        logits = model(ids[:, 59:], past_key_values=cache, use_cache=True).logits
    with torch.no_grad():
        torch.testing.assert_close(logits[:, -1].clone(), model(ids).logits[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", sampled(("llama", "gemma3", "qwen3_next", "mamba2"), ("gemma3",)))
def test_a_compiled_model_goes_on_from_its_cache(name: str) -> None:
    """Storing stays outside of the graphs, whose shapes change while they are used."""
    import copy

    model, ids = copy.deepcopy(decoder(name)), text(40)
    torch._dynamo.reset()
    step, cache = torch.compile(model, backend="aot_eager"), StateCache(model)
    given = {cache_name(model): cache}
    with torch.inference_mode():
        model(ids[:, :20], **given, use_cache=True)
    with torch.no_grad():
        whole = model(ids).logits
        for at in range(20, 30):
            last = step(ids[:, at : at + 1], **given, use_cache=True).logits
        torch.testing.assert_close(last, whole[:, 29:30], atol=1e-4, rtol=1e-4)
        cache.rewind(to=22)
        last = step(ids[:, 22:], **given, use_cache=True).logits
    torch.testing.assert_close(last, whole[:, 22:], atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()
