"""Falcon (2311.16867): few keys and values, and attention and feed-forward side by side after one layer norm or two.

x = embed(tokens)
y, z = norm(x), norm'(x)    # 7B: the same
x = x + attention(y) + down(gelu(up(z)))
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {
    "falcon": {"layer_norm_epsilon": 1e-5, "multi_query": True, "parallel_attn": True, "tie_word_embeddings": True}
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config, eps="layer_norm_epsilon")
    if config.bool("alibi", default=False):
        raise ModelError(f"{config.where} asks for ALiBi, which lmstate does not do for Falcon")
    grouped = config.bool("new_decoder_architecture", default=False)
    together = config.bool("qkv_grouped", default=True)  # not in a GGUF
    parallel = config.bool("parallel_attn", default=True)
    if grouped and not parallel:
        raise ModelError(f"{config.where} asks for Falcon's new architecture one part after the other; there is none")
    kv_heads = shape.heads
    if grouped:
        kv_heads = config.int("num_kv_heads", low=1, high=b.MAX_SIZE, default=shape.heads)
    elif config.bool("multi_query", default=True):
        kv_heads = 1
    shape = replace(shape, kv_heads=kv_heads)
    two_norms = grouped and config.int("num_ln_in_parallel_attn", low=1, high=2, default=2) == 2
    inner = config.int("ffn_hidden_size", low=1, high=b.MAX_SIZE, default=4 * shape.hidden)
    act, biased = b.activation(config, "activation", "gelu"), config.bool("bias", default=False)
    rope, normed = make_rope(config, shape.head_dim).to(w.device), b.layer_norms(w, shape)

    def block(index: int) -> Block:
        layer = f"transformer.h.{index}"
        inside = f"{layer}.self_attention"
        first = normed(f"{layer}.{'ln_attn' if two_norms else 'input_layernorm'}")
        second = first
        if two_norms or not parallel:
            name = f"{layer}.{'ln_mlp' if two_norms else 'post_attention_layernorm'}.weight"
            second = normed(b.first_present(w, name, f"{layer}.input_layernorm.weight").removesuffix(".weight"))
        return Block(
            b.fused_attention(
                w, shape, rope, f"{inside}.query_key_value", f"{inside}.dense", grouped=together, biased=biased
            ),
            b.ungated_mlp(w, f"{layer}.mlp", shape.hidden, inner, act, ("dense_h_to_4h", "dense_4h_to_h"), biased),
            first,
            second,
            parallel=parallel,
        )

    return b.decoder(
        w, shape, block, embed="transformer.word_embeddings", final_norm=normed("transformer.ln_f")
    )  # fmt: skip
