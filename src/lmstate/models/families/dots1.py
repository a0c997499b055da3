"""dots.llm1 (2506.05767): Qwen3's attention and DeepSeek-V3's experts.

x = embed(tokens)
x = x + attention(norm(x))                                  # queries and keys normalized head by head
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)    # y = norm(x); the first layers: an MLP
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"dots1": {"sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    rope, window = make_rope(config, shape.head_dim).to(w.device), b.layer_windows(config, shape.layers, switch=False)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = b.head_norms(w, prefix, shape)
        return b.attention(w, prefix, shape, rope, window=window[index], q_norm=q_norm, k_norm=k_norm)

    return b.decoder(w, shape, b.pre_norm(b.rms_norms(w, shape), mixer, b.deepseek_feed_forward(w, shape)))
