"""JetMoE (2404.07413): experts in the feed-forward part, and in attention, where each has queries and a way out.

x = embed(tokens)
x = x + sum over chosen e: g_e * out_e(attention(q_e(y), k(y), v(y))) + bias   # y = norm(x)
x = x + sum over chosen e: g_e * down_e(silu(gate_e(z)) * up_e(z)) + bias      # z = norm(x)
logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import Rope, make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import KeyValueState, LayerState, Layout, Step, attention_state

DEFAULTS: b.Defaults = {
    "jetmoe": {
        "num_key_value_heads": 16,
        "kv_channels": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    }
}
NORM_EPS = 1e-6  # of the norms inside the blocks, whatever the config says of the last one


@dataclass(frozen=True, eq=False)
class MixtureOfAttention:
    """Attention of K heads for each of the experts that a token chooses, over keys and values that they share."""

    router: Router
    queries: tuple[Weight, ...]  # [K * D, E] each
    outs: tuple[Weight, ...]  # [E, K * D] each
    kv: Weight  # [2 * K * D, E]
    bias: Tensor  # float32 [E]
    kv_heads: int
    head_dim: int
    rope: Rope

    @property
    def kind(self) -> str:
        return "attention"

    @property
    def heads(self) -> int:
        """Query heads of all chosen experts."""
        return self.kv_heads * self.router.top_k

    def new_state(self, layout: Layout) -> LayerState:
        return attention_state(
            layout, self.kv_heads, self.head_dim, mask=ops.CausalMask(), rotate_by=self.rope.rotate_by,
            heads=self.heads, scale=self.head_dim**-0.5,
        )  # fmt: skip

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, KeyValueState)
        x = x if norm is None else ops.norm(x, norm)
        flat, each, width = x.flatten(0, -2), self.router.top_k, self.kv_heads * self.head_dim
        weights, chosen = self.router(flat)  # [M, top_k]
        k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in ops.linear(x, self.kv).chunk(2, dim=-1))
        q = flat.new_empty(flat.shape[0], each, width)
        for token, place, expert in self._routes(chosen):
            q[token, place] = ops.linear(flat[token], self.queries[expert])
        # Query heads are by the key that they share: [M, top_k, K, D] -> [R, T, K * top_k, D].
        heads = q.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2).reshape(*x.shape[:-1], -1, self.head_dim)
        params = ops.AttentionParams(self.head_dim**-0.5)
        seen = cache.attend(heads, (k, v), step, params, self.rope.rotation(step))
        seen = seen.flatten(0, 1).unflatten(1, (self.kv_heads, each)).transpose(1, 2).flatten(-2)  # [M, top_k, K * D]
        parts = flat.new_empty(flat.shape[0], each, flat.shape[1])
        for token, place, expert in self._routes(chosen):
            parts[token, place] = ops.linear(seen[token, place].contiguous(), self.outs[expert])
        mixed = (parts * weights[..., None])[:, 0]
        for nth in range(1, each):  # one after the other, whatever other tokens there are
            mixed = mixed + parts[:, nth] * weights[:, nth, None]
        mixed = (mixed + self.bias).view_as(x)
        return mixed if residual is None else ops.add_residual(residual, mixed)

    def _routes(self, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """For each expert that was chosen: its tokens, which of their choices it is, and its number."""
        for expert in chosen.unique().tolist():
            token, place = torch.nonzero(chosen == expert, as_tuple=True)
            yield token, place, expert


@dataclass(frozen=True, eq=False)
class Biased:
    """A feed-forward part and a bias on what it gives."""

    part: MixtureOfExperts
    bias: Tensor  # float32 [E]

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        out = self.part(x, norm) + self.bias
        return out if residual is None else ops.add_residual(residual, out)


def build(w: WeightLoader) -> Model:
    config = b.with_usual_names(w.config, {"kv_channels": "head_dim"})
    chosen = config.int("num_experts_per_tok", low=1, high=b.MAX_SIZE)
    kv_heads = config.int("num_key_value_heads", low=1, high=b.MAX_SIZE)
    w.config = config = b.with_usual_names(
        b.completed(config, {"num_attention_heads": kv_heads * chosen}), {"activation_function": "hidden_act"}
    )
    shape = b.Dims.of(config)
    inner, act, count = (
        config.int("intermediate_size", low=1, high=b.MAX_SIZE),
        b.activation(config),
        b.expert_count(config),
    )
    rope, width = make_rope(config, shape.head_dim).to(w.device), kv_heads * shape.head_dim

    def router(prefix: str) -> Router:
        weight = b.router_weight(w, f"{prefix}.router.layer.weight", count, shape.hidden)
        return Router(weight, b.top_k(config, count), normalize=True)

    def stacked(name: str, height: int, depth: int) -> tuple[Weight, ...]:
        return tuple(w.stacked(f"{name}.weight", index, shape=(count, height, depth)) for index in range(count))

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        attends, feeds = f"{layer}.self_attention", f"{layer}.mlp"
        experts = zip(
            stacked(f"{feeds}.input_linear", 2 * inner, shape.hidden),
            stacked(f"{feeds}.output_linear", shape.hidden, inner),
        )
        return Block(
            MixtureOfAttention(
                router(f"{attends}.experts"),
                stacked(f"{attends}.experts.input_linear", width, shape.hidden),
                stacked(f"{attends}.experts.output_linear", shape.hidden, width),
                w.linear(f"{attends}.kv_proj.weight", shape=(2 * width, shape.hidden)),
                w.tensor(f"{attends}.experts.bias", (shape.hidden,)),
                kv_heads,
                shape.head_dim,
                rope,
            ),
            Biased(
                MixtureOfExperts(router(feeds), [MLP(up, down, act) for up, down in experts]),
                w.tensor(f"{feeds}.bias", (shape.hidden,)),
            ),
            b.norm(w, f"{layer}.input_layernorm.weight", shape.hidden, NORM_EPS),
            b.norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, NORM_EPS),
        )

    return b.decoder(w, shape, block)
