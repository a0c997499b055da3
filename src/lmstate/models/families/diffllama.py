"""DiffLlama: Llama with differential attention (2410.05258).

x = embed(tokens)
x = x + out((1 - l0) * norm(seen_1 - l * seen_2))   # what the first and the second half of the heads see
x = x + down(silu(gate(norm(x))) * up(norm(x)))
logits = head(norm(x))

Every head sees two values, of a key head of the first half and of one of the second. They are side by side, `[2 * D]`
features that a key with as many zeros goes with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmstate import ops
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model
from lmstate.ops import Norm, Residual
from lmstate.state import KeyValueState, LayerState, Step

DEFAULTS: b.Defaults = {
    "diffllama": {
        **b.EPS,
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    }
}


@dataclass(frozen=True, eq=False)
class DifferentialAttention(Attention):
    """Attention whose second half of heads is taken away from the first: `seen_1 - share * seen_2`, normed and scaled.

    `pair_norm`: without weights, over `[2 * D]`; `kept`: its factor. A head is stored `2 * D` wide.
    """

    share: float = 0.0
    kept: float = 1.0
    pair_norm: Norm | None = None

    def sublayers(self, norm: Norm | None, post_norm: Norm | None, scale: float) -> tuple[ops.Sublayer, ...]:
        return ()

    @property
    def stored_dim(self) -> int:
        return 2 * self.head_dim

    def mix(self, qkv: Tensor, step: Step, cache: LayerState, residual: Residual | None = None) -> Tensor:
        """Attention after the projections, `[R, T, (H + 2 * K) * D]` -> `[R, T, E]`."""
        assert isinstance(cache, KeyValueState) and self.pair_norm is not None
        dim, kv_width = self.head_dim, self.kv_heads * self.head_dim
        q, k, v = qkv.split([qkv.shape[-1] - 2 * kv_width, kv_width, kv_width], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in (q, k, v))  # [R, T, H or K, D]
        first, second = v.chunk(2, dim=2)
        both = torch.cat([first, second], dim=-1).repeat(1, 1, 2, 1)  # [R, T, K, 2 * D]
        params = ops.AttentionParams(self.scale, self.softcap, self.sinks)
        new = pad(k, (0, dim)), both  # the rope turns the first D features alone
        seen = cache.attend(pad(q, (0, dim)), new, step, params, self.rotation(step))  # [R, T, H, 2 * D]
        kept, taken = seen.chunk(2, dim=2)
        mixed = ops.norm(kept - self.share * taken, self.pair_norm) * self.kept
        return ops.linear(mixed.flatten(-2), self.out, self.out_bias, residual=residual)


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    if shape.heads % 2 or shape.kv_heads % 2:
        raise ModelError(f"{config.where}: {shape.heads} heads of queries and {shape.kv_heads} of keys must be pairs")
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope = make_rope(config, shape.head_dim).to(w.device)

    def mixer(index: int, name: str) -> DifferentialAttention:
        plain = b.attention(w, name, shape, rope)
        base = 0.8 - 0.6 * math.exp(-0.3 * index)
        of_q1, of_k1, of_q2, of_k2 = (
            w.tensor(f"{name}.lambda_{part}", (shape.head_dim,)).float() for part in ("q1", "k1", "q2", "k2")
        )
        share = b.number((of_q1 * of_k1).sum().exp() - (of_q2 * of_k2).sum().exp()) + base
        return DifferentialAttention(
            *(plain.qkv, plain.out, plain.heads, plain.kv_heads, plain.head_dim, plain.scale, rope),
            qkv_bias=plain.qkv_bias,
            out_bias=plain.out_bias,
            share=share,
            kept=1 - base,
            pair_norm=b.plain_norm(w, 2 * shape.head_dim, shape.eps),
        )

    block = b.pre_norm(b.rms_norms(w, shape), mixer, lambda _, name: b.mlp(w, name, shape.hidden, inner, act))
    return b.decoder(w, shape, block)
