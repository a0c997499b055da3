"""Reads DFlash drafters, as z-lab publishes them, and DSpark's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.renamed import Renamed
from lmstate.checkpoints.source import Source
from lmstate.errors import ModelError
from lmstate.models.block import Block
from lmstate.models.families import builders as b
from lmstate.models.heads.block_head import Chained
from lmstate.models.heads.dflash import DFlashHead
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import make_rope
from lmstate.models.mapped import moved

if TYPE_CHECKING:
    from lmstate.models.model import Model

DFLASH, DSPARK = "DFlashDraftModel", ("DSparkDraftModel", "Qwen3DSparkModel")
ARCHITECTURES = (DFLASH, *DSPARK)
FULL, SLIDING = "full_attention", "sliding_attention"
MOST_BLOCK, MOST_RANK = 256, 2**16


OF_THE_MODEL = ("embed_tokens.weight", "lm_head.weight", "confidence_head.proj.*")
# Fields that DSpark has outside of `dflash_config`.
BLOCK_FIELDS = ("mask_token_id", "target_layer_ids", "causal")


def with_dflash(model: Model, opened: Source, loader: Callable[..., WeightLoader]) -> Model:
    """The model with a drafter to draft with. Raises `ModelError` for a damaged one, or another's."""
    w = loader(Renamed(opened, [(name, name) for name in opened.names()], opened.config))
    config, shape = w.config, b.Dims.of(w.config)
    inside = config.fields("dflash_config") or Config({}, config.where)
    if shape.hidden != model.config.hidden_size:
        raise ModelError(
            f"{opened.path} drafts for a model {shape.hidden} wide; this one is {model.config.hidden_size} wide"
        )
    dspark = not set(DSPARK).isdisjoint(config.strs("architectures"))
    inside = Config({name: config[name] for name in BLOCK_FIELDS if config.given(name)} | {**inside}, config.where)
    windows, causal = _sights(config, inside, shape.layers)
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
            shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, rope, windows[index],
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
        config.int("block_size", low=1 if dspark else 2, high=MOST_BLOCK), mask, causal,
        _chained(w, shape, model.config.vocab_size) if dspark else None,
    )  # fmt: skip
    # Copies of the model's embedding and head, with which it was trained; and a part that may be switched off.
    w.check_all_used(["*.rotary_emb.inv_freq", *(OF_THE_MODEL if dspark else ())])
    heads = (moved(head, model.output_device),)
    return replace(model, network=replace(model.network, heads=heads), _fingerprint=None)


def _sights(config: Config, inside: Config, layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """The window of each layer, and whether it is causal inside a block: those that the layer types give one are."""
    given = config.strs("layer_types", layers, (FULL, SLIDING), default=None)
    kinds, every = given or (FULL,) * layers, inside.bool("use_swa", default=False)
    windows: tuple[int | None, ...] = (None,) * layers
    if every or SLIDING in kinds:
        size = config.int("sliding_window", low=1, default=inside.int("swa_window_size", low=1, default=None))
        if size is None:
            raise ModelError(f"{config.where} has layers with a window, and does not say how long it is")
        windows = tuple(size if every or kind == SLIDING else None for kind in kinds)
    said = inside.bool("causal", default=config.bool("is_causal", default=None))
    return windows, tuple(kind == SLIDING if said is None else said for kind in kinds)


def _chained(w: WeightLoader, shape: b.Dims, vocab: int) -> Chained:
    """DSpark's part that reads the token before."""
    config, names = w.config, ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    config.str("markov_head_type", allowed=("vanilla",), default="vanilla")
    rank = config.int("markov_rank", low=1, high=MOST_RANK)
    before, after = (w.linear(name, shape=(vocab, rank)) for name in names)
    if not w.has("confidence_head.proj.weight") or not config.bool("enable_confidence_head", default=True):
        return Chained(before, after)
    alone = not config.bool("confidence_head_with_markov", default=True)
    width = shape.hidden + (0 if alone else rank)
    sure = w.linear("confidence_head.proj.weight", shape=(1, width))
    return Chained(before, after, sure, w.tensor("confidence_head.proj.bias", (1,), optional=True), alone)


def _taps(config: Config, inside: Config, layers: int, blocks: int) -> tuple[int, ...]:
    """The numbers of blocks after which the stream is read, counted from 1."""
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
