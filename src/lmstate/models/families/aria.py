"""Aria's text model (2410.05993): Llama's attention, and fine-grained experts beside shared ones.

x = embed(tokens)
x = x + attention(norm(x))
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)    # y = norm(x)
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader, transpose
from lmstate.models.families import builders as b
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model
from lmstate.ops import Weight

DEFAULTS: b.Defaults = {
    "aria_text": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "moe_num_experts": 8,
        "moe_topk": 2,
        "moe_num_shared_experts": 2,
    }
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, count = make_rope(config, shape.head_dim).to(w.device), b.expert_count(config)
    common = inner * config.int("moe_num_shared_experts", low=1, high=1024)

    def expert(name: str, index: int, size: tuple[int, int]) -> Weight:
        w.expect(name, (count, *reversed(size)))  # stored [experts, K, N]
        return w.derived(f"{name}[{index}]", name, make=transpose, shape=size, of=index)

    def mixture(_: int, name: str) -> MixtureOfExperts:
        router = b.router_weight(w, f"{name}.router.weight", count, shape.hidden)
        return MixtureOfExperts(
            Router(router, b.top_k(config, count, "moe_topk"), normalize=True),
            [
                MLP(
                    expert(f"{name}.experts.fc1.weight", index, (2 * inner, shape.hidden)),
                    expert(f"{name}.experts.fc2.weight", index, (shape.hidden, inner)),
                    act,
                )
                for index in range(count)
            ],
            b.mlp(w, f"{name}.shared_experts", shape.hidden, common, act),
        )

    block = b.pre_norm(b.rms_norms(w, shape), lambda _, name: b.attention(w, name, shape, rope), mixture)
    return b.decoder(w, shape, block)
