"""Step 3.5 and 3.7 Flash (StepFun): gated attention, more heads where there is a window, and experts that are clamped.

x = embed(tokens)
x = x + out(sigmoid(gate(y)) * attention(y))     # y = norm(x); a gate of one number a head
x = x + scale * sum over chosen e: g_e * expert_e(z) + shared(z)   # z = norm(x); the first layers are dense
logits = head(norm(x))

In the layers that have a limit, `down(min(silu(gate z), limit) * clamp(up z, -limit, limit))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import Numbers, WeightLoader
from lmstate.checkpoints.source import floats
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.layers.rope import Rope, make_rope
from lmstate.models.model import Model
from lmstate.ops import Norm, Residual

DEFAULTS: b.Defaults = {
    "step3p5": {
        **b.EPS,
        "vocab_size": 128_815,
        "hidden_size": 4096,
        "intermediate_size": 11_264,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
    }
}
PUBLISHED = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
F, S = "full_attention", "sliding_attention"


@dataclass(frozen=True, eq=False)
class LimitedMLP:
    """A gated feed-forward part whose gate is cut off above a limit after its activation, and whose rest at both."""

    whole: MLP
    limit: float

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        gate, up = ops.linear(x, self.whole.up, norm=norm).chunk(2, dim=-1)
        gate = ops.activation(self.whole.act)(gate).clamp(max=self.limit)
        return ops.linear(gate * up.clamp(-self.limit, self.limit), self.whole.down, residual=residual)


def build(w: WeightLoader) -> Model:
    w.config = config = b.with_usual_names(w.config, PUBLISHED)
    shape, act = b.Dims.of(config), b.activation(config)
    layers = shape.layers
    kinds = _first(config, "layer_types", layers) or [F] * layers
    config = w.config = Config({**config, "layer_types": kinds}, config.where)
    config.strs("layer_types", layers, (F, S))
    other = config.fields("attention_other_setting") or Config({})
    more = other.int("num_attention_heads", low=1, high=b.MAX_SIZE, default=shape.heads)
    if config.given("num_sliding_attention_heads"):
        more = config.int("num_sliding_attention_heads", low=1, high=b.MAX_SIZE)
    size = config.int("sliding_window", low=1) if S in kinds else None
    scale = (config.float("query_pre_attn_scalar", low=1e-6, default=None) or shape.head_dim) ** -0.5
    ropes = [rope.to(w.device) for rope in _ropes(config, shape, kinds)]
    sparse = _sparse(config, layers)
    normed = b.rms_norms(w, shape, plus_one=True)

    def mixer(index: int, name: str) -> Attention:
        slides = kinds[index] == S
        own = replace(shape, heads=more if slides else shape.heads)
        q_norm, k_norm = (
            b.norm(w, f"{name}.{part}_norm.weight", shape.head_dim, shape.eps, plus_one=True) for part in "qk"
        )
        return b.attention(
            w, name, own, ropes[index], window=size if slides else None, q_norm=q_norm, k_norm=k_norm,
            gates=("g_proj", own.heads), scale=scale,
        )  # fmt: skip

    def limited(made: MLP, name: str, index: int) -> FeedForward:
        given = _first(config, name, layers) or [None] * layers
        limit = Config({name: given[index]}, config.where).float(name, low=0.0, default=0.0)
        return LimitedMLP(made, limit) if limit else made

    def feed_forward(index: int, name: str) -> FeedForward:
        if not sparse[index]:
            inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE)
            return limited(b.mlp(w, name, shape.hidden, inner, act), "swiglu_limits_shared", index)
        layer, width = name.removesuffix(".mlp"), b.expert_width(config)
        moe = f"{layer}.moe"
        common = b.first_present(w, f"{layer}.share_expert.down_proj.weight", f"{name}.shared_experts.down_proj.weight")
        shared = config.int("share_expert_dim", low=1, high=b.MAX_SIZE)
        gate = b.first_present(w, f"{moe}.gate.weight", f"{name}.gate.weight")
        correction = b.first_present(w, f"{moe}.router_bias", f"{name}.gate.e_score_correction_bias")
        router = b.corrected_router(
            w, gate, correction, shape.hidden, scale=config.float("moe_router_scaling_factor", default=1.0)
        )
        return MixtureOfExperts(
            router,
            [limited(expert, "swiglu_limits", index) for expert in _experts(w, moe, name, shape.hidden, width, act)],
            limited(
                b.mlp(w, common.removesuffix(".down_proj.weight"), shape.hidden, shared, act),
                "swiglu_limits_shared",
                index,
            ),
        )

    block = b.pre_norm(normed, mixer, feed_forward)
    return b.decoder(
        w, shape, block, final_norm=normed("model.norm"), ignore=tuple(f"model.layers.{layers + i}.*" for i in range(8))
    )


def _experts(w: WeightLoader, moe: str, name: str, hidden: int, inner: int, act: str) -> list[MLP]:
    """Experts: a tensor each for all gates, all ways in and all ways out, as published, or one by one, as in a GGUF."""
    count = b.expert_count(w.config)
    if not w.has(f"{moe}.gate_proj.weight"):
        return [b.mlp(w, f"{name}.experts.{index}", hidden, inner, act) for index in range(count)]
    for part in ("gate", "up"):
        w.expect(f"{moe}.{part}_proj.weight", (count, inner, hidden))

    def up(index: int) -> ops.Weight:
        def both(gate: Numbers, up: Numbers) -> Numbers:
            return torch.cat([floats(gate), floats(up)])

        names = f"{moe}.gate_proj.weight", f"{moe}.up_proj.weight"
        return w.derived(f"{moe}[{index}]", *names, make=both, shape=(2 * inner, hidden), of=index)

    return [
        MLP(up(index), w.stacked(f"{moe}.down_proj.weight", index, shape=(count, hidden, inner)), act)
        for index in range(count)
    ]


def _first(config: Config, name: str, layers: int) -> list[object] | None:
    """A list of a value for each layer, and, in published configs, for each prediction head after them."""
    value = config.get(name)
    return list(value[:layers]) if isinstance(value, list) and len(value) >= layers else None


def _sparse(config: Config, layers: int) -> Sequence[bool]:
    kinds = _first(config, "mlp_layer_types", layers)
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    given = config.get("moe_layers_enum")
    if isinstance(given, str):
        given = [int(number) for number in given.split(",") if number.strip().isdigit()]
    chosen = set(given) if isinstance(given, list) else set(range(3, layers))
    return [index in chosen for index in range(layers)]


def _ropes(config: Config, shape: b.Dims, kinds: Sequence[object]) -> list[Rope]:
    """The rope of each layer, whose kind of attention it follows; layers with a window are not stretched."""
    if isinstance((config.fields("rope_parameters") or Config({})).get(F), dict):
        made = {kind: make_rope(config, shape.head_dim, kind=str(kind)) for kind in set(kinds)}
        return [made[kind] for kind in kinds]
    thetas, fractions = (_first(config, name, shape.layers) for name in ("rope_theta", "partial_rotary_factors"))
    made = {}
    for kind in set(kinds):
        index = list(kinds).index(kind)
        own = {**config, "rope_parameters": None, "rope_theta": thetas[index] if thetas else config.get("rope_theta")}
        own["partial_rotary_factor"] = fractions[index] if fractions else None
        own["rope_scaling"] = config.get("rope_scaling") if kind == F else None
        made[kind] = make_rope(Config(own, config.where), shape.head_dim)
    return [made[kind] for kind in kinds]
