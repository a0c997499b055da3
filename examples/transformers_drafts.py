"""Prompt lookup on models with recurrent layers, which transformers refuses with its own cache."""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmstate.integrations.transformers import StateCache

name = "Qwen/Qwen3.5-0.8B"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)

prompt = tokenizer("one two three one two three one two three one", return_tensors="pt").input_ids
begun = time.perf_counter()
alone = model.generate(prompt, max_new_tokens=32, do_sample=False)
between = time.perf_counter()
cache = StateCache(model)
drafted = model.generate(prompt, max_new_tokens=32, do_sample=False, prompt_lookup_num_tokens=4, past_key_values=cache)
ended = time.perf_counter()

print(tokenizer.decode(drafted[0]))
print("the same text:", torch.equal(drafted, alone))
print(f"alone {between - begun:.2f} s, with drafts {ended - between:.2f} s")
print(cache.recomputed, "tokens were fed a second time")
