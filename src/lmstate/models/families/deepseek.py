"""DeepSeek-V2 (2405.04434) and V3 (2412.19437): latent attention, and experts chosen inside the best groups.

x = embed(tokens)
x = x + latent attention(norm(x))
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)    # y = norm(x); the first layers: an MLP
logits = head(norm(x))

Kimi K2 and GLM-4.7-Flash are like V3, Youtu-LLM is without experts, A.X K1 normalizes what its experts give, and
queries of Mistral 4 grow with the length of the text. DeepSeek-V3.2 (2512.02556) and GLM-5 attend to positions that an
index chooses; layers of GLM-5.2 share one choice.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.families.mistral import temperature_of
from lmstate.models.layers.mla import MultiHeadLatentAttention
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import Router
from lmstate.models.layers.position_index import EarlierChoice, PositionIndex
from lmstate.models.layers.rope import Rope, make_rope, rope_fields
from lmstate.models.model import Block, Model
from lmstate.ops import Norm

DEEPSEEK_V3 = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
DEFAULTS: b.Defaults = {
    "axk1": {
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
    },
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": {**DEEPSEEK_V3, "n_shared_experts": 1, "first_k_dense_replace": 3},
    "glm_moe_dsa": {
        **b.EPS,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "index_n_heads": 32,
    },
    "glm4_moe_lite": {**b.EPS, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "kimi_k2": DEEPSEEK_V3,
    "sarvam_mla": {"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "mistral4": {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
}

BEFORE_V3 = ("deepseek", "deepseek_v2", "deepseek_ocr2_text")

INDEXED = {"deepseek_v32": False, "glm_moe_dsa": True}
"""Families whose layers choose positions; whether the rope of their index has its pairs side by side."""
LATENT_EPS = 1e-6  # of the norms inside the attention, whatever the config says of the others


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope_dim = config.int("qk_rope_head_dim", low=2, high=b.MAX_SIZE)
    rope = _rope(config, rope_dim).to(w.device)
    temperature = temperature_of(rope_fields(config)) if config.str("model_type") == "mistral4" else None
    normed = b.rms_norms(w, shape)
    normed_after = config.str("model_type") == "axk1"  # what the experts and those beside them give together
    sparse = b.sparse_layers(config, shape.layers) if b.expert_count(config) else [False] * shape.layers
    chooses = choosing_layers(config, shape.layers) if config.str("model_type") in INDEXED else []
    indexes: list[PositionIndex] = []
    dense = b.mlp if config.bool("mlp_gated", default=True) else b.ungated_mlp  # PLM of a GGUF has no gates

    def is_sparse(index: int, prefix: str) -> bool:
        return sparse[index] if index < shape.layers else w.has(f"{prefix}.gate.weight")

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if not is_sparse(index, prefix):
            return dense(w, prefix, shape.hidden, inner, act)
        return b.deepseek_mixture(w, prefix, shape, softmax_router(w, f"{prefix}.gate.weight", shape.hidden))

    def block(index: int, layer: str = "") -> Block:
        layer = layer or f"model.layers.{index}"
        normed_last = normed_after and is_sparse(index, f"{layer}.mlp")
        after = b.first_present(w, f"{layer}.post_mlp_layernorm.weight", f"{layer}.mlp.post_mlp_layernorm.weight")
        mixer = latent_attention(w, f"{layer}.self_attn", shape, rope, rope_dim, latent_scale(config))
        if chooses and (index >= shape.layers or chooses[index]):
            indexes.append(
                position_index(w, f"{layer}.self_attn.indexer", shape, rope, INDEXED[config.str("model_type")])
            )
            mixer = replace(mixer, index=indexes[-1])
        elif chooses:
            mixer = replace(mixer, index=EarlierChoice(indexes[-1].name, indexes[-1].budget))
        return Block(
            replace(mixer, temperature=temperature),
            feed_forward(index, f"{layer}.mlp"),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            mlp_post_norm=normed(after.removesuffix(".weight")) if normed_last else None,
        )

    names = b.layers_past_the_last(w, shape.layers)
    heads = b.prediction_heads(w, shape, normed, names, partial(block, shape.layers))
    return b.decoder(w, shape, block, heads=heads, reads=choice_sources(chooses), ignore=b.mtp_tensors(config, shape))


def choosing_layers(config: Config, layers: int) -> list[bool]:
    """Whether each layer chooses positions for itself, and does not go by the choice of the last one that did."""
    kinds = list(config.strs("indexer_types", layers, allowed=("full", "shared"), default=()))
    if not kinds:
        pattern = config.str("index_topk_pattern", default="")
        every = config.int("index_topk_freq", low=1, default=1)
        first = config.int("index_skip_topk_offset", high=b.MAX_SIZE, default=2)
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern] or [
            "full" if max(layer - first + 1, 0) % every == 0 else "shared" for layer in range(layers)
        ]
    if len(kinds) != layers or kinds[0] != "full" or not set(kinds) <= {"full", "shared"}:
        raise ModelError(
            f"config: the index of {layers} layers is {kinds}; each is full or shared, and the first one is full"
        )
    return [kind == "full" for kind in kinds]


def choice_sources(chooses: list[bool]) -> list[int | None]:
    """For each layer the earlier one by whose choice it goes, if it does not choose for itself."""
    return [None if own else max(at for at in range(index) if chooses[at]) for index, own in enumerate(chooses)]


def position_index(
    w: WeightLoader, prefix: str, shape: b.Dims, rope: Rope, interleaved: bool, eps: float = LATENT_EPS
) -> PositionIndex:
    """An index of positions under DeepSeek's names: `wk`, `k_norm`, `wq_b` and `weights_proj`."""
    heads = w.config.int("index_n_heads", low=1, high=b.MAX_SIZE, default=64)
    dim = w.config.int("index_head_dim", low=1, high=b.MAX_SIZE, default=128)
    query_latent = w.config.int("q_lora_rank", low=1, high=b.MAX_SIZE)
    return PositionIndex(
        w.linear(f"{prefix}.wk.weight", shape=(dim, shape.hidden)),
        Norm(w.tensor(f"{prefix}.k_norm.weight", (dim,)), eps, "layer", w.tensor(f"{prefix}.k_norm.bias", (dim,))),
        w.linear(f"{prefix}.wq_b.weight", shape=(heads * dim, query_latent)),
        b.router_weight(w, f"{prefix}.weights_proj.weight", heads, shape.hidden),
        replace(rope, interleaved=interleaved),
        w.config.int("index_topk", low=1, default=2048),
    )


