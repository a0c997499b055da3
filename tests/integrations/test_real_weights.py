"""SmolLM2-135M itself, where its GGUF file is at hand: LMSTATE_SMOLLM2 names it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lmstate.integrations.transformers import StateCache

PATH = Path(os.environ.get("LMSTATE_SMOLLM2", "absent"))


@pytest.mark.skipif(not PATH.is_file(), reason="LMSTATE_SMOLLM2 names no file")
def test_smollm2_says_the_same_with_every_cache_and_attention(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: dict[str, Any] = {"gguf_file": PATH.name}
    tokenizer = AutoTokenizer.from_pretrained(PATH.parent, **given)
    model = AutoModelForCausalLM.from_pretrained(PATH.parent, **given).eval()
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
