"""Decoders of blocks under their usual Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.block import Block
from lmstate.models.config import ModelConfig
from lmstate.models.encoder import Encoder
from lmstate.models.families.builders.dims import POSITIONS, Dims
from lmstate.models.families.builders.heads import HeadBuilder
from lmstate.models.families.builders.norms import NormBuilder, norm
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.embedding import EmbeddingHook, OutputHook
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.model import Model
from lmstate.models.network import Network
from lmstate.models.offload import Offload
from lmstate.models.spread import spread
from lmstate.ops import Norm, Weight


class LayerBlock(Protocol):
    """The block of a layer."""

    def __call__(self, index: int, layer: str = "") -> Block: ...


PLANNED_TOKENS = 8192
"""Tokens that a placement by bytes leaves room for, unless `context_size` says another number."""
UNASKED_HEADS = ("mtp.*", "model.mtp.*")
"""Multi-token prediction heads in a part of their own: the model is whole without them."""
W1_W3_W2 = ("w1", "w3", "w2")  # the same three matrices


def pre_norm(
    normed: NormBuilder,
    mixer: Callable[[int, str], Mixer],
    feed_forward: Callable[[int, str], FeedForward],
    names: tuple[str, str, str, str] = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    *,
    layers: str = "model.layers",
    scale: float = 1.0,
) -> LayerBlock:
    """Blocks of two parts with a norm before each; a part is made of its layer's number and its tensors' prefix.

    `names`: of the norms and the parts in a layer. `scale`: of what each part adds to the stream. The returned function
    takes a layer's number, and the prefix of its tensors where that is not `layers` and the number.
    """

    def block(index: int, layer: str = "") -> Block:
        first, mixing, second, feeding = (f"{layer or f'{layers}.{index}'}.{name}" for name in names)
        return Block(mixer(index, mixing), feed_forward(index, feeding), normed(first), normed(second), scale=scale)

    return block


def decoder(
    w: WeightLoader,
    shape: Dims,
    block: Callable[[int], Block],
    *,
    prefix: str = "model",
    embed: str | None = None,
    head_biased: bool = False,
    head: Weight | None = None,
    final_norm: Norm | None = None,
    embed_scale: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    entry: EmbeddingHook | None = None,
    exit: OutputHook | None = None,
    heads: HeadBuilder | None = None,
    encoder: Encoder | None = None,
    reads: Sequence[int | None] = (),
    marks: int = 0,
    ignore: tuple[str, ...] = (),
) -> Model:
    """A stack of `shape.layers` blocks between `embed_tokens` and `lm_head` (the embedding itself where they are tied).

    A checkpoint that holds a head of its own is not tied, whatever its config says. `embed`: the embedding's name where
    it is another. `head_biased`: the head has a bias. `head`: one that is made of more than
    its tensor. `heads`: of multi-token prediction, built if they are asked for.
    `reads`: for each block the earlier one whose keys or choices it reads, if it does. `marks`: rows of the embedding
    past the vocabulary, which the head does not have. `ignore`: patterns of tensors that the checkpoint holds and this
    model needs not (rotary tables, say).
    """
    config = w.config
    embedded = f"{embed or prefix + '.embed_tokens'}.weight"
    devices = w.devices(shape.layers, _state_bytes(w, shape), reads)
    with w.on(devices[0]):
        embedding = w.linear(embedded, shape=(shape.vocab + marks, shape.hidden))
    tied = not marks and (
        not w.has("lm_head.weight")
        or (config.bool("tie_word_embeddings", default=False) and w.same("lm_head.weight", embedded))
    )
    with w.on(devices[-1]):
        if head is None:
            head = embedding if tied else w.linear("lm_head.weight", shape=(shape.vocab, shape.hidden))
    head_biased = head_biased and (w.has("lm_head.weight") or w.has("lm_head.bias"))  # else a base model's embedding
    head_bias = w.tensor("lm_head.bias", (shape.vocab,)) if head_biased else None
    blocks: list[Block] = []
    offload: Offload[Block] | None = Offload(devices[w.placement.offloaded[0]]) if w.placement.offloaded else None
    for index, device in enumerate(devices):
        with w.on(device):
            made = block(index)
            blocks.append(offload.stored(made) if offload and index in w.placement.offloaded else made)
    with w.on(devices[-1]):
        predicting = heads(embedding, head, head_bias) if heads is not None and w.heads else ()
    network = Network(
        ModelConfig(
            config.str("model_type"),
            shape.vocab,
            shape.hidden,
            config.int(POSITIONS, low=1, default=None),
            embed_scale,
            logit_scale,
            logit_softcap,
            marks,
        ),
        embedding,
        tuple(blocks),
        final_norm or norm(w, f"{prefix}.norm.weight", shape.hidden, shape.eps),
        head,
        head_bias,
        entry=entry,
        exit=exit,
        heads=predicting,
        encoder=encoder,
    )
    w.check_all_used([*(["lm_head.weight"] if tied else []), "*.rotary_emb.inv_freq", *UNASKED_HEADS, *ignore])
    return Model(spread(network, devices) if w.placement.spreads else network, w.dtype)


def _state_bytes(w: WeightLoader, shape: Dims) -> int:
    """Bytes of the keys and values that a block keeps of a row, as an estimate of what any block remembers."""
    tokens = w.context_size or min(w.config.int(POSITIONS, low=1, default=PLANNED_TOKENS), PLANNED_TOKENS)
    return 2 * shape.kv_heads * shape.head_dim * w.dtype.itemsize * tokens
