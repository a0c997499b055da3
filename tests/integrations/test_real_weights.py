"""SmolLM2-135M itself."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lmstate.integrations.transformers import StateCache, use_native_linear
from tests import real_model


def smollm2() -> tuple[Any, Any]:
    """A model that a test may change, and the tokenizer."""
    model, tokenizer = read()
    return copy.deepcopy(model), tokenizer


@cache
def read() -> tuple[Any, Any]:
    """Through our own reader: transformers' wants another package for it."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from lmstate.checkpoints.loader import WeightLoader
    from lmstate.checkpoints.open import open_source

    path = real_model.smollm2()
    source = open_source(path)
    weights = WeightLoader(source, "float32")
    model = LlamaForCausalLM(LlamaConfig(**source.config)).eval()
    tensors = {
        name: weights.linear(name).dequantize() if len(source.shape(name)) == 2 else weights.tensor(name)
        for name in source.names()
    }
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_smollm2_says_the_same_with_every_cache_and_attention(tmp_path: Path) -> None:
    model, tokenizer = smollm2()
    prompts = ["The capital of France is", "One, two, three, one, two, three, one, two,"]
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    expected = model.generate(**batch, **settings)
    assert "Paris" in tokenizer.decode(expected[0])
    assert torch.equal(model.generate(**batch, **settings, past_key_values=StateCache(model)), expected)
    one = tokenizer(prompts[1], return_tensors="pt")
    alone = model.generate(**one, **settings)
    cache = StateCache(model)
    assert torch.equal(model.generate(**one, **settings, past_key_values=cache, prompt_lookup_num_tokens=4), alone)
    cache.save(tmp_path / "cache")
    loaded = StateCache.load(tmp_path / "cache", model)
    loaded.rewind(to=5)
    assert torch.equal(model.generate(**one, **settings, past_key_values=loaded), alone)
    model.set_attn_implementation("lmstate")
    assert torch.equal(model.generate(**batch, **settings, past_key_values=StateCache(model)), expected)
    assert torch.equal(model.generate(**one, **settings, past_key_values=StateCache(model)), alone)


def test_smollm2_says_the_same_for_100_tokens_with_native_products() -> None:
    model, tokenizer = smollm2()
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    settings: dict[str, Any] = {"max_new_tokens": 100, "do_sample": False}
    expected = model.generate(**prompt, **settings)
    assert use_native_linear(model) == 7 * 30 + 1
    assert torch.equal(model.generate(**prompt, **settings), expected)
    model.set_attn_implementation("lmstate")
    assert torch.equal(model.generate(**prompt, **settings, past_key_values=StateCache(model)), expected)