def _rope(config: Config, rope_dim: int) -> Rope:
    """Rope of the `rope_dim` features of a head that rotate."""
    interleaved = config.bool("rope_interleave", default=True)
    if config.str("model_type") == "mistral4":  # its config says which part of a head they are
        settings = {**rope_fields(config), "partial_rotary_factor": 1.0}
        config = Config({**config, "rope_parameters": settings}, config.where)
    return make_rope(config, rope_dim, interleaved=interleaved)


def latent_attention(
    w: WeightLoader,
    prefix: str,
    shape: b.Dims,
    rope: Rope | None,
    rope_dim: int,
    scale: float,
    gates: tuple[str, int] | None = None,
    value_gate: bool = False,
    eps: float = LATENT_EPS,
) -> MultiHeadLatentAttention:
    """Latent attention under DeepSeek's names: `q_proj`, or `q_a_proj` and `q_b_proj`; `kv_a_proj_with_mqa`, ...

    `gates`: the number of outputs of a projection without bias, one per head or per value. `value_gate`: the query's
    projection gives the gates of each head as well, see the layer. `eps`: of the norms of
    latents.
    """
    config = w.config
    latent = config.int("kv_lora_rank", low=1, high=b.MAX_SIZE)
    nope = config.int("qk_nope_head_dim", low=1, high=b.MAX_SIZE)
    value = config.int("v_head_dim", low=1, high=b.MAX_SIZE)
    query_latent = config.int("q_lora_rank", low=1, high=b.MAX_SIZE, default=None)
    query = shape.heads * (nope + rope_dim)
    first = "q_proj" if query_latent is None else "q_a_proj"
    width = query_latent or query
    if w.has(f"{prefix}.k_b_proj.weight"):  # already split, and the keys' transposed, as GGUF has it
        key_up = w.tensor(f"{prefix}.k_b_proj.weight", (shape.heads, latent, nope)).mT
        value_up = w.tensor(f"{prefix}.v_b_proj.weight", (shape.heads, value, latent))
    else:
        up = w.tensor(f"{prefix}.kv_b_proj.weight", (shape.heads * (nope + value), latent))
        key_up, value_up = up.view(shape.heads, nope + value, latent).split([nope, value], dim=1)
    # The plain query projection has no bias where that of the latent may have one.
    down_bias = b.biases(w, f"{prefix}.kv_a_proj_with_mqa.bias")
    names, heights = [first, "kv_a_proj_with_mqa"], [width, latent + rope_dim]
    if gates is not None:
        names, heights = [*names, gates[0]], [*heights, gates[1]]
    if down_bias is not None:
        query_bias = w.tensor(f"{prefix}.{first}.bias", (width,), optional=True)
        query_bias = down_bias.new_zeros(width) if query_bias is None else query_bias
        down_bias = torch.cat([query_bias, down_bias, down_bias.new_zeros(sum(heights[2:]))])
    q_up = None
    if query_latent is not None:
        size = (query + shape.heads * value, 2 * query_latent) if value_gate else (query, query_latent)
        name = b.first_present(w, f"{prefix}.q_b_proj.weight", f"{prefix}.q_gate_proj.weight")
        q_up = w.linear(name, shape=size)
    return MultiHeadLatentAttention(
        w.linear(*(f"{prefix}.{name}.weight" for name in names), shape=(heights, shape.hidden)),
        key_up.to(w.dtype).contiguous(),
        value_up.to(w.dtype).mT.contiguous(),
        w.linear(f"{prefix}.o_proj.weight", shape=(shape.hidden, shape.heads * value)),
        b.norm(w, f"{prefix}.kv_a_layernorm.weight", latent, eps),
        rope_dim,
        scale,
        rope,
        None if query_latent is None else b.norm(w, f"{prefix}.q_a_layernorm.weight", query_latent, eps),
        q_up,
        down_bias,
        b.biases(w, f"{prefix}.o_proj.bias"),
        0 if gates is None else gates[1],
        value_gate,
    )


