"""DeepSeekMoE (2401.06066): Llama's attention, and fine-grained experts beside shared ones; DeepSeek-OCR 2's text part.

x = embed(tokens)
x = x + attention(norm(x))
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)   # y = norm(x); the first layers are dense
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.families.deepseek import softmax_router
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "deepseek_ocr2_text": {
        **b.LLAMA,
        "vocab_size": 102_400,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
}
TOWERS = ("model.qwen2_model.*", "model.sam_model.*", "model.projector.*", "model.view_seperator")


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope = make_rope(config, shape.head_dim).to(w.device)
    sparse = b.sparse_layers(config, shape.layers) if b.expert_count(config) else [False] * shape.layers

    def feed_forward(index: int, name: str) -> FeedForward:
        if not sparse[index]:
            return b.mlp(w, name, shape.hidden, inner, act)
        return b.deepseek_mixture(w, name, shape, softmax_router(w, f"{name}.gate.weight", shape.hidden))

    block = b.pre_norm(b.rms_norms(w, shape), lambda _, name: b.attention(w, name, shape, rope), feed_forward)
    return b.decoder(w, shape, block, ignore=TOWERS if config.str("model_type") == "deepseek_ocr2_text" else ())
