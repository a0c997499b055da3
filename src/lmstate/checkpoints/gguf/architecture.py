"""Description of a GGUF architecture: the names of its tensors, and the changes that the converter made to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.reader import TensorPlace
from lmstate.errors import ModelError

MOST_LAYERS, MOST_WIDTH = 4096, 2**24

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
EXPERTS = {  # [experts, N, K] in GGUF, one matrix per expert under the Hugging Face names
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
NEXTN = {  # a multi-token prediction head, in a block after the last layer
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
STANDARD = {**ATTENTION, **MLP, **PRE_NORMS}
BLOCK = r"blk\.(0|[1-9]\d{0,4})\."
"""Prefix of the name of a tensor inside a block. A number has one spelling: 00 is not a layer."""
# Tensors that hold rope frequencies: they become config values.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

HFConfig = dict[str, Any]
Tensors = dict[str, TensorPlace]
Extra = Callable[[Config, str, HFConfig, Tensors], None]
Change = Literal["convolution", "vector", "decay", "decay vector", "rate", "one more", "token ids"]
"""Change that the converter made to a tensor. In order: it took the middle axis out of a convolution's taps [F, 1, C];
gave a vector another shape; stored -exp(A_log) for A_log; both of these; stored exp(A_log); added 1 to a norm's
weight. The last: stored token ids for their differences from their places."""


Spans = Literal["rows", "row each", "columns"]
"""The part of a tensor that belongs to the value heads of a delta rule: its last rows, `linear_value_head_dim` a head
or one, or its columns."""


@dataclass(frozen=True)
class HeadTiling:
    """Value heads that the converter dealt out over the key heads: `v0 of k0, v0 of k1, ..., v1 of k0, ...`.

    ggml repeats keys as a whole; Hugging Face has the value heads of one key head side by side. `width`: how many rows
    (or columns) a value head has; the `keys * per_key * width` last ones are in that order.
    """

    keys: int
    per_key: int
    width: int
    columns: bool

    def order(self, extent: int) -> Tensor:
        """Index in the file of each of `extent` rows or columns in Hugging Face's order, int64 `[extent]`."""
        order = torch.arange(extent)
        first = extent - self.keys * self.per_key * self.width
        heads = order[first:].view(self.per_key, self.keys, self.width)
        return torch.cat([order[:first], heads.transpose(0, 1).flatten()])


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`.

    `layer`: GGUF name inside a block -> Hugging Face name inside a layer, without `.weight`/`.bias`. `{expert}` in it
    stands for each expert of a tensor, `{each}` for each of its few matrices, `{qkv}` for q, k and v, which the tensor
    holds one after the other. `{ngrams}` outside of blocks stands for the number of the layer that reads n-grams.
    `paired`: rows of q and k are in neighboring pairs, as ggml's rope takes them;
    `paired_norms`: so do the weights of heads' norms.
    `whole`: the same as `layer` for names whose endings differ, with them. `outside`: the tensors outside of blocks.
    `layers`: what comes before a layer's number. `stacks`: the same by what comes before a block in the file, in models
    with an encoder, whose names in `layer` and `whole` begin with that.
    `changed`: end of a Hugging Face name -> what the converter changed.
    `tiled`: the same -> what of it is in the order of `HeadTiling`, in models with fewer key than value heads.
    `eps`: what the config calls the number that norms add; that of layer norms has a key of its own in the file.
    `either_norm`: norms are RMS norms where the file has their key alone.
    `whole_rope`: all of a head rotates, whatever the file says.
    `hybrid`: not every layer has attention or a feed-forward part; their counts may be 0.
    `varied`: they differ from layer to layer, which `extra` sorts out.
    `drafter`: drafts for another model, whose embedding it may read instead of one of its own.
    `also`: the other model types that `extra` may make of it.
    `extra(metadata, prefix, config, tensors)` adds what only this architecture has to the config.
    """

    model_type: str
    class_name: str
    layer: dict[str, str] = field(default_factory=lambda: STANDARD)
    paired: bool = False
    paired_norms: bool = False
    extra: Extra | None = None
    whole: dict[str, str] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=lambda: OUTSIDE)
    layers: str = "model.layers"
    stacks: dict[str, str] = field(default_factory=dict)
    changed: dict[str, Change] = field(default_factory=dict)
    tiled: dict[str, Spans] = field(default_factory=dict)
    eps: str = "rms_norm_eps"
    either_norm: bool = False
    whole_rope: bool = False
    hybrid: bool = False
    varied: bool = False
    drafter: bool = False
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorLocation:
    """Location of a Hugging Face tensor in a GGUF file: a tensor, an expert or some rows of it, and its change.

    `rows`: the first and how many.
    """

    place: TensorPlace
    expert: int | None = None
    paired_heads: int | None = None
    change: Change | None = None
    tiled: HeadTiling | None = None
    rows: tuple[int, int] | None = None

    @property
    def start(self) -> int:
        """The first byte in the file."""
        first = self.expert if self.rows is None else self.rows[0]
        return self.place.start + self.place.nbytes // self.place.shape[0] * first if first else self.place.start

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.rows is not None:
            return (self.rows[1], *self.place.shape[1:])
        return self.place.shape if self.expert is None else self.place.shape[1:]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.stored_shape
        if self.change == "convolution":
            return (math.prod(shape[:-1]), 1, shape[-1])
        return (math.prod(shape),) if self.change in ("vector", "decay vector") else shape


def layer_kinds(metadata: Config, prefix: str, layers: int, blocks: int = 0) -> list[str] | None:
    """Each layer's kind, where the file lists which of them have a window; None where it has no list.

    A list may be of all `blocks`, of which heads for multi-token prediction come after the layers. Raises `ModelError`
    for a list of another length, or of other things than flags.
    """
    name = f"{prefix}.attention.sliding_window_pattern"
    flags = metadata.get(name)
    if not isinstance(flags, list):
        return None
    if len(flags) not in (layers, blocks) or not all(isinstance(flag, bool) for flag in flags):
        raise ModelError(f"{metadata.where} must have {layers} flags in {name!r}, one a layer; it is damaged")
    return ["sliding_attention" if slides else "full_attention" for slides in flags[:layers]]
