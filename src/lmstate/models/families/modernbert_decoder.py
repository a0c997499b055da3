"""Ettin's decoders (2507.11412): ModernBERT that reads from left to right.

x = norm(embed(tokens))
x = x + attention(norm(x))               # the first layer has no norm; one in three sees all, others a window
x = x + down(gelu(gate(y)) * up(y))      # y = norm(x)
logits = head(norm(gelu(dense(norm(x)))))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.embedding import NormedEmbedding
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.rope import ropes_by_kind
from lmstate.models.model import Block, Model
from lmstate.ops import Norm, Weight

DEFAULTS: b.Defaults = {
    "modernbert-decoder": {
        "norm_eps": 1e-5,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "decoder_bias": True,
        "tie_word_embeddings": True,
    }
}

NAMES = {"global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"}
KINDS = ("sliding_attention", "full_attention")


@dataclass(frozen=True, eq=False)
class DenseExit:
    """A norm, a projection and an activation between the last block and the last norm."""

    norm: Norm
    dense: Weight  # [E, E]
    bias: Tensor | None
    act: str

    def __call__(self, x: Tensor) -> Tensor:
        return ops.activation(self.act)(ops.linear(x, self.dense, self.bias, norm=self.norm))


def build(w: WeightLoader) -> Model:
    w.config = config = b.with_usual_names(w.config, NAMES)
    shape = b.Dims.of(config, eps="norm_eps")
    shape = replace(shape, kv_heads=shape.heads)
    inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE)
    act = b.activation(config, "hidden_activation", "gelu")
    every = config.int("global_attn_every_n_layers", low=1)
    usual = tuple(KINDS[index % every == 0] for index in range(shape.layers))
    kinds = config.strs("layer_types", shape.layers, allowed=KINDS, default=usual)
    window = config.int("sliding_window", low=1, default=None) or config.int("local_attention", low=2) // 2
    full, local = (
        rope.to(w.device) for rope in ropes_by_kind(config, shape.head_dim, theta=160_000.0, local_theta=10_000.0)
    )
    normed = b.layer_norms(w, shape, biased=config.bool("norm_bias", default=False))
    biased = config.bool("mlp_bias", default=False)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        slides = kinds[index] == "sliding_attention"
        return Block(
            b.attention(
                w, f"{layer}.attn", shape, local if slides else full, window=window if slides else None, out="Wo"
            ),
            MLP(
                w.linear(f"{layer}.mlp.Wi.weight", shape=(2 * inner, shape.hidden)),
                w.linear(f"{layer}.mlp.Wo.weight", shape=(shape.hidden, inner)),
                act,
                up_bias=b.biases(w, f"{layer}.mlp.Wi.bias", wanted=biased),
                down_bias=b.biases(w, f"{layer}.mlp.Wo.bias", wanted=biased),
            ),
            normed(f"{layer}.attn_norm") if index else None,
            normed(f"{layer}.mlp_norm"),
        )

    return b.decoder(
        w,
        shape,
        block,
        embed="model.embeddings.tok_embeddings",
        head_biased=config.bool("decoder_bias", default=True),
        final_norm=normed("lm_head.norm"),
        entry=NormedEmbedding(normed("model.embeddings.norm")),
        exit=DenseExit(
            normed("model.final_norm"),
            w.linear("lm_head.dense.weight", shape=(shape.hidden, shape.hidden)),
            b.biases(w, "lm_head.dense.bias", wanted=config.bool("classifier_bias", default=False)),
            b.activation(config, "classifier_activation", "gelu"),
        ),
    )
