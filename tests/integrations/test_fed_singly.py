"""Models that transformers gets wrong for several tokens after others: fed one by one, with the whole's outputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModel

from lmstate.errors import UnsupportedError
from lmstate.integrations.transformers import StateCache
from lmstate.integrations.transformers.cache.hooks import cache_name
from tests.integrations.models import call, decoder, text

SINGLY = ("jamba", "mamba", "falcon_mamba")


def run(model: Any, ids: torch.Tensor, cache: StateCache, **more: Any) -> Any:
    with torch.no_grad():
        return model(ids, **{cache_name(model): cache}, use_cache=True, **more)


@pytest.mark.parametrize("name", SINGLY)
@pytest.mark.parametrize("recording", (False, True))
def test_hidden_states_are_those_of_all_tokens(name: str, recording: bool) -> None:
    model, ids = decoder(name), text(26, rows=2)
    cache = StateCache(model)
    if recording:
        cache.activate_past_recording()
    with torch.no_grad():
        whole = model(ids, output_hidden_states=True)
    run(model, ids[:, :20], cache)
    given = run(model, ids[:, 20:], cache, output_hidden_states=True)
    torch.testing.assert_close(given.logits, whole.logits[:, 20:], atol=1e-4, rtol=1e-4)
    assert len(given.hidden_states) == len(whole.hidden_states)
    for part, all_ in zip(given.hidden_states, whole.hidden_states):
        torch.testing.assert_close(part, all_[:, 20:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ("jamba", "falcon_mamba"))
def test_as_many_logits_as_asked_for_and_a_draft_can_be_taken_back(name: str) -> None:
    model, ids = decoder(name), text(26)
    with torch.no_grad():
        whole = model(ids).logits
    for kept in (1, 3):
        cache = StateCache(model)
        cache.activate_past_recording()
        run(model, ids[:, :20], cache)
        cache.crop(0)
        given = run(model, ids[:, 20:], cache, logits_to_keep=kept, output_hidden_states=True)
        torch.testing.assert_close(given.logits, whole[:, -kept:], atol=1e-4, rtol=1e-4)
        cache.crop(-4)
        assert cache.recomputed == 2
        torch.testing.assert_close(call(model, ids[:, 22:], cache), whole[:, 22:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SINGLY)
def test_outputs_that_single_tokens_do_not_give_are_refused_before_anything_is_fed(name: str) -> None:
    model, ids = decoder(name), text(26)
    cache = StateCache(model)
    run(model, ids[:, :20], cache)
    for more in ({"labels": ids[:, 20:]}, {"output_attentions": True}, {"return_dict": False}):
        with pytest.raises(UnsupportedError, match=next(iter(more))):
            run(model, ids[:, 20:], cache, **more)
        assert cache.get_seq_length() == 20
    with torch.no_grad():
        torch.testing.assert_close(call(model, ids[:, 20:], cache), model(ids).logits[:, 20:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SINGLY)
def test_models_without_a_head_give_all_hidden_states(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(copy.deepcopy(decoder(name).config)).eval()
    ids = text(26, rows=2)
    cache = StateCache(model)
    with torch.no_grad():
        whole = model(ids).last_hidden_state
    run(model, ids[:, :20], cache)
    given = run(model, ids[:, 20:], cache).last_hidden_state
    torch.testing.assert_close(given, whole[:, 20:], atol=1e-4, rtol=1e-4)
    cache.rewind(to=23)
    given = run(model, ids[:, 23:], cache).last_hidden_state
    torch.testing.assert_close(given, whole[:, 23:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SINGLY)
@pytest.mark.parametrize("at", (1, 4, 6))
def test_a_failed_call_leaves_the_cache_as_it_was(name: str, at: int) -> None:
    model, ids = decoder(name), text(26)
    cache = StateCache(model)
    run(model, ids[:, :20], cache)
    with torch.no_grad():
        whole = model(ids).logits
    layers = next(x for x in model.modules() if isinstance(x, torch.nn.ModuleList) and len(x) == len(cache))
    seen = 0

    def fail(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            raise RuntimeError("injected")

    hook = layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="injected"):
        run(model, ids[:, 20:], cache)
    hook.remove()
    assert cache.get_seq_length() == 20
    torch.testing.assert_close(call(model, ids[:, 20:], cache), whole[:, 20:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ("llama", "qwen3_next", "falcon_mamba"))
def test_an_interrupted_call_does_not_count(name: str) -> None:
    model, ids = decoder(name), text(26)
    cache = StateCache(model)
    with torch.no_grad():
        whole = model(ids).logits
    layers = next(x for x in model.modules() if isinstance(x, torch.nn.ModuleList) and len(x) == len(cache))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for length in (0, 20):
        if length:
            run(model, ids[:, :length], cache)
        hook = layers[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model, ids[:, length:], cache)
        hook.remove()
        assert cache.get_seq_length() == length
    if name == "qwen3_next":
        cache.reset()
        length = 0
    torch.testing.assert_close(call(model, ids[:, length:], cache), whole[:, length:], atol=1e-4, rtol=1e-4)