def latent_scale(config: Config) -> float:
    """Scale of the scores: by the width of a key, and sharper where yarn stretched the positions."""
    width = config.int("qk_nope_head_dim", low=1, high=b.MAX_SIZE) + config.int(
        "qk_rope_head_dim", low=2, high=b.MAX_SIZE
    )
    rope = rope_fields(config)
    over = rope.float("mscale_all_dim", default=0.0)
    factor = rope.float("factor", low=1e-6, default=1.0)
    if rope.str("rope_type") == "default" or not over or factor <= 1.0:
        return width**-0.5
    return width**-0.5 * (0.1 * over * math.log(factor) + 1.0) ** 2


def softmax_router(w: WeightLoader, gate: str, hidden: int) -> Router | None:
    """The router of DeepSeek before V3, and Mistral 4's; None for DeepSeek-V3's, which others have as well."""
    config, family = w.config, w.config.str("model_type")
    if family not in (*BEFORE_V3, "mistral4"):
        return None
    count = b.expert_count(config)
    groups = config.int("n_group", low=1, high=count, default=1)
    kept = config.int("topk_group", low=1, high=groups, default=1)
    if family in BEFORE_V3:
        method = config.str("topk_method", allowed=("greedy", "group_limited_greedy"), default="greedy")
        groups, kept = (groups, kept) if method == "group_limited_greedy" else (1, 1)
    return Router(
        b.router_weight(w, gate, count, hidden),
        b.top_k(config, count),
        normalize=family in ("deepseek", "mistral4") and config.bool("norm_topk_prob", default=family == "mistral4"),
        scale=config.float("routed_scaling_factor", default=1.0),
        groups=groups,
        topk_groups=kept,
        group_score="top1" if family in BEFORE_V3 else "top2",
    )
