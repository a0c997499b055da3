"""Reads DFlash drafters, as z-lab publishes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.renamed import Renamed
from lmstate.errors import ModelError
from lmstate.models.block import Block
from lmstate.models.families import builders as b
from lmstate.models.heads.dflash import DFlashHead
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import make_rope
from lmstate.models.mapped import moved

if TYPE_CHECKING:
    from lmstate.models.model import Model

ARCHITECTURE = "DFlashDraftModel"
MOST_BLOCK = 256


def with_dflash(model: Model, folder: Path, loader: Callable[..., WeightLoader]) -> Model:
    """The model with the drafter in a folder to draft with. Raises `ModelError` for a damaged one, or another's."""
    from lmstate.checkpoints.huggingface.directory import CheckpointFolder

    opened = CheckpointFolder(folder)
    w = loader(Renamed(opened, [(name, name) for name in opened.names()], opened.config))
    config, shape = w.config, b.Dims.of(w.config)
    inside = config.fields("dflash_config") or Config({}, config.where)
    if shape.hidden != model.config.hidden_size:
        raise ModelError(
            f"{folder} drafts for a model {shape.hidden} wide; this one is {model.config.hidden_size} wide"
        )
    kinds = config.strs("layer_types", shape.layers, ("full_attention", "sliding_attention"), default=None) or ()
    if "sliding_attention" in kinds or inside.bool("use_swa", default=False) or inside.bool("causal", default=False):
        raise ModelError(f"{folder} has layers with windows or a causal block, which lmstate does not draft with")
    mask = inside.int("mask_token_id", low=0, high=model.config.vocab_size - 1)
    taps = _taps(config, inside, shape.layers, len(model.blocks))
    normed, act = b.rms_norms(w, shape), b.activation(config)
    inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE)
    rope = make_rope(config, shape.head_dim).to(w.device)
    biased = config.bool("attention_bias", default=False)
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def block(index: int) -> Block:
        layer, name = f"layers.{index}", f"layers.{index}.self_attn"
        attention = Attention(
            w.linear(
                *(f"{name}.{part}_proj.weight" for part in "qkv"), shape=((width, kv_width, kv_width), shape.hidden)
            ),
            w.linear(f"{name}.o_proj.weight", shape=(shape.hidden, width)),
            shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, rope,
            q_norm=b.norm(w, f"{name}.q_norm.weight", shape.head_dim, shape.eps),
            k_norm=b.norm(w, f"{name}.k_norm.weight", shape.head_dim, shape.eps),
            qkv_bias=b.biases(w, *(f"{name}.{part}_proj.bias" for part in "qkv"), wanted=biased),
            out_bias=b.biases(w, f"{name}.o_proj.bias", wanted=biased),
        )  # fmt: skip
        return Block(
            attention, b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act), normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
        )  # fmt: skip

    head = DFlashHead(
        taps, w.linear("fc.weight", shape=(shape.hidden, len(taps) * shape.hidden)), normed("hidden_norm"),
        tuple(map(block, range(shape.layers))), normed("norm"), model.embed, model.config.embed_scale, model.head,
        config.int("block_size", low=2, high=MOST_BLOCK), mask,
    )  # fmt: skip
    w.check_all_used(["*.rotary_emb.inv_freq"])
    heads = (moved(head, model.output_device),)
    return replace(model, network=replace(model.network, heads=heads), _fingerprint=None)


def _taps(config: Config, inside: Config, layers: int, blocks: int) -> tuple[int, ...]:
    """The numbers of blocks behind which the stream is read, counted from 1."""
    if inside.given("target_layer_ids"):
        chosen = list(inside.ints("target_layer_ids"))
    elif layers == 1:
        chosen = [blocks // 2]
    else:
        first, last = 1, blocks - 3
        chosen = [round(first + index * (last - first) / (layers - 1)) for index in range(layers)]
    taps = tuple(index + 1 for index in chosen)
    if not taps or sorted(set(taps)) != list(taps) or not 0 < taps[0] <= taps[-1] <= blocks:
        raise ModelError(f"{config.where} reads the stream behind blocks {list(chosen)}, of a model of {blocks}")
    return taps
