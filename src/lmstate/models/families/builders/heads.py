"""Multi-token prediction heads under the names that checkpoints have for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.block import Block
from lmstate.models.families.builders.dims import Dims, first_present
from lmstate.models.families.builders.norms import NormBuilder
from lmstate.models.heads.head import DraftHead, PredictionHead
from lmstate.ops import Norm, Weight

MOST_HEADS = 64


@dataclass(frozen=True)
class HeadNames:
    """The names of one head's tensors, without `.weight`; `layer`: what those of its block begin with."""

    layer: str
    embed_norm: str
    hidden_norm: str
    project: str
    norm: str
    embed: str = ""
    head: str = ""


def layers_past_the_last(w: WeightLoader, layers: int) -> Iterator[HeadNames]:
    """DeepSeek-V3's: a layer after the last one, with copies of embedding and head (GGUF: `blk.N.nextn.*`)."""
    for index in range(layers, layers + MOST_HEADS):
        layer = f"model.layers.{index}"
        if not w.has(f"{layer}.eh_proj.weight"):
            return
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "embed_tokens", "shared_head.head")
        yield HeadNames(layer, *(f"{layer}.{name}" for name in names))


def mtp_layers(w: WeightLoader, mtp: str = "mtp") -> Iterator[HeadNames]:
    """Qwen3-Next's: layers in a part of their own that share its norms and its projection."""
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "embed_tokens")
    for index in range(MOST_HEADS if w.has(f"{mtp}.fc.weight") else 0):
        layer = f"{mtp}.layers.{index}"
        if not any(w.has(f"{layer}.{part}.weight") for part in ("input_layernorm", "self_attn.q_proj")):
            return
        yield HeadNames(layer, *(f"{mtp}.{name}" for name in names))


HeadBuilder: TypeAlias = Callable[[Weight, Weight, Tensor | None], tuple[DraftHead, ...]]
"""The heads of a model, from its embedding, its head, and the bias of that."""


def prediction_heads(
    w: WeightLoader,
    shape: Dims,
    normed: NormBuilder,
    names: Iterable[HeadNames],
    blocks: Callable[[str], Block | tuple[Block, ...]],
    *,
    norm: Norm | None = None,
    chained_norm: bool = True,
    hidden_first: bool = False,
) -> HeadBuilder:
    """Builder of the heads of these names; `blocks` makes those of one, from what its tensors begin with.

    An embedding or a head of its own is read only where it differs from the model's. norm: the model's last one, for
    heads that have none. The other options are those of `PredictionHead`.
    """

    def own(name: str, shared_name: str, shared: Weight) -> Weight:
        if not w.has(name) or w.same(name, shared_name):
            return shared
        return w.linear(name, shape=(shape.vocab, shape.hidden))

    def build(embed: Weight, head: Weight, head_bias: Tensor | None) -> tuple[PredictionHead, ...]:
        embed_name = first_present(w, "model.embed_tokens.weight", "backbone.embeddings.weight")
        head_name = first_present(w, "lm_head.weight", embed_name)
        made = []
        for depth, each in enumerate(names, start=1):
            layer = blocks(each.layer)
            made.append(
                PredictionHead(
                    depth,
                    normed(each.embed_norm),
                    normed(each.hidden_norm),
                    w.linear(f"{each.project}.weight", shape=(shape.hidden, 2 * shape.hidden)),
                    layer if isinstance(layer, tuple) else (layer,),
                    normed(each.norm) if norm is None else norm,
                    own(f"{each.embed}.weight", embed_name, embed),
                    own(f"{each.head}.weight", head_name, head),
                    head_bias,
                    chained_norm,
                    hidden_first,
                )
            )
        return tuple(made)

    return build
