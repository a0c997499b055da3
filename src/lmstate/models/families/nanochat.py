"""nanochat (Karpathy, 2025): norms without weights, after the rotation and of the embedding too; it turns backwards.

x = norm(embed(tokens))
x = x + attention(norm(x))    # queries and keys rotated, then normalized
x = x + down(relu2(up(norm(x))))
logits = softcap(head(norm(x)))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.embedding import NormedEmbedding
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"nanochat": {"hidden_act": "relu2", "final_logit_softcapping": 15.0}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config, default="relu2")
    head_norm, rope = b.norm_after_rope(w, shape, make_rope(config, shape.head_dim).inverse().to(w.device))
    norm = b.plain_norm(w, shape.hidden, shape.eps)
    block = b.pre_norm(
        lambda _: norm,
        lambda _, name: b.attention(w, name, shape, rope, q_norm=head_norm, k_norm=head_norm),
        lambda _, name: b.ungated_mlp(w, name, shape.hidden, inner, act, ("fc1", "fc2"), biased=False),
    )
    softcap = config.float("final_logit_softcapping", low=1e-6, default=None)
    return b.decoder(w, shape, block, final_norm=norm, logit_softcap=softcap, entry=NormedEmbedding(norm))
