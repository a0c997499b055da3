"""Read a prompt once, continue it several ways, keep it on disk: a StateCache in place of transformers' own cache."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmstate.integrations.transformers import StateCache

name = "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)

prompt = tokenizer("The capital of France is Paris . The capital of Italy", return_tensors="pt").input_ids
cache = StateCache(model)
with torch.no_grad():
    model(prompt[:, :-1], past_key_values=cache)  # all but the last, which generate feeds
cache.save("prompt.safetensors")

for seed in range(3):
    torch.manual_seed(seed)
    fork = StateCache.load("prompt.safetensors", model) if seed == 2 else cache.fork()
    text = model.generate(prompt, past_key_values=fork, max_new_tokens=12, do_sample=True)
    print(f"{seed}:", tokenizer.decode(text[0, prompt.shape[1] :]))
print("the prompt's own cache still holds", cache.get_seq_length(), "tokens")
