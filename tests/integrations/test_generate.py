"""`generate` gives with a StateCache what it gives without one, in every way of generating."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, set_seed

from lmstate.integrations.transformers import StateCache
from tests.integrations.models import DECODERS, call, decoder, repetitive, text

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}
ROLLBACK = ("qwen3_next", "qwen3_5", "olmo_hybrid", "mamba2", "granitemoehybrid")


@pytest.mark.parametrize("name", DECODERS)
def test_every_way_gives_the_tokens_of_the_default_cache(name: str) -> None:
    model = decoder(name)
    padded = text(20, rows=2)
    padded[0, :7] = 0  # left padding, which generate finds by the pad token
    mask = (padded != 0).long()
    for way, settings in WAYS.items():
        for ids, given in ((text(20), {}), (padded, {"attention_mask": mask})):
            out = []
            for cache in (None, StateCache(model)):
                set_seed(0)
                chosen = {} if cache is None else {"past_key_values": cache}
                out.append(model.generate(ids, max_new_tokens=8, **settings, **given, **chosen))
            assert torch.equal(*out), way


@pytest.mark.parametrize("name", DECODERS)
def test_drafts_give_the_greedy_text_of_the_model_alone(name: str) -> None:
    model, ids = decoder(name), repetitive(40)
    alone = model.generate(ids, max_new_tokens=16, do_sample=False)
    cache = StateCache(model)
    looked_up = model.generate(
        ids, max_new_tokens=16, do_sample=False, prompt_lookup_num_tokens=4, past_key_values=cache
    )
    assert torch.equal(looked_up, alone)
    assisted = model.generate(
        ids, max_new_tokens=16, do_sample=False, assistant_model=decoder("llama"), past_key_values=StateCache(model)
    )
    assert torch.equal(assisted, alone)
    # The cache that was used goes on like any other.
    assert cache.get_seq_length() == alone.shape[1] - 1
    more = call(model, alone[:, -1:], cache)[:, -1]
    with torch.no_grad():
        torch.testing.assert_close(more, model(alone).logits[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ("mamba", "mamba2", "falcon_mamba", "qwen3_5"))
@pytest.mark.parametrize("settings", ({}, {"prompt_lookup_num_tokens": 4}), ids=("plain", "drafts"))
def test_a_cache_made_among_the_arguments_works_in_the_first_call(name: str, settings: dict[str, Any]) -> None:
    model, ids = decoder.__wrapped__(name), repetitive(40)  # a model that had no cache of ours yet
    out = model.generate(ids, past_key_values=StateCache(model), max_new_tokens=8, do_sample=False, **settings)
    assert torch.equal(out, model.generate(ids, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("name", ROLLBACK)
def test_going_back_feeds_only_the_accepted_tokens_and_counts_them(name: str) -> None:
    model, ids = decoder(name), text(20)
    cache = StateCache(model)
    cache.activate_past_recording()
    call(model, ids, cache)
    cache.crop(0)
    fed = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: fed.append(kwargs["input_ids"]), with_kwargs=True)
    call(model, text(5, seed=1), cache)
    cache.crop(-3)
    hook.remove()
    assert [x.shape[1] for x in fed] == [5, 2]
    assert torch.equal(fed[1], text(5, seed=1)[:, :2])
    assert cache.recomputed == 2 and cache.get_seq_length() == 22


def test_recurrent_models_refuse_drafts_without_our_cache() -> None:
    model = decoder("qwen3_next")
    StateCache(model)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(repetitive(40), max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=4)
    assert type(model)._is_stateful and model._is_stateful


def test_a_cache_implementation_beside_our_cache_is_refused() -> None:
    for name in ("llama", "mamba", "qwen3_next"):
        model = decoder(name)
        with pytest.raises(ValueError, match="only one of the two"):
            model.generate(text(5), max_new_tokens=2, past_key_values=StateCache(model), cache_implementation="static")


@pytest.mark.parametrize("name", DECODERS)
def test_a_chat_goes_on_from_its_cache(name: str) -> None:
    model = decoder(name)
    cache = StateCache(model)
    first = model.generate(text(20), max_new_tokens=6, do_sample=False, past_key_values=cache)
    second = torch.cat([first, text(9, seed=4)], dim=1)
    # A random model also says the pad token, and it is no padding here.
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(second)}
    out = model.generate(second, past_key_values=cache, **settings)
    assert torch.equal(out, model.generate(second, **settings))


@pytest.mark.parametrize("name", ("llama", "gemma3", "qwen3_next", "falcon_h1", "lfm2"))
def test_the_same_prompt_again_is_new_text_unless_the_cache_is_rewound(name: str) -> None:
    model, ids = decoder(name), text(25)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    ours, theirs = StateCache(model), DynamicCache(config=model.config)
    first, again = (
        [model.generate(ids, past_key_values=cache, **settings) for cache in (ours, theirs)] for _ in range(2)
    )
    assert torch.equal(*first) and torch.equal(*again)
    ours.rewind(to=20)
    for seed in (1, 2):  # two prompts that share their beginning
        other = torch.cat([ids[:, :20], text(9, seed=seed)], dim=1)
        settings["attention_mask"] = torch.ones_like(other)
        out = model.generate(other, past_key_values=ours, **settings)
        assert torch.equal(out, model.generate(other, **settings))
        ours.rewind(to=20)


@pytest.mark.parametrize("name", ("llama", "gemma3", "qwen3_next", "lfm2"))
def test_prefill_in_chunks_gives_the_same_text(name: str) -> None:
    model, ids = decoder(name), text(40)
    cache = StateCache(model)
    out = model.generate(ids, max_new_tokens=6, do_sample=False, past_key_values=cache, prefill_chunk_size=7)
    assert torch.equal(out, model.generate(ids, max_new_tokens=6, do_sample=False))
