"""Heads that are published apart from the model they draft for: EAGLE-3, as SpecForge and its peers save it,
Gemma 4's assistants, DFlash and DSpark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.hub import cache_dir
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_cached
from lmstate.checkpoints.renamed import Renamed
from lmstate.checkpoints.source import IntegerSource
from lmstate.errors import ModelError
from lmstate.files.json_object import read_object
from lmstate.models.families import builders as b
from lmstate.models.heads.eagle3 import Eagle3Block, Eagle3Head
from lmstate.models.heads.published_assistant import TYPES, with_assistant
from lmstate.models.heads.published_dflash import ARCHITECTURES, with_dflash
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import make_rope
from lmstate.models.mapped import moved
from lmstate.ops import Weight

if TYPE_CHECKING:
    from lmstate.models.model import Model

LAYER = "model.layers.0"
BLOCK_NAMES = ("midlayer.", "layers.0.", "model.layers.0.")
MAPS = ("d2t", "t2d")
"""From the head's tokens to the model's, as differences, and which of the model's tokens the head knows."""


def is_published_head(path: Path) -> bool:
    """Whether a folder or a .gguf file holds a head that `with_head` reads."""
    if path.suffix == ".gguf" and path.is_file():
        return is_drafter(open_cached(path, cache_dir()).config)
    config = path / "config.json"
    return config.is_file() and is_drafter(read_object(config))


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a head that was published apart from its model."""
    return _is_assistant(config) or _is_dflash(config) or _is_eagle3(config)


def _is_assistant(values: Mapping[str, Any]) -> bool:
    name = values.get("model_type")
    return isinstance(name, str) and name in TYPES


def _is_dflash(values: Mapping[str, Any]) -> bool:
    names = values.get("architectures")
    return isinstance(names, list) and any(name in ARCHITECTURES for name in names)


def _is_eagle3(values: Mapping[str, Any]) -> bool:
    names = values.get("architectures")
    said = [values.get("speculators_model_type"), *(names if isinstance(names, list) else [])]
    return any(isinstance(name, str) and "eagle3" in name.lower() for name in said)


def with_head_at(model: Model, path: Path, weights: str) -> Model:
    """`with_head`, whose matrices are in a storage, computing as the model does."""
    dtype, device = model.dtype, model.output_device
    return with_head(model, path, lambda source: WeightLoader(source, weights, dtype, device, cache_dir()))


def with_head(model: Model, path: Path, loader: Callable[..., WeightLoader]) -> Model:
    """The model with the head in a folder or a .gguf file to draft with; `loader` makes a `WeightLoader` of a source.

    Raises `ModelError` for a path that holds no such head, a damaged one, or one for another model.
    """
    if not is_published_head(path):
        raise ModelError(
            f"{path} holds no head that lmstate can draft with: its config names no EAGLE-3 architecture, no DFlash "
            "or DSpark drafter and no assistant of Gemma 4. Give a smaller model as draft instead, or heads=True for "
            "the checkpoint's own heads"
        )
    opened = _opened(path)
    if _is_assistant(opened.config):
        return with_assistant(model, opened, loader)
    if _is_dflash(opened.config):
        return with_dflash(model, opened, loader)
    pairs = [(_plain(name), name) for name in opened.names() if name not in MAPS]
    config = opened.config.get("transformer_layer_config")
    config = {**opened.config, **config} if isinstance(config, dict) else opened.config
    w = loader(Renamed(opened, pairs, config))
    w.config = b.completed(w.config, {"rms_norm_eps": 1e-6, "num_hidden_layers": 1})
    tokens = None
    known = w.config.int("draft_vocab_size", low=1, high=2**24, default=model.config.vocab_size)
    if "d2t" in opened.names():
        tokens = opened.integers("d2t")
        if tokens.shape != (known,):
            raise ModelError(f"{path}: 'd2t' has the shape {list(tokens.shape)}, and the head knows {known} tokens")
        tokens = tokens + torch.arange(known)
        if int(tokens.min()) < 0 or int(tokens.max()) >= model.config.vocab_size:
            raise ModelError(f"{path}: 'd2t' names tokens past the model's vocabulary of {model.config.vocab_size}")
        if len(tokens.unique()) != known:
            raise ModelError(f"{path}: 'd2t' names a token twice; the file is damaged")
        tokens = tokens.to(model.output_device)
    elif known != model.config.vocab_size:
        raise ModelError(f"{path} knows {known} tokens, of the model's {model.config.vocab_size}, and lacks 'd2t'")
    heads = (moved(_head(w, model, tokens, known), model.output_device),)
    return replace(model, network=replace(model.network, heads=heads), _fingerprint=None)


def _opened(path: Path) -> IntegerSource:
    from lmstate.checkpoints.gguf.source import GgufSource
    from lmstate.checkpoints.huggingface.directory import CheckpointFolder

    if path.suffix != ".gguf":
        return CheckpointFolder(path)
    source = open_cached(path, cache_dir())
    assert isinstance(source, GgufSource)
    return source


def _head(w: WeightLoader, model: Model, tokens: Tensor | None, known: int) -> Eagle3Head:
    config, shape = w.config, b.Dims.of(w.config)
    if shape.layers != 1:
        raise ModelError(f"{config.where} has {shape.layers} layers; lmstate reads EAGLE-3 heads of one")
    embed = model.embed
    if w.has("model.embed_tokens.weight"):
        embed = w.linear("model.embed_tokens.weight", shape=(model.config.vocab_size, shape.hidden))
    elif model.config.hidden_size != shape.hidden:
        raise ModelError(
            f"{config.where} is {shape.hidden} wide and has no embedding, and the model is {model.config.hidden_size} "
            "wide: it was made for another model"
        )
    width, inner = shape.heads * shape.head_dim, config.int("intermediate_size", low=1, high=b.MAX_SIZE)
    kv_width, name, normed = shape.kv_heads * shape.head_dim, f"{LAYER}.self_attn", b.rms_norms(w, shape)
    biased = config.bool("attention_bias", default=False)
    attention = Attention(
        w.linear(
            *(f"{name}.{part}_proj.weight" for part in "qkv"), shape=((width, kv_width, kv_width), 2 * shape.hidden)
        ),
        w.linear(f"{name}.o_proj.weight", shape=(shape.hidden, width)),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim**-0.5,
        make_rope(config, shape.head_dim).to(w.device),
        qkv_bias=b.biases(w, *(f"{name}.{part}_proj.bias" for part in "qkv"), wanted=biased),
        out_bias=b.biases(w, f"{name}.o_proj.bias"),
    )
    block = Eagle3Block(
        attention,
        b.mlp(w, f"{LAYER}.mlp", shape.hidden, inner, b.activation(config)),
        normed(f"{LAYER}.input_layernorm"),
        normed(f"{LAYER}.post_attention_layernorm"),
        hidden_norm=normed(f"{LAYER}.hidden_norm"),
        adds_normed=_flag(config, "norm_before_residual"),
    )
    fused = 3 * model.config.hidden_size
    head = Eagle3Head(
        _taps(config, len(model.blocks)),
        w.linear("model.fc.weight", shape=(shape.hidden, fused)),
        (block,),
        normed("model.norm"),
        embed,
        _output(w, model, known, shape.hidden),
        model.config.vocab_size,
        tokens,
        b.norm(w, "model.input_norm.weight", fused, shape.eps) if _flag(config, "norm_before_fc") else None,
    )
    w.check_all_used(["*.rotary_emb.inv_freq"])
    return head


def _output(w: WeightLoader, model: Model, known: int, hidden: int) -> Weight:
    """The head's own output matrix; the model's where the head has none."""
    if w.has("lm_head.weight") or (known, hidden) != (model.config.vocab_size, model.config.hidden_size):
        return w.linear("lm_head.weight", shape=(known, hidden))
    return model.head


def _flag(config: Config, name: str) -> bool:
    """A switch that tools write into `eagle_config` or beside it."""
    inside = config.fields("eagle_config") or Config({}, config.where)
    return inside.bool(name, default=config.bool(name, default=False))


def _taps(config: Config, blocks: int) -> tuple[int, ...]:
    """The numbers of blocks in front of which the stream is read."""
    inside = config.fields("eagle_config") or Config({})
    name = "eagle_aux_hidden_state_layer_ids"
    if inside.given(name):  # of the blocks after which it is
        taps = tuple(index + 1 for index in inside.ints(name, 3))
    else:
        taps = config.ints(name, 3, default=(2, blocks // 2, blocks - 3))
    if not 0 < taps[0] < taps[1] < taps[2] <= blocks:
        raise ModelError(f"{config.where} reads the stream in front of blocks {list(taps)}, of a model of {blocks}")
    return taps


def _plain(name: str) -> str:
    """The name that a layer of a Llama has for a tensor of the head."""
    for start in BLOCK_NAMES:
        if name.startswith(start):
            return f"{LAYER}.{name.removeprefix(start)}"
    return name if name.startswith(("lm_head.", "model.")) else f"model.{name}"
