"""SmallThinker (2507.20984): each layer chooses its experts before its attention, from the stream that it is given.

x = embed(tokens)
g = experts chosen by router(x)    # no norm
x = x + attention(norm(x))         # layers without positions see everything, the others a window
x = x + sum over chosen e: g_e * down_e(relu(gate_e(y)) * up_e(y))    # y = norm(x)
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.block import Block
from lmstate.models.families import builders as b
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model
from lmstate.ops import Residual

DEFAULTS: b.Defaults = {"smallthinker": {"head_dim": 128, "rope_theta": 1e6, "tie_word_embeddings": True}}
UNLIKE = {  # what no published model has
    "moe_enable_secondary_experts": False,
    "moe_enable_early_router": True,
    "use_qk_norm": False,
}


@dataclass(frozen=True, eq=False, kw_only=True)
class EarlyRoutedBlock(Block):
    """A block whose mixture of experts reads the stream after the mixer, and its router the stream before it."""

    parallel: bool = True  # the second part reads what the first one does

    def feed(self, x: Tensor, stream: Tensor) -> Tensor:
        assert isinstance(self.mlp, MixtureOfExperts) and self.mlp_norm is not None
        weights, chosen = self.mlp.router(x.flatten(0, -2))
        y = ops.norm(stream, self.mlp_norm)
        out = self.mlp.routed(y.flatten(0, -2), weights, chosen).view_as(y)
        return ops.add_residual(Residual(stream), out)


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    for name, usual in UNLIKE.items():
        if config.bool(name, default=usual) != usual:
            raise ModelError(f"{config.where}: {name}={not usual} is not supported")
    if config.int("moe_shared_primary_experts", default=0):
        raise ModelError(f"{config.where}: shared experts of SmallThinker are not supported")
    flags = {
        name: config.ints(name, length=shape.layers, high=1, default=(usual,) * shape.layers)
        for name, usual in (("rope_layout", 1), ("sliding_window_layout", 0), ("moe_layer_layout", 1))
    }
    if not all(flags["moe_layer_layout"]):
        raise ModelError(f"{config.where}: layers of SmallThinker without experts are not supported")
    count = config.int("moe_num_primary_experts", low=1, high=b.MAX_SIZE)
    top_k = b.top_k(config, count, "moe_num_active_primary_experts")
    inner = config.int("moe_ffn_hidden_size", low=1, high=b.MAX_SIZE)
    softmax = config.bool("moe_primary_router_apply_softmax", default=False)
    rope, size = make_rope(config, shape.head_dim).to(w.device), config.int("sliding_window_size", low=1, default=4096)
    normed = b.rms_norms(w, shape)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        mixture = f"{layer}.block_sparse_moe"
        rotates, slides = flags["rope_layout"][index], flags["sliding_window_layout"][index]
        router = Router(
            b.router_weight(w, f"{mixture}.primary_router.weight", count, shape.hidden),
            top_k,
            "softmax" if softmax else "sigmoid",
            normalize=True,
        )
        names = ("gate", "up", "down")
        return EarlyRoutedBlock(
            b.attention(w, f"{layer}.self_attn", shape, rope if rotates else None, window=size if slides else None),
            MixtureOfExperts(router, b.experts(w, f"{mixture}.experts", count, shape.hidden, inner, "relu", names)),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
        )

    return b.decoder(w, shape, block)
