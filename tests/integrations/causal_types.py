"""A small config of every type that transformers calls causal: one that the tests have, or its own with small sizes."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.integrations.models import CONFIGS
from tests.zoo import CASES as ZOO

TYPES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

SMALL = {
    "vocab_size": 99, "unpadded_vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 48, "d_model": 48, "intermediate_size": 80, "dense_intermediate_size": 32, "dim_ff": 64, "dff": 64,
    "shared_intermediate_size": 16, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 4, "decoder_layers": 2, "encoder_layers": 2, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64,
    "num_attention_heads": 6, "num_key_value_heads": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "head_dim": 8, "dim_head": 8, "swa_head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "d_rel": 8,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
    "index_n_heads": 32, "index_head_dim": 16, "index_topk": 8,  # heads enough that no two scores are the same
    "max_position_embeddings": 512, "n_positions": 512, "sliding_window": 12, "rel_extent": 32,
    "hidden_dropout_prob": 0.0, "is_decoder": True,
}  # fmt: skip
LATENT = {"num_key_value_heads": 6}

OWN: dict[str, dict[str, Any]] = {
    "axk2": LATENT,
    "glm_moe_dsa": LATENT,
    "minicpm3": LATENT,
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "initializer_range": 1.0},
    "dots3_note_text": {
        "num_key_value_heads": 6, "shared_experts_intermediate_size": 16, "head_dim": 16,
        "swa_num_attention_heads": 6, "swa_num_key_value_heads": 6, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 16,
        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "reformer": {"axial_pos_embds": False},
    "xlnet": {"n_head": 6, "d_head": 8, "d_inner": 64, "n_layer": 2},
    "git": {
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14,
        },
    },
    "minimax_m3_vl_text": {"index_block_size": 8, "index_topk_blocks": 2},
    "qwen4_exp_text": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "hc_lowrank": 8, "ple_layer_ids": [1, 3],
        "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1, "indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 8, "indexer_compress_ratio": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0
        },
    },
    "roc_bert": {
        "shape_embed_dim": 8, "pronunciation_embed_dim": 8, "shape_vocab_size": 99, "pronunciation_vocab_size": 99
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}  # fmt: skip


_WITH_PICTURES = (
    "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4", "mllama",
    "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp",
)  # fmt: skip
_OF_SOUND = ("moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody")
_DRAFTS = ("gemma4_assistant", "gemma4_unified_assistant")

OUTSIDE = {
    **dict.fromkeys(_WITH_PICTURES, "its config is of a text model and one of pictures or sound"),
    **dict.fromkeys(_OF_SOUND, "reads codes of sound, not a text of ids"),
    **dict.fromkeys(_DRAFTS, "drafts from the keys of another model"),
    "blt": "reads patches of bytes that another model cuts",
}
"""Types that are not run with ids alone, and why."""
REFUSED = (
    "cpmant", "minimax", "openai-gpt", "prophetnet", "recurrent_gemma", "reformer", "rwkv", "xlm", "xlnet", "xlstm"
)  # fmt: skip
"""Types whose state transformers keeps elsewhere, or nowhere, or that read a text in another way when it is cut."""


def small(name: str) -> Any:
    """A small config of a type."""
    for case in (name, name.removesuffix("_text")):
        if (make := CONFIGS.get(case) or ZOO.get(case)) is not None:
            return make().get_text_config()
    default = AutoConfig.for_model(name)
    sizes = {key: value for key, value in SMALL.items() if key in vars(default) or key in default.attribute_map}
    return type(default)(**{**sizes, **OWN.get(name, {})})
