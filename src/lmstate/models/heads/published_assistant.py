"""Reads Gemma 4's assistants, as transformers saves them: `gemma4_assistant` and `gemma4_unified_assistant`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.renamed import Renamed
from lmstate.checkpoints.source import IntegerSource
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.families.gemma4 import DEFAULTS, blocks, kinds_of, unread
from lmstate.models.heads.assistant import AssistantHead, TokenClusters
from lmstate.models.layers.attention import Attention
from lmstate.models.mapped import moved

if TYPE_CHECKING:
    from lmstate.models.model import Model

TYPES = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
"""Types of assistants, and those of the stacks inside."""
ORDER = "masked_embedding.token_ordering"
FAMILIES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")


def with_assistant(model: Model, opened: IntegerSource, loader: Callable[..., WeightLoader]) -> Model:
    """The model with an assistant to draft with. Raises `ModelError` for a damaged one, or another's."""
    folder = opened.path
    outside = Config(opened.config, f"config of {folder}")
    if model.config.family not in FAMILIES:
        raise ModelError(f"{folder} drafts for Gemma 4, and this is a {model.config.family} model")
    width = outside.int("backbone_hidden_size", low=1, high=b.MAX_SIZE, default=1536)
    if width != model.config.hidden_size:
        raise ModelError(f"{folder} drafts for a model {width} wide, and this one is {model.config.hidden_size} wide")
    inside = outside.fields("text_config") or Config({}, outside.where)
    pairs = [(name, name) for name in opened.names() if name != ORDER]
    w = loader(Renamed(opened, pairs, dict(inside)))
    w.config = b.completed(w.config, DEFAULTS[TYPES[outside.str("model_type")]])
    shape = b.Dims.of(w.config)
    if shape.vocab != model.config.vocab_size:
        raise ModelError(f"{folder} knows {shape.vocab} tokens, and the model {model.config.vocab_size}")
    reads = range(shape.layers)  # no layer has keys and values of its own
    made = tuple(map(blocks(w, kinds_of(w), reads), reads))
    head = AssistantHead(
        tuple(_source(model, block.mixer, folder) for block in made),
        w.linear("pre_projection.weight", shape=(shape.hidden, 2 * width)),
        w.linear("post_projection.weight", shape=(width, shape.hidden)),
        made,
        b.rms_norms(w, shape)("model.norm"),
        model.embed,
        model.config.embed_scale,
        w.linear("model.embed_tokens.weight", shape=(shape.vocab, shape.hidden)),
        _clusters(w, outside, opened, shape) if outside.bool("use_ordered_embeddings", default=False) else None,
    )
    w.check_all_used(["lm_head.weight", "masked_embd_*", *unread(reads)])
    heads = (moved(head, model.output_device),)
    return replace(model, network=replace(model.network, heads=heads), _fingerprint=None)


def _source(model: Model, mixer: object, folder: Path) -> int:
    """The number of the model's last block of the same kind that has keys and values of its own."""
    assert isinstance(mixer, Attention)
    for index, block in reversed(list(enumerate(model.blocks))):
        own = block.mixer
        if not isinstance(own, Attention) or own.reads is not None or (own.window is None) != (mixer.window is None):
            continue
        if (own.kv_heads, own.head_dim) != (mixer.kv_heads, mixer.head_dim):
            raise ModelError(
                f"{folder} attends to {mixer.kv_heads} heads of {mixer.head_dim}, and block {index} of the model has "
                f"{own.kv_heads} of {own.head_dim}: it was made for another model"
            )
        return index
    raise ModelError(f"{folder} attends to a kind of layer that the model has not: it was made for another model")


def _clusters(w: WeightLoader, config: Config, opened: IntegerSource, shape: b.Dims) -> TokenClusters:
    count = config.int("num_centroids", low=1, high=b.MAX_SIZE, default=2048)
    best = config.int("centroid_intermediate_top_k", low=1, high=count, default=min(32, count))
    tokens = opened.integers(ORDER)
    if shape.vocab % count or tokens.sort().values.tolist() != list(range(shape.vocab)):
        raise ModelError(
            f"{config.where}: {ORDER!r} does not name each of {shape.vocab} tokens once, in {count} clusters"
        )
    centroids = w.linear("masked_embedding.centroids.weight", shape=(count, shape.hidden))
    return TokenClusters(centroids, tokens.view(count, -1), best)
