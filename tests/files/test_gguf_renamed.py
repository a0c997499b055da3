"""Architectures of GGUF that are a family here under another name, or that hold its tensors otherwise.

They are converted here as llama.cpp does it, under the names that the gguf package has; their logits are those of
transformers on the original.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from lmstate.errors import ModelError
from tests.files.test_gguf_attention import loaded, same
from tests.zoo import CASES, auto, randomize
from tests.zoo.small import config as small

F, S = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class File:
    """What is special about a file: its model, keys beside the sizes, and how its tensors lie.

    `model`: a case of the zoo, or the class of a config and its fields. `paired`: rows of q and k lie in ggml's order.
    `fused`: q, k and v are one tensor. `names`: parts of names for which the gguf package has none. `altered` puts
    other parts into the model, where transformers has no such one.
    """

    model: str | tuple[str, dict[str, Any]]
    more: dict[str, Any] = field(default_factory=dict)
    paired: bool = False
    fused: bool = False
    names: dict[str, str] = field(default_factory=dict)
    altered: Callable[[Any], None] | None = None


def _llama(**changes: Any) -> tuple[str, dict[str, Any]]:
    return "LlamaConfig", {"head_dim": 8, **changes}


class Parts(torch.nn.Module):
    """A feed-forward part, gated or with squares of what is above zero; `residual`: which Bloom has added inside."""

    def __init__(self, hidden: int, inner: int, gated: bool) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden, inner) if gated else None
        self.up_proj, self.down_proj = (
            torch.nn.Linear(wide, narrow, bias=gated) for wide, narrow in ((hidden, inner), (inner, hidden))
        )

    def forward(self, x: Tensor, residual: Tensor | float = 0.0) -> Tensor:
        up = self.up_proj(x)
        inner = up.relu() ** 2 if self.gate_proj is None else torch.nn.functional.silu(self.gate_proj(x)) * up
        return residual + self.down_proj(inner)


def as_plm(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = Parts(48, 80, gated=False)


def as_jais(model: Any) -> None:
    model.transformer.word_embeddings_layernorm = torch.nn.Identity()
    for layer in model.transformer.h:
        layer.mlp = Parts(48, 100, gated=True)
        layer.self_attention.inv_norm_factor **= 2


def as_plamo(model: Any) -> None:
    model.model.norm = torch.nn.RMSNorm(48, 1e-5)
    for layer in model.model.layers:
        layer.input_layernorm = torch.nn.RMSNorm(48, 1e-5)


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}  # fmt: skip
GRANITE = {"attention.scale": 0.4, "embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 2.0}
GRANITE_MODEL = {
    "attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 2.0,
}  # fmt: skip
KDA = {"kda.head_dim": 8, "ssm.conv_kernel": 4, "rope.dimension_count": 8, "attention.key_length_mla": 20,
       "attention.value_length_mla": 10, "attention.kv_lora_rank": 16, "expert_feed_forward_length": 24,
       "expert_shared_count": 1, "leading_dense_block_count": 1}  # fmt: skip
KDA_NAMES = {
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.b_proj": "ssm_beta", "self_attn.o_norm": "ssm_norm", "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}  # fmt: skip
MIMO_WINDOWS = [False, True, True, True]

FILES: dict[str, File] = {
    "baichuan": File(_llama(), paired=True),
    "chatglm": File("glm", {"rope.dimension_count": 8}, fused=True),
    "chatglm-apart": File(("GlmConfig", {"head_dim": 16}), {"rope.dimension_count": 8}),
    "exaone": File("exaone"),
    "internlm2": File(_llama(num_key_value_heads=3), paired=True),
    "jais2": File("jais2"),
    "minicpm": File(
        ("GraniteConfig", {**GRANITE_MODEL, "attention_multiplier": 8**-0.5}), {**GRANITE, "attention.scale": 1.0},
        paired=True,
    ),
    "minicpm-silent": File(
        ("GraniteConfig", {"attention_multiplier": 8**-0.5, "embedding_multiplier": 12.0, "logits_scaling": 48 / 256,
                           "residual_multiplier": 1.4 / 3**0.5}), paired=True,
    ),
    "muse-glimmer": File(
        "muse_glimmer",
        {"attention.sliding_window": 14, "attention.sliding_window_pattern": [True, True, True, False],
         "final_logit_softcapping": 20.0, "logit_scale": 0.19611613513818404},
        paired=True,
        names={
            "self_attn.gate_proj": "attn_gate", "input_layernorm": "attn_norm",
            "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
    ),
    "olmo2": File("olmo2"),
    "olmo2-windows": File("olmo3", {"attention.sliding_window": 12}),
    "olmo2-yarn": File(
        "olmo3-yarn",
        {**YARN, "rope.scaling.factor": 4.0, "attention.sliding_window": 50,
         "attention.sliding_window_pattern": [False, True, True]},
    ),
    "orion": File(("StableLmConfig", {"partial_rotary_factor": 1.0, "use_qkv_bias": False})),
    "pangu-embedded": File(_llama(attention_bias=True)),
    "qwen": File(("Qwen2Config", {"num_key_value_heads": 6}), {"feed_forward_length": 160}, fused=True),
    "starcoder": File("gpt_bigcode", {"attention.head_count_kv": 1}),
    "xverse": File(_llama(tie_word_embeddings=True), paired=True),
    "bloom": File("bloom-untied"),
    "mpt": File(
        ("MptConfig", {"num_attention_heads": 4, "max_seq_len": 512, "attn_config": {"clip_qkv": 2.0}}),
        {"attention.clamp_kqv": 2.0, "attention.max_alibi_bias": 8.0, "feed_forward_length": 192},
    ),
    "jais": File(
        "bloom-untied", {"feed_forward_length": 100, "attention.max_alibi_bias": 8.0}, altered=as_jais,
        names={f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    ),
    "plamo": File(
        ("StableLmConfig", {"partial_rotary_factor": 1.0, "use_qkv_bias": False, "use_parallel_residual": True}),
        altered=as_plamo,
    ),
    "plm": File(
        ("DeepseekV2Config", {"first_k_dense_replace": 9, "q_lora_rank": None, "kv_lora_rank": 20, "v_head_dim": 12,
                              "num_key_value_heads": 6,
                              "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "tie_word_embeddings": True}),
        {"expert_count": None, "expert_used_count": None, "attention.kv_lora_rank": 20, "attention.key_length": 24,
         "attention.value_length": 12, "rope.dimension_count": 8}, altered=as_plm,
    ),
    "bitnet": File(
        ("BitNetConfig", {"hidden_act": "silu", "tie_word_embeddings": True}),
        names={"self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"},
    ),
    "paddleocr": File("paddleocr_vl"),
    "hunyuan_vl": File("hunyuan_vl", {"rope.freq_base": 1000.0 * 50.0 ** (16 / 14)}),
    "deepseek": File(
        "deepseek_ocr2", {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 1.5},
        paired=True,
    ),
    "bailingmoe2": File(
        ("Glm4MoeConfig", {"head_dim": 16, "use_qk_norm": True, "n_routed_experts": 8, "num_experts_per_tok": 3,
                           "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
                           "first_k_dense_replace": 1, "n_shared_experts": 2}),
        {"rope.dimension_count": 8, "leading_dense_block_count": 1, "expert_shared_count": 2, "expert_group_count": 4,
         "expert_group_used_count": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True}, fused=True,
    ),
    "minicpm3": File(
        ("MiniCPM3Config", {"q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                            "v_head_dim": 8, "num_key_value_heads": 6, "scale_emb": 12, "scale_depth": 1.4,
                            "dim_model_base": 256}),
        {"attention.key_length": 24, "rope.dimension_count": 8, "attention.q_lora_rank": 12,
         "attention.kv_lora_rank": 20},
    ),
    "step35": File(
        "step3p5",
        {"attention.head_count": [6, 8, 8, 6], "attention.sliding_window": 14, "rope.freq_base": 5000.0,
         "attention.sliding_window_pattern": [False, True, True, False], "rope.freq_base_swa": 1000.0,
         "expert_shared_feed_forward_length": 40, "expert_weights_scale": 2.0,
         "swiglu_clamp_exp": [0.0, 0.05, 0.0, 0.0], "swiglu_clamp_shexp": [0.0, 0.04, 0.06, 0.0]},
        names={"self_attn.g_proj": "attn_gate"},
    ),
    "bailingmoe": File(  # as Granite's: a softmax over the chosen, and a shared part
        ("GraniteMoeSharedConfig", {"attention_multiplier": 8**-0.5, "intermediate_size": 24, "num_local_experts": 6,
                                    "num_experts_per_tok": 2, "shared_intermediate_size": 48}),
        {"leading_dense_block_count": 0, "expert_shared_count": 2, "expert_weights_scale": 1.0,
         "expert_weights_norm": True, "expert_feed_forward_length": 24, "feed_forward_length": 80}, paired=True,
    ),
    "codeshell": File(
        ("Starcoder2Config", {"sliding_window": None, "tie_word_embeddings": False, "hidden_act": "gelu_pytorch_tanh"}),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, fused=True,
    ),
    "cohere2moe": File(
        ("Cohere2MoeConfig", {"head_dim": 16, "intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2,
                              "num_shared_experts": 2, "sliding_window": 14, "num_hidden_layers": 5, "logit_scale": 0.5,
                              "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 64, "layer_norm_eps": 1e-5,
                              "expert_selection_fn": "sigmoid", "tie_word_embeddings": True}),
        {"attention.sliding_window": 14, "attention.sliding_window_pattern": [False, True, True, True, False],
         "logit_scale": 0.5, "leading_dense_block_count": 1, "expert_feed_forward_length": 24, "expert_gating_func": 2,
         "feed_forward_length": 64, "expert_shared_count": 2, "expert_weights_norm": True},
    ),
    "cohere2moe-rms": File(
        ("Cohere2MoeConfig", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 3, "num_shared_experts": 0,
                              "layer_types": [S, F, F], "mlp_layer_types": ["sparse"] * 3, "rms_norm_eps": 1e-6,
                              "sliding_window": 33, "logit_scale": 1.0, "norm_topk_prob": False,
                              "expert_selection_fn": "sigmoid", "tie_word_embeddings": False}),
        {"attention.sliding_window": 33, "attention.sliding_window_pattern": [True, False, False], "logit_scale": 1.0,
         "leading_dense_block_count": 0, "expert_feed_forward_length": 80, "attention.layer_norm_epsilon": None,
         "attention.layer_norm_rms_epsilon": 1e-6},
    ),
    "deepseek2-ocr": File(
        "deepseek_ocr2", {"leading_dense_block_count": 1, "expert_shared_count": 2, "rope.dimension_count": 0,
                          "expert_weights_scale": 1.5},
    ),
    "granite_swa": File(
        ("GraniteSWAConfig", {**GRANITE_MODEL, "sliding_window": 14, "layer_types": [S, F, S],
                              "layer_rope_theta": [10000.0, 0, 10000.0], "attention_bias": True, "mlp_bias": True}),
        {**GRANITE, "attention.sliding_window": 14, "attention.sliding_window_pattern": [True, False, True],
         "attention.rope_pattern": [True, False, True]},
        paired=True, names={"self_attn.sinks": "attn_sinks"},
    ),
    "granite_swa-shared": File(
        ("GraniteMoeSWAConfig", {**GRANITE_MODEL, "sliding_window": 14, "layer_types": [F, S, S],
                                 "num_local_experts": 4, "num_experts_per_tok": 3, "shared_intermediate_size": 40}),
        {**GRANITE, "attention.sliding_window": 14, "attention.sliding_window_pattern": [False, True, True],
         "expert_shared_feed_forward_length": 40}, paired=True, names={"self_attn.sinks": "attn_sinks"},
    ),
    "hy_v3": File(
        ("HYV3Config", {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                        "num_shared_experts": 2, "router_scaling_factor": 1.5,
                        "mlp_layer_types": ["dense", "sparse", "sparse"]}),
        {"expert_shared_feed_forward_length": 48, "expert_weights_scale": 1.5, "expert_weights_norm": True,
         "block_count": 4, "nextn_predict_layers": 1},
    ),
    "maincoder": File(("HunYuanDenseV1Config", {"head_dim": 16}), {"rope.dimension_count": 16}, paired=True),
    "dbrx": File("dbrx", {"attention.clamp_kqv": 0.7, "attention.head_count_kv": 2, "feed_forward_length": 24}),
    "granitemoe": File(
        ("GraniteMoeConfig", {**GRANITE_MODEL, "num_local_experts": 5, "num_experts_per_tok": 2}), GRANITE, paired=True
    ),
    "granitemoe-shared": File(
        ("GraniteMoeSharedConfig", {**GRANITE_MODEL, "num_local_experts": 4, "num_experts_per_tok": 3,
                                    "shared_intermediate_size": 40}), GRANITE, paired=True,
    ),
    "laguna": File(
        "laguna",
        {"attention.sliding_window": 15, "expert_shared_feed_forward_length": 32, "expert_weights_scale": 1.5,
         "leading_dense_block_count": 1, "attention.head_count": [6, 4, 2], "rope.dimension_count": 8,
         "rope.freq_base": 5e5, "rope.freq_base_swa": 1e4, "rope.dimension_count_swa": 16},
        names={"self_attn.g_proj": "attn_gate"},
    ),
    "llama4": File(
        ("Llama4TextConfig", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 4,
                              "intermediate_size_mlp": 64, "attention_chunk_size": 32,
                              "interleave_moe_layer_step": 2}),
        {"expert_feed_forward_length": 80, "interleave_moe_layer_step": 2, "attention.sliding_window": 32},
    ),
    "mellum": File(
        ("MellumConfig", {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "layer_types": [S, F, S],
                          "moe_intermediate_size": 24, "sliding_window": 15,
                          "rope_parameters": {F: {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                                                  "original_max_position_embeddings": 64, "beta_fast": 32.0,
                                                  "beta_slow": 1.0},
                                              S: {"rope_type": "default", "rope_theta": 500.0}}}),
        {**YARN, "attention.sliding_window": 15, "attention.sliding_window_pattern": [True, False, True],
         "rope.freq_base_swa": 500.0, "expert_feed_forward_length": 24},
    ),
    "mimo2": File(
        "mimo_v2_flash",
        {"attention.sliding_window": 15, "attention.sliding_window_pattern": [*MIMO_WINDOWS, True],
         "attention.head_count_kv": [1, 2, 2, 2, 2], "attention.value_length": 8, "attention.value_scale": 0.707,
         "block_count": 5, "nextn_predict_layers": 1, "expert_feed_forward_length": 24, "rope.dimension_count": 4,
         "rope.freq_base": 5e6, "rope.freq_base_swa": 1e4},
        names={"self_attn.attention_sink_bias": "attn_sinks", "self_attn.sinks": "attn_sinks"},
    ),
    "minimax-01": File(
        ("MiniMaxConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 32, "head_dim": 16,
                           "num_hidden_layers": 4,
                           **{f"{part}_alpha_factor": 1.5 for part in ("full_attn", "linear_attn", "mlp")}}),
        {"residual_scale": 1.5, "rope.freq_base": 1e6},
        names={"self_attn.norm": "attn_norm_2", "self_attn.qkv_proj": "attn_qkv", "self_attn.output_gate": "attn_gate",
               "self_attn.out_proj": "attn_output"},
    ),
    "phimoe": File(
        ("PhimoeConfig", {"intermediate_size": 24, "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True,
                          "sliding_window": 30, "num_experts_per_tok": 2}),
        {"attention.sliding_window": 30}, fused=True,
    ),
    "bailingmoe3": File(
        "bailing_hybrid",
        {**KDA, "kda.head_dim": 16, "kda.gate_lower_bound": -5.0, "kda.safe_gate": True, "expert_group_count": 4,
         "expert_group_used_count": 2, "expert_weights_scale": 1.5, "expert_weights_norm": True,
         "rope.freq_base": 6e6, "rope.scaling.type": "none"},
        names={**KDA_NAMES, "self_attn.f_proj": "ssm_f_a"},
    ),
    "kimi-linear": File(
        ("KimiLinearConfig", {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16,
                              "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "linear_head_dim": 8,
                              "linear_num_heads": 4, "num_local_experts": 6, "num_experts_per_tok": 2,
                              "moe_intermediate_size": 24, "num_hidden_layers": 5, "routed_scaling_factor": 2.446}),
        {**KDA, "expert_weights_scale": 2.446, "attention.head_count_kv": [0, 0, 0, 0, 1]}, names=KDA_NAMES,
    ),
    "mistral4": File(
        "mistral4",
        {**YARN, "rope.scaling.yarn_log_multiplier": 0.1, "attention.temperature_scale": 0.4,
         "attention.temperature_length": 64, "attention.q_lora_rank": 12, "attention.kv_lora_rank": 20,
         "rope.dimension_count": 8, "attention.key_length": 28, "attention.value_length": 20,
         "attention.key_length_mla": 24, "attention.value_length_mla": 12, "expert_feed_forward_length": 24,
         "expert_shared_count": 1, "expert_weights_norm": True},
        names={"self_attn.k_b_proj": "attn_k_b", "self_attn.v_b_proj": "attn_v_b"},
    ),
}  # fmt: skip


def first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def metadata(arch: str, config: Any, file: File) -> dict[str, Any]:
    config = config.get_text_config()
    if arch == "step35":
        config.allow_global_per_layer_attribute_access = True
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    eps = first(config, "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps", "layernorm_epsilon")
    values = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": first(config, "n_inner", "intermediate_size_mlp", "intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": first(config, "num_key_value_heads") or heads,
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "attention.layer_norm_rms_epsilon": eps or 1e-5,
        "attention.layer_norm_epsilon": eps or 1e-5,
        "context_length": config.max_position_embeddings,
        "rope.freq_base": rope.get("rope_theta") or rope.get(F, {}).get("rope_theta") or 10000.0,
        "expert_count": first(config, "num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": first(config, "num_experts_per_tok"),
        "expert_feed_forward_length": first(config, "moe_intermediate_size"),
    }
    if arch == "dbrx":
        values |= {"expert_count": config.ffn_config.moe_num_experts, "expert_used_count": config.ffn_config.moe_top_k}
    values |= file.more
    return {f"{arch}.{key}": value for key, value in values.items() if value is not None}


@cache
def names_of(arch: str, layers: int) -> dict[str, str]:
    """Names in checkpoints -> names in files: those of the architecture, and for one that is newer than the installed
    gguf package those of any other."""
    known = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]
    found: dict[str, str] = {}
    for kind in (gguf.MODEL_ARCH.AFMOE, gguf.MODEL_ARCH.KIMI_LINEAR, gguf.MODEL_ARCH.MISTRAL4, *known):
        found |= {name: new for name, (_, new) in gguf.get_tensor_name_map(kind, layers).mapping.items()}
    return found


def converted(arch: str, theirs: Any, file: File) -> dict[str, np.ndarray]:
    config = theirs.config.get_text_config()
    names = names_of(arch, config.num_hidden_layers)
    out: dict[str, Tensor] = {}
    wraps = config is not theirs.config
    for full, tensor in theirs.state_dict().items():
        if full.endswith((".attn.bias", "masked_bias", "_decay", "slope_rate")):
            continue
        if wraps and not full.startswith(("model.language_model.", "lm_head.")):
            continue
        full = full.replace("language_model.", "")
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for name, value in changed(arch, config, full, tensor, file):
            if name.startswith("blk."):
                out[name] = value
                continue
            stem, _, ending = name.replace(".forget_gate", "").rpartition(".")
            match = re.match(r"\w+\.(?:layers|h|blocks)\.(\d+)\.(.+)", stem)
            own = file.names.get(match[2]) if match else None
            known = names.get(stem) or names.get(stem.removeprefix("transformer."))
            out[f"{f'blk.{match[1]}.{own}' if match and own else known}.{ending}"] = value
    if file.fused:
        for layer in range(config.num_hidden_layers):
            for ending in ("weight", "bias"):
                parts = [out.pop(f"blk.{layer}.attn_{part}.{ending}", None) for part in "qkv"]
                if parts[0] is not None:
                    out[f"blk.{layer}.attn_qkv.{ending}"] = torch.cat(parts)
    return {name: np.ascontiguousarray(tensor.detach().float().numpy()) for name, tensor in out.items()}


def changed(arch: str, config: Any, full: str, tensor: Tensor, file: File) -> Iterator[tuple[str, Tensor]]:
    """A tensor as the converter writes it, under names that end in weight or bias; some become several."""
    layer = ".".join(full.split(".")[:3])
    blk = f"blk.{full.split('.')[2]}" if full.count(".") > 2 else ""
    if arch == "muse-glimmer" and full.endswith("self_attn.q_proj.weight"):  # norms of heads without weights
        yield f"{blk}.attn_q_norm.weight", torch.full((config.head_dim,), config.qk_scale_factor)
        yield f"{blk}.attn_k_norm.weight", torch.ones(config.head_dim)
    if file.paired and re.search(r"\.[qk]_proj\.", full):
        heads = len(tensor) // (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        yield full, tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    elif arch == "maincoder" and full.endswith(("query_layernorm.weight", "key_layernorm.weight")):
        yield full, tensor.view(2, -1).T.flatten()
    elif "query_key_value" in full and arch in ("bloom", "jais"):
        parted = tensor.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        yield full, parted
    elif (arch == "step35" and full.endswith("norm.weight")) or (arch == "muse-glimmer" and "layernorm" in full):
        yield full, tensor + 1
    elif ".shared_experts." in full and arch == "step35":
        yield f"{blk}.ffn_{full.split('.')[-2].removesuffix('_proj')}_shexp.weight", tensor
    elif full.endswith("experts.gate_up_proj"):
        tensor = tensor.mT if arch == "llama4" else tensor
        yield from ((f"{blk}.ffn_{part}_exps.weight", half) for part, half in zip(("gate", "up"), tensor.chunk(2, 1)))
    elif full.endswith("experts.down_proj"):
        yield f"{blk}.ffn_down_exps.weight", tensor.mT if arch == "llama4" else tensor
    elif full.endswith("e_score_correction_bias"):
        yield f"{blk}.exp_probs_b{'' if arch == 'hy_v3' else '.bias'}", tensor
    elif full.endswith("kv_b_proj.weight") and arch not in ("minicpm3", "plm"):
        value, key = config.v_head_dim, config.qk_nope_head_dim
        keys, values = tensor.view(-1, key + value, tensor.shape[-1]).split([key, value], dim=1)
        yield f"{layer}.self_attn.k_b_proj.weight", keys.transpose(1, 2)
        yield f"{layer}.self_attn.v_b_proj.weight", values
    elif full.endswith("A_log"):
        rate = tensor.exp().reshape(-1, 1)
        yield f"{blk}.ssm_a", rate if arch == "bailingmoe3" else -rate.view(1, 1, -1, 1)
    elif full.endswith("dt_bias"):
        yield f"{blk}.ssm_dt.bias", tensor
    elif full.endswith("self_attn.conv1d.weight"):
        for part, taps in zip("qkv", tensor.chunk(3)):
            yield f"{layer}.self_attn.{part}_conv1d.weight", taps.transpose(0, 1)[None]
    elif full.endswith("conv1d.weight"):
        yield full, tensor.transpose(0, 1)[None]  # [1, 1, F, C] in numpy's order
    elif full.endswith(("sinks", "attention_sink_bias")):
        yield f"{full}.weight", tensor
    elif ".shared_mlp.input_linear" in full and arch == "granite_swa":
        yield f"{blk}.ffn_up_shexp.weight", tensor
    elif ".shared_mlp.input_linear" in full or ".block_sparse_moe.input_linear" in full:
        end = "shexp" if "shared_mlp" in full else "exps"
        yield from ((f"{blk}.ffn_{part}_{end}.weight", half) for part, half in zip(("gate", "up"), tensor.chunk(2, -2)))
    elif ".shared_mlp.output_linear" in full or ".block_sparse_moe.output_linear" in full:
        yield f"{blk}.ffn_down_{'shexp' if 'shared_mlp' in full else 'exps'}.weight", tensor
    elif ".experts.mlp." in full:
        kind = {"w1": "gate", "v1": "up", "w2": "down"}[full[-2:]]
        stacked = tensor.view(config.ffn_config.moe_num_experts, -1, tensor.shape[-1])
        yield f"{blk}.ffn_{kind}_exps.weight", stacked.mT if kind == "down" else stacked
    elif full.endswith(("mlp.gate.weight", "router.weight")):
        yield f"{blk}.ffn_gate_inp.weight", tensor
    else:
        yield full, tensor


def model_of(file: File) -> Any:
    config = CASES[file.model]() if isinstance(file.model, str) else small(file.model[0], **file.model[1])
    torch.manual_seed(0)
    model = auto(config).from_config(config, dtype=torch.float32).eval()
    if file.altered is not None:
        file.altered(model)
    randomize(model)
    return model


@pytest.mark.parametrize("case", FILES)
def test_a_renamed_model_from_gguf(case: str, tmp_path: Path) -> None:
    arch, file = re.sub("-(apart|silent|shared|rms|windows|yarn)$", "", case), FILES[case]
    theirs = model_of(file)
    values, tensors = metadata(arch, theirs.config, file), converted(arch, theirs, file)
    same(loaded(tmp_path, arch, values, tensors), theirs)


def test_projections_in_one_tensor_of_another_height_are_refused(tmp_path: Path) -> None:
    theirs = model_of(FILES["qwen"])
    values, tensors = metadata("qwen", theirs.config, FILES["qwen"]), converted("qwen", theirs, FILES["qwen"])
    tensors["blk.1.attn_qkv.weight"] = tensors["blk.1.attn_qkv.weight"][:-1]
    with pytest.raises(ModelError, match=r"blk\.1\.attn_qkv"):
        loaded(tmp_path, "qwen", values, tensors)


def test_rates_that_are_negative_are_refused(tmp_path: Path) -> None:
    file = FILES["bailingmoe3"]
    theirs = model_of(file)
    values, tensors = metadata("bailingmoe3", theirs.config, file), converted("bailingmoe3", theirs, file)
    tensors["blk.0.ssm_a"] = -tensors["blk.0.ssm_a"]
    with pytest.raises(ModelError, match="must be positive"):
        loaded(tmp_path, "bailingmoe3", values, tensors)


def uneven(kind: str, kv_heads: list[int], inner: list[int], **fields: Any) -> Any:
    """A model of `transformers` whose layers have heads and widths of their own."""
    import transformers

    theirs = model_of(File((f"{kind}Config", {"head_dim": 8, "num_hidden_layers": len(inner), **fields})))
    module = getattr(transformers.models, kind.lower())
    code = getattr(module, f"modeling_{kind.lower()}")
    for index, layer in enumerate(theirs.model.layers):
        own = small(f"{kind}Config", head_dim=8, **fields)
        own.num_key_value_heads, own.intermediate_size = kv_heads[index] or 1, inner[index]
        own.num_attention_heads = 6 if kv_heads[index] != 4 else 4
        own._attn_implementation = theirs.config._attn_implementation
        layer.self_attn = getattr(code, f"{kind}Attention")(own, index)
        layer.mlp = getattr(code, f"{kind}MLP")(own)
    randomize(theirs.eval())
    return theirs


def test_layers_of_their_own_widths_and_some_without_attention(tmp_path: Path) -> None:
    kv_heads, inner = [2, 0, 6, 4, 0], [80, 32, 100, 64, 16]
    theirs = uneven("Llama", kv_heads, inner)
    for index in (1, 4):
        torch.nn.init.zeros_(theirs.model.layers[index].self_attn.o_proj.weight)
    torch.nn.init.zeros_(theirs.model.layers[4].mlp.down_proj.weight)
    file = File(_llama(), {
        "attention.head_count": [6, 0, 6, 4, 0], "attention.head_count_kv": kv_heads,
        "feed_forward_length": [80, 32, 100, 64, 0],
    }, paired=True)  # fmt: skip
    left = re.compile(r"blk\.(1\.attn|4)\w*\.")
    tensors = {name: x for name, x in converted("deci", theirs, file).items() if not left.match(name)}
    same(loaded(tmp_path, "deci", metadata("deci", theirs.config, file), tensors), theirs)


def test_attention_that_is_one_matrix_is_refused(tmp_path: Path) -> None:
    theirs = uneven("Llama", [2, 2], [80, 80])
    file = File(_llama(), {"attention.head_count": [6, 6], "attention.head_count_kv": [2, 0]}, paired=True)
    tensors = converted("deci", theirs, file)
    for part in "qk":
        del tensors[f"blk.1.attn_{part}.weight"]
    with pytest.raises(ModelError, match="layer 1 has 6 heads over 0 of keys"):
        loaded(tmp_path, "deci", metadata("deci", theirs.config, file), tensors)


def test_openelm(tmp_path: Path) -> None:
    kv_heads, inner = [2, 6, 4], [80, 100, 64]
    theirs = uneven("Qwen3", kv_heads, inner, tie_word_embeddings=True)
    file = File(_llama(), {
        "attention.head_count": [6, 6, 4], "attention.head_count_kv": kv_heads, "feed_forward_length": inner,
        "rope.dimension_count": 8,
    }, fused=True)  # fmt: skip
    tensors = converted("openelm", theirs, file)
    same(loaded(tmp_path, "openelm", metadata("openelm", theirs.config, file), tensors), theirs)


class Falling(torch.nn.Module):
    """A Llama of `transformers` without rotations, whose scores fall with the distance: by its mask."""

    def __init__(self, llama: Any) -> None:
        super().__init__()
        self.llama, self.config = llama, llama.config

    def forward(self, tokens: Tensor) -> Any:
        rows, length = tokens.shape
        at, heads = torch.arange(length), self.config.num_attention_heads
        slopes = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32).view(heads, 2)[:, 1]
        mask = slopes[:, None, None] * (at - at[:, None]).tril() + torch.full((length, length), -torch.inf).triu(1)
        return self.llama(tokens, attention_mask=mask.expand(rows, -1, -1, -1), position_ids=torch.zeros_like(tokens))


@pytest.mark.parametrize(("arch", "layers", "kv_heads"), [("baichuan", 40, 6), ("refact", 3, 1)])
def test_models_of_llamas_layers_whose_scores_fall(arch: str, layers: int, kv_heads: int, tmp_path: Path) -> None:
    changes = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "attn_implementation": "eager"}
    file = File(_llama(**changes), paired=arch == "baichuan")
    theirs = model_of(file)
    values, tensors = metadata(arch, theirs.config, file), converted(arch, theirs, file)
    same(loaded(tmp_path, arch, values, tensors), Falling(theirs))
