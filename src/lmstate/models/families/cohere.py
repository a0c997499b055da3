"""Command R (Cohere), Command R7B (Cohere 2), North Micro Vision's text part: attention and feed-forward side by side.

x = embed(tokens)
y = norm(x)    # layer norms without biases
x = x + attention(y) + mlp(y)
logits = scale * head(norm(x))

Cohere 2 knows positions only where there is a window. Command R+ normalizes queries and keys, each head by weights of
its own. North Micro Vision (Compass) says for each kind of layer how it rotates, if it does.
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import Rope, make_rope, position_axes, rope_fields
from lmstate.models.model import Block, Model
from lmstate.ops import Norm

_COHERE2 = {
    **b.LAYER_NORM_EPS,
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22_528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "sliding_window": 4096,
}
DEFAULTS: b.Defaults = {
    "cohere": {**b.LAYER_NORM_EPS, "rope_theta": 500_000.0},
    "cohere2": _COHERE2,
    "cohere_compass_text": _COHERE2,
}
F, S = "full_attention", "sliding_attention"


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config, eps="layer_norm_eps")
    family = config.str("model_type")
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    normed = b.layer_norms(w, shape, biased=False)
    if family == "cohere_compass_text":
        kinds = config.strs("layer_types", shape.layers, (F, S), default=None) or [F] * shape.layers
        window = [config.int("sliding_window", low=1) if kind == S else None for kind in kinds]
        made = {kind: _compass_rope(w, kind, shape.head_dim) for kind in set(kinds)}
        ropes = [made[kind] for kind in kinds]
    else:
        rope, second = make_rope(config, shape.head_dim, interleaved=True).to(w.device), family == "cohere2"
        window = b.layer_windows(config, shape.layers, full_every=4) if second else [None] * shape.layers
        ropes = [None if second and size is None else rope for size in window]
    heads_normed = family == "cohere" and config.bool("use_qk_norm", default=False)

    def head_norm(name: str, heads: int) -> Norm | None:
        return Norm(w.tensor(f"{name}.weight", (heads, shape.head_dim)), shape.eps, "layer") if heads_normed else None

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        both = normed(f"{layer}.input_layernorm")
        return Block(
            b.attention(
                w, f"{layer}.self_attn", shape, ropes[index], window=window[index],
                q_norm=head_norm(f"{layer}.self_attn.q_norm", shape.heads),
                k_norm=head_norm(f"{layer}.self_attn.k_norm", shape.kv_heads),
            ),
            b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            both,
            both,
            parallel=True,
        )  # fmt: skip

    return b.decoder(
        w,
        shape,
        block,
        final_norm=normed("model.norm"),
        logit_scale=config.float("logit_scale", default=1.0 if family == "cohere_compass_text" else 0.0625),
    )


def _compass_rope(w: WeightLoader, kind: str, head_dim: int) -> Rope | None:
    """The rope of a kind of layer; None where the config has null for it."""
    given = w.config.fields("rope_parameters") or Config({}, w.config.where)
    if kind in given and given[kind] is None:
        return None
    own = Config({**w.config, "rope_parameters": dict(rope_fields(w.config, kind)), "rope_scaling": None}, given.where)
    rope = make_rope(own, head_dim).to(w.device)
    return replace(rope, axes=position_axes(own, len(rope.frequencies), (24, 20, 20), interleaved=True))
