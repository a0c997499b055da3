"""A.X-K2: the latent attention to chosen positions of DeepSeek-V3.2, with gates on its outputs, after gated norms.

x = embed(tokens)
x = x + attention(gated norm(x))
x = x + experts(gated norm(x))      # dense layers: a plain norm
logits = head(norm(x))

gated norm(x) = y * sigmoid(up(silu(down(y)))),  y = norm(x)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.families.deepseek import latent_attention, latent_scale, position_index
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import LayerState, Step

DEFAULTS: b.Defaults = {
    "axk2": {
        "vocab_size": 163_840,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 128,
        "q_lora_rank": 384,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "qk_nope_head_dim": 64,
        "index_n_heads": 16,
        "first_k_dense_replace": 1,
    },
}


@dataclass(frozen=True, eq=False)
class NormGate:
    """The gate of a norm: of low rank, and of what the norm gives."""

    down: Weight  # [rank, E]
    up: Weight  # [E, rank]

    def __call__(self, x: Tensor, norm: Norm) -> Tensor:
        """x float32 `[R, T, E]` -> `[R, T, E]`."""
        y = ops.norm(x, norm)
        return ops.gated(y, ops.linear(ops.activation("silu")(ops.linear(y, self.down)), self.up))


@dataclass(frozen=True, eq=False, kw_only=True)
class GatedNormBlock(Block):
    """A block whose norms are gated: that before the mixer, and that before the feed-forward part where it has one."""

    fusable: ClassVar[bool] = False

    mixer_gate: NormGate
    mlp_gate: NormGate | None

    def mix(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        assert self.mixer_norm is not None
        return self.mixer(self.mixer_gate(x, self.mixer_norm), step, cache, None, Residual(x))

    def feed(self, x: Tensor, stream: Tensor) -> Tensor:
        if self.mlp_gate is None:
            return super().feed(x, stream)
        assert self.mlp is not None and self.mlp_norm is not None
        return self.mlp(self.mlp_gate(x, self.mlp_norm), None, Residual(stream))


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope_dim = config.int("qk_rope_head_dim", low=2, high=b.MAX_SIZE)
    rank = config.int("gated_norm_rank", low=1, high=b.MAX_SIZE, default=16)
    rope = make_rope(config, rope_dim, interleaved=True).to(w.device)
    normed, sparse = b.rms_norms(w, shape), b.sparse_layers(config, shape.layers)

    def gate(name: str) -> NormGate:
        down, up = (
            b.first_present(w, f"{name}.{published}.weight", f"{name}.mlp.{own}.weight")
            for published, own in (("W_down", "fc1"), ("W_up", "fc2"))
        )
        return NormGate(w.linear(down, shape=(rank, shape.hidden)), w.linear(up, shape=(shape.hidden, rank)))

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        before, behind, mlp = (f"{layer}.{name}" for name in ("input_layernorm", "post_attention_layernorm", "mlp"))
        scale, attention = latent_scale(config), f"{layer}.self_attn"
        mixer = latent_attention(w, attention, shape, rope, rope_dim, scale, value_gate=True)
        mixer = replace(mixer, index=position_index(w, f"{attention}.indexer", shape, rope, interleaved=False))
        if not sparse[index]:
            dense = b.mlp(w, mlp, shape.hidden, inner, act)
            return GatedNormBlock(
                mixer, dense, normed(f"{before}.norm"), normed(behind), mixer_gate=gate(before), mlp_gate=None
            )
        router = b.corrected_router(w, f"{mlp}.gate.weight", f"{mlp}.gate.e_score_correction_bias", shape.hidden)
        experts = b.deepseek_mixture(w, mlp, shape, replace(router, left_out=0.0) if router.groups > 1 else router)
        return GatedNormBlock(
            mixer,
            experts,
            normed(f"{before}.norm"),
            normed(f"{behind}.norm"),
            mixer_gate=gate(before),
            mlp_gate=gate(behind),
        )

    return b.decoder(w, shape, block)
