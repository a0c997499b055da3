"""Command A with experts (`cohere2_moe`): Cohere 2's parallel blocks over experts beside shared ones.

x = embed(tokens)
y = norm(x)
x = x + attention(y) + experts(y)    # with shared ones: their mean, or their sum
logits = scale * head(norm(x))

Layers without a window know no positions, but for the dense ones at the start if none of those has a window.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Norm, Residual

DEFAULTS: b.Defaults = {
    "cohere2_moe": {
        "head_dim": 128,
        "layer_norm_eps": 1e-5,
        "sliding_window": 4096,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    }
}
F, S = "full_attention", "sliding_attention"


@dataclass(frozen=True, eq=False)
class Averaged:
    """Routed and shared experts, whose mean counts instead of their sum."""

    both: MixtureOfExperts

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        out = self.both(x, norm) * 0.5
        return out if residual is None else ops.add_residual(residual, out)


def build(w: WeightLoader) -> Model:
    config = w.config
    rms = config.given("rms_norm_eps")
    shape = b.Dims.of(config, eps="rms_norm_eps" if rms else "layer_norm_eps")
    normed = b.rms_norms(w, shape) if rms else b.layer_norms(w, shape, biased=False)
    act, inner = b.activation(config), config.int("intermediate_size", low=1, high=b.MAX_SIZE)
    rope, size = make_rope(config, shape.head_dim, interleaved=True).to(w.device), config.int("sliding_window", low=1)
    sparse, kinds = b.sparse_layers(config, shape.layers), _kinds(config, shape.layers)
    forced = config.int("prefix_dense_sliding_window_pattern", low=1, default=1) == 1
    count = b.expert_count(config)
    shared = config.int("num_shared_experts", high=1024, default=0)
    averaged = config.str("shared_expert_combination_strategy", ("average", "sum"), default="average") == "average"
    sigmoid = config.str("expert_selection_fn", ("softmax", "sigmoid"), default="softmax") == "sigmoid"

    def mixer(index: int, name: str) -> Attention:
        slides = kinds[index] == S
        turns = slides or (forced and not sparse[index])
        return b.attention(w, name, shape, rope if turns else None, window=size if slides else None)

    def feed_forward(index: int, name: str) -> FeedForward:
        if not sparse[index]:
            dense = config.int("prefix_dense_intermediate_size", low=1, high=b.MAX_SIZE, default=inner)
            return b.mlp(w, name, shape.hidden, dense, act)
        router = Router(
            b.router_weight(w, f"{name}.gate.weight", count, shape.hidden),
            b.top_k(config, count),
            "sigmoid" if sigmoid else "softmax",
            normalize=not sigmoid or config.bool("norm_topk_prob", default=True),
        )
        each = b.experts(w, f"{name}.experts", count, shape.hidden, inner, act)
        common = b.mlp(w, f"{name}.shared_experts", shape.hidden, inner * shared, act) if shared else None
        mixture = MixtureOfExperts(router, each, common)
        return Averaged(mixture) if common is not None and averaged else mixture

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        both = normed(f"{layer}.input_layernorm")
        made = mixer(index, f"{layer}.self_attn"), feed_forward(index, f"{layer}.mlp")
        return Block(*made, both, both, parallel=True)

    return b.decoder(
        w, shape, block, final_norm=normed("model.norm"), logit_scale=config.float("logit_scale", default=0.0625)
    )


def _kinds(config: Config, layers: int) -> tuple[str, ...]:
    """Each layer's kind; the pattern starts again after the dense layers, which have one of their own."""
    kinds = config.strs("layer_types", layers, (F, S), default=None)
    if kinds is not None:
        return kinds
    dense = config.int("first_k_dense_replace", high=layers, default=0)
    before = config.int("prefix_dense_sliding_window_pattern", low=1, default=1)
    every = config.int("sliding_window_pattern", low=1, default=4)
    return tuple(S if (index + 1) % before else F for index in range(dense)) + tuple(
        S if (index + 1) % every else F for index in range(layers - dense)
    )
