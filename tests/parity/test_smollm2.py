"""The default model's real weights, in float32 arithmetic, against transformers on the same numbers."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import lmstate
from tests import real_model
from tests.sweeps import sampled

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def ours() -> lmstate.Model:
    return lmstate.load(real_model.smollm2(), weights="float32")


@lru_cache(maxsize=1)
def theirs() -> Any:
    """Read and dequantized by the `gguf` package; queries and keys put back into the order that Hugging Face has."""
    import gguf
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(str(real_model.smollm2()))
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    weights = {}
    for tensor in reader.tensors:
        numbers = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = tensor.name.removesuffix(".weight")
        if name == "token_embd":
            weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = numbers
        elif name == "output_norm":
            weights["model.norm.weight"] = numbers
        else:
            _, layer, part = name.split(".")
            if part in ("attn_q", "attn_k"):
                numbers = numbers.view(-1, 32, 2, 576).transpose(1, 2).reshape(-1, 576)
            weights[f"model.layers.{layer}.{names[part]}.weight"] = numbers
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(weights)
    return model


def test_logits_over_a_text_equal_transformers() -> None:
    ids = ours().tokenizer.encode(TEXT)[:600]
    assert len(ids) == 600
    with torch.no_grad():
        expected = theirs()(torch.tensor([ids])).logits
    torch.testing.assert_close(ours()([ids]), expected, atol=1e-3, rtol=0)
    state = ours().new_state()
    cut = [ours()([ids[a : a + 100]], state, logits="all") for a in range(0, 600, 100)]
    torch.testing.assert_close(torch.cat(cut, 1), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("prompt", sampled(["Once upon a time", "def fibonacci(n):"], ["Once upon a time"]))
def test_a_hundred_greedy_tokens_equal_transformers(prompt: str) -> None:
    ids = ours().tokenizer.encode(prompt)
    with torch.no_grad():
        expected = theirs().generate(
            torch.tensor([ids]), max_new_tokens=100, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()  # fmt: skip
    state, tokens = ours().new_state(), list(ids)
    logits = ours()([ids], state)
    for _ in range(100):
        tokens.append(int(logits.argmax()))
        logits = ours()([tokens[-1:]], state)
    assert tokens == expected
