"""Gemma 2 (2408.00118) and Gemma 3 (2503.19786): norms before and after each part, windows on most layers.

    x = embed(tokens) * sqrt(E)
    x = x + post_norm(attention(norm(x)))    # VaultGemma (2510.15001) has no norms after its parts
    x = x + post_norm(mlp(norm(x)))
    logits = softcap(head(norm(x)))

Gemma 2 caps the logits of its attention and its output. Gemma 3 normalizes queries and keys instead, its windowed
layers rotate faster than its full ones, and the tokens of a picture see all of it.
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope, ropes_by_kind
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {
    "gemma2": {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "vaultgemma": {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}


def build(w: WeightLoader) -> Model:
    family = w.config.str("model_type")
    third, post_normed = family == "gemma3_text", family != "vaultgemma"
    config, shape = w.config, b.Dims.of(w.config)
    if config.bool("use_bidirectional_attention", default=False):
        raise ModelError(f"{config.where} asks for attention in both directions; only causal models are supported")
    whole = third or config.bool("whole_pictures", default=False)  # which PaliGemma says of a text model of Gemma 2
    inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE)
    act = b.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    window = b.layer_windows(config, shape.layers, full_every=6 if third else 2)
    if third:
        full, local = (
            rope.to(w.device) for rope in ropes_by_kind(config, shape.head_dim, theta=1_000_000.0, local_theta=10_000.0)
        )
    else:
        full = local = make_rope(config, shape.head_dim).to(w.device)
    scale = config.float("query_pre_attn_scalar", low=1e-6, default=256.0) ** -0.5
    softcap = config.float("attn_logit_softcapping", low=1e-6, default=None) if not third else None

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        norms = {
            name: b.norm(w, f"{layer}.{name}_layernorm.weight", shape.hidden, shape.eps, plus_one=True)
            for name in ("input", "pre_feedforward", *(("post_attention", "post_feedforward") if post_normed else ()))
        }
        q_norm, k_norm = (
            b.norm(w, f"{layer}.self_attn.{part}_norm.weight", shape.head_dim, shape.eps, plus_one=True)
            if third
            else None
            for part in "qk"
        )
        mixer = b.attention(
            w, f"{layer}.self_attn", shape, full if window[index] is None else local,
            window=window[index], q_norm=q_norm, k_norm=k_norm, scale=scale, softcap=softcap,
            whole_pictures=whole, beyond_window=whole,
        )  # fmt: skip
        return Block(
            mixer,
            b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            norms["input"],
            norms["pre_feedforward"],
            norms.get("post_attention"),
            norms.get("post_feedforward"),
        )

    return b.decoder(
        w,
        shape,
        block,
        final_norm=b.norm(w, "model.norm.weight", shape.hidden, shape.eps, plus_one=True),
        embed_scale=shape.hidden**0.5,
        logit_softcap=config.float("final_logit_softcapping", low=1e-6, default=None),
    )
