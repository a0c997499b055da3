"""Llama's blocks whose heads and widths differ from layer to layer, of which some have no attention: DeciLM, Nemotron
made by search, and OpenELM, as their GGUF has them."""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.block import Block
from lmstate.models.families.builders.attention import attention, fused_attention
from lmstate.models.families.builders.decoder import decoder
from lmstate.models.families.builders.dims import MAX_SIZE, Dims
from lmstate.models.families.builders.mlp import activation, mlp
from lmstate.models.families.builders.norms import norm, rms_norms
from lmstate.models.layers.identity import Identity
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model


def uneven_llama(w: WeightLoader) -> Model:
    """A decoder whose config gives heads, heads of keys and widths by layer; a layer with none of them is left out."""
    config, shape = w.config, Dims.of(w.config)
    heads, kv_heads = (
        config.ints(f"{name}_by_layer", shape.layers, 0, MAX_SIZE)
        for name in ("num_attention_heads", "num_key_value_heads")
    )
    inner, act = config.ints("intermediate_size_by_layer", shape.layers, 0, MAX_SIZE), activation(config)
    rope, normed = make_rope(config, shape.head_dim).to(w.device), rms_norms(w, shape)
    kept = [index for index in range(shape.layers) if heads[index] or inner[index]]
    for index in kept:
        own, theirs = heads[index], kv_heads[index]
        if not inner[index] or bool(own) != bool(theirs) or (own and own % theirs):
            raise ModelError(
                f"{config.where}: layer {index} has {own} heads over {theirs} of keys and a width of {inner[index]}, "
                f"which lmstate cannot run"
            )

    def block(position: int) -> Block:
        index = kept[position]
        layer = f"model.layers.{index}"
        feeding = mlp(w, f"{layer}.mlp", shape.hidden, inner[index], act)
        second = normed(f"{layer}.post_attention_layernorm")
        if not heads[index]:
            return Block(Identity(), feeding, mlp_norm=second)
        name, own = f"{layer}.self_attn", replace(shape, heads=heads[index], kv_heads=kv_heads[index])
        if w.has(f"{name}.qkv_proj.weight"):
            mixer = fused_attention(w, own, rope, f"{name}.qkv_proj", f"{name}.o_proj")
            q_norm, k_norm = (norm(w, f"{name}.{part}_norm.weight", shape.head_dim, shape.eps) for part in "qk")
            mixer = replace(mixer, q_norm=q_norm, k_norm=k_norm)
        else:
            mixer = attention(w, name, own, rope)
        return Block(mixer, feeding, normed(f"{layer}.input_layernorm"), second)

    return decoder(w, replace(shape, layers=len(kept)), block)
