"""LongCat-Flash (2509.01322): two latent attentions a layer, and experts on a shortcut past the second one.

x = embed(tokens)
x = x + latent attention_1(norm(x)); y = norm(x)
x = x + mlp_1(y)
x = x + latent attention_2(norm(x))
x = x + mlp_2(norm(x)) + experts(y)
logits = head(norm(x))

Some of the experts give back what they are given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.families.deepseek import latent_attention, latent_scale
from lmstate.models.layers.mla import MultiHeadLatentAttention
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import Rope, make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Norm, Residual
from lmstate.state import CompositeState, LayerState, Layout, Step

DEFAULTS: b.Defaults = {"longcat_flash": {**b.EPS, "zero_expert_num": 256}}


@dataclass(frozen=True, eq=False)
class AttentionAndMLP:
    """An attention and the MLP after it, with the norm before each."""

    attention: MultiHeadLatentAttention
    mlp: MLP
    attention_norm: Norm
    mlp_norm: Norm


@dataclass(frozen=True, eq=False)
class Shortcut:
    """A whole layer: two sublayers, and experts that read what the first one's MLP reads and are added at the end.

    Its input is the stream itself, to which all parts add; so it is in a block without norms or a part after it.
    """

    first: AttentionAndMLP
    second: AttentionAndMLP
    experts: FeedForward

    @property
    def kind(self) -> str:
        return "composite"

    @property
    def rope(self) -> Rope | None:
        return self.first.attention.rope

    def new_state(self, layout: Layout) -> LayerState:
        return CompositeState([sublayer.attention.new_state(layout) for sublayer in (self.first, self.second)])

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, CompositeState) and norm is None
        assert residual is not None and residual.stream is x and residual.norm is None and residual.scale == 1.0
        skipped = None
        for sublayer, own in zip((self.first, self.second), cache.members):
            x = sublayer.attention(x, step, own, sublayer.attention_norm, Residual(x))
            if skipped is None:
                skipped = self.experts(x, sublayer.mlp_norm)
            x = sublayer.mlp(x, sublayer.mlp_norm, Residual(x))
        assert skipped is not None
        return x + skipped


@dataclass(frozen=True, eq=False)
class Same:
    """An expert that gives back what it is given."""

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        x = x if norm is None else ops.norm(x, norm)
        return x if residual is None else ops.add_residual(residual, x)


def build(w: WeightLoader) -> Model:
    layers = w.config.int("num_layers", low=1, high=4096)
    w.config = Config({**w.config, "num_hidden_layers": layers}, w.config.where)
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("ffn_hidden_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope_dim = config.int("qk_rope_head_dim", low=2, high=b.MAX_SIZE)
    rope = make_rope(config, rope_dim, theta=1e7, interleaved=True).to(w.device)
    normed = b.rms_norms(w, shape)

    def sublayer(layer: str, index: int) -> AttentionAndMLP:
        return AttentionAndMLP(
            scaled_attention(w, f"{layer}.self_attn.{index}", shape, rope, rope_dim),
            b.mlp(w, f"{layer}.mlps.{index}", shape.hidden, inner, act),
            normed(f"{layer}.input_layernorm.{index}"),
            normed(f"{layer}.post_attention_layernorm.{index}"),
        )

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(Shortcut(sublayer(layer, 0), sublayer(layer, 1), mixture(w, f"{layer}.mlp", shape)), None)

    # transformers makes room for the first matrix of experts that have none.
    count = b.expert_count(config)
    unused = [f"*.mlp.experts.{count + index}.*" for index in range(_idle(config))]
    layer = "model.mtp.layers.0"

    def head_block(layer: str) -> Block:
        return Block(
            scaled_attention(w, f"{layer}.self_attn", shape, rope, rope_dim),
            b.mlp(w, f"{layer}.transformer_layer.mlp", shape.hidden, inner, act),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
        )

    names = b.HeadNames(
        layer, f"{layer}.enorm.m", f"{layer}.hnorm.m", f"{layer}.eh_proj", "model.mtp.norm", "model.mtp.embed_tokens"
    )
    there = [names] if w.has(f"{names.project}.weight") else []
    heads = b.prediction_heads(w, shape, normed, there, head_block)
    return b.decoder(w, shape, block, heads=heads, ignore=tuple(unused))


def scaled_attention(
    w: WeightLoader, prefix: str, shape: b.Dims, rope: Rope, rope_dim: int
) -> MultiHeadLatentAttention:
    """Both latents are multiplied by the root of how much narrower than the stream they are."""
    made = latent_attention(w, prefix, shape, rope, rope_dim, latent_scale(w.config))

    def grown(norm: Norm) -> Norm:
        return replace(norm, weight=norm.weight * (shape.hidden / norm.weight.shape[0]) ** 0.5)

    assert made.q_norm is not None
    return replace(made, q_norm=grown(made.q_norm), latent_norm=grown(made.latent_norm))


def mixture(w: WeightLoader, prefix: str, shape: b.Dims) -> MixtureOfExperts:
    config, count = w.config, b.expert_count(w.config)
    every = count + _idle(config)
    gate = f"{prefix}.router.classifier"
    router = Router(
        b.router_weight(w, f"{gate}.weight", every, shape.hidden),
        b.top_k(config, every, "moe_topk"),
        scale=config.float("routed_scaling_factor", default=6.0),
        bias=b.biases(w, f"{gate}.bias", wanted=config.bool("router_bias", default=False)),
        e_score_correction_bias=w.tensor(f"{prefix}.router.e_score_correction_bias", (every,)),
    )
    inner = config.int("expert_ffn_hidden_size", low=1, high=b.MAX_SIZE)
    each = b.experts(w, f"{prefix}.experts", count, shape.hidden, inner, b.activation(config))
    return MixtureOfExperts(router, [*each, *(Same() for _ in range(_idle(config)))])


def _idle(config: Config) -> int:
    """Number of experts that return their input."""
    config.str("zero_expert_type", allowed=("identity",), default="identity")
    return config.int("zero_expert_num", high=b.MAX_SIZE, default=0)
