"""Phi-3, Phi-4-mini and Phi-4-multimodal: Llama's block with projections fused in the checkpoint, and LongRoPE.

x = embed(tokens)
x = x + attention(norm(x))
x = x + down(silu(gate(y)) * up(y))    # y = norm(x)
logits = head(norm(x))

Phi-4-multimodal answers texts with the weights of its base alone. The adapters for pictures and sounds that are beside
them, and the towers, are left out.
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

_MULTIMODAL = {**b.EPS, "num_key_value_heads": 8, "original_max_position_embeddings": 4096}
DEFAULTS: b.Defaults = {"phi3": b.EPS, "phi4_multimodal": _MULTIMODAL, "phi4mm": _MULTIMODAL}
NOT_TEXT = ("model.embed_tokens_extend.*", "*.lora_A.*", "*.lora_B.*")


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    window = config.int("sliding_window", low=1, default=None)
    rope = make_rope(config, shape.head_dim).to(w.device)
    seeing = config.str("model_type") != "phi3"
    # In the published files of Phi-4-multimodal, adapters wrap the base.
    inside = ".base_layer" if w.has("model.layers.0.self_attn.qkv_proj.base_layer.weight") else ""
    block = b.pre_norm(
        b.rms_norms(w, shape),
        lambda _, name: b.fused_attention(
            w, shape, rope, f"{name}.qkv_proj{inside}", f"{name}.o_proj{inside}", window=window
        ),
        lambda _, name: b.fused_mlp(w, name, shape.hidden, inner, act, inside),
    )
    return b.decoder(w, shape, block, ignore=NOT_TEXT if seeing else ())
