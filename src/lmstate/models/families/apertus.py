"""Apertus (2509.14233): Llama's block with norms on every head; the feed-forward part goes through xIELU alone.

x = embed(tokens)
x = x + attention(norm(x))    # queries and keys normalized, then rotated
x = x + down(xielu(up(norm(x))))
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate import ops
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model
from lmstate.ops import Norm, Residual, Weight

APERTUS = {
    **b.EPS,
    "rope_scaling": {
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
DEFAULTS: b.Defaults = {"apertus": APERTUS, "apertus1p5_text": {**APERTUS, "hidden_act": "xielu"}}


@dataclass(frozen=True, eq=False)
class XieluMLP:
    """`down(xielu(up x))`: a parabola above 0 and an exponential below, whose bends are learned (2411.13010).

    `bends` float32 `[2]`, above and below; `slope` at 0. `floor`: what the exponential is computed from at most.
    """

    up: Weight
    down: Weight
    bends: Tensor
    slope: float = 0.5
    floor: float = -1e-6

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        hidden = ops.linear(x, self.up, norm=norm)
        above, below = self.bends
        bent = torch.where(hidden > 0, above * hidden.square(), below * (hidden.clamp(max=self.floor).expm1() - hidden))
        return ops.linear(bent + self.slope * hidden, self.down, residual=residual)


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), config.str("hidden_act", default="xielu")
    rope = make_rope(config, shape.head_dim).to(w.device)

    def mixer(_: int, name: str) -> Attention:
        q_norm, k_norm = b.head_norms(w, name, shape)
        return b.attention(w, name, shape, rope, q_norm=q_norm, k_norm=k_norm)

    def learned(index: int, name: str, part: str) -> Tensor:
        """A number of a layer's activation, float32 `[1]`; GGUF has those of all layers in its metadata."""
        if config.given(f"xielu_{part}"):
            number = config.floats(f"xielu_{part}", shape.layers)[index]
            return torch.tensor([number], dtype=torch.float32, device=w.device)
        return w.tensor(f"{name}.act_fn.{part}", (1,) if part.startswith("alpha") else ()).reshape(1)

    def feed_forward(index: int, name: str) -> FeedForward:
        if act != "xielu":
            return b.ungated_mlp(w, name, shape.hidden, inner, b.activation(config))
        above, below, slope, floor = (learned(index, name, part) for part in ("alpha_p", "alpha_n", "beta", "eps"))
        return XieluMLP(
            w.linear(f"{name}.up_proj.weight", shape=(inner, shape.hidden)),
            w.linear(f"{name}.down_proj.weight", shape=(shape.hidden, inner)),
            torch.cat([F.softplus(above), slope + F.softplus(below)]),
            b.number(slope),
            b.number(floor),
        )

    names = ("attention_layernorm", "self_attn", "feedforward_layernorm", "mlp")
    return b.decoder(w, shape, b.pre_norm(b.rms_norms(w, shape), mixer, feed_forward, names))
