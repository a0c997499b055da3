"""Text parts of models that also see, each inside its wrapper, whose towers are as small as their classes let them be.

Positions that have several axes are the same on all of them in a text.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.small import SIZES, F, S, tower

_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
_EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}


BESIDE = {
    "Granite4Vision": {
        "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [0, 1, 2, 1], "downsample_rate": "1/2",
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 16, "image_size": 28, "patch_size": 14,
        },
        "qformer_config": {
            "model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 16,
            "cross_attention_frequency": 1,
        },
    },
    "MuseGlimmer": {"image_token_id": 200, "video_token_id": 201},  # of no text: their embeddings are left out
    "Inkling2": {
        "vision_config": {
            "model_type": "inkling2_vision", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "patch_size": 2, "posemb_grid_size": 2, "projection_hidden_dim": 16, "text_hidden_size": 48,
        }
    },
    "Inkling": {
        "vision_config": {
            "model_type": "inkling_vision", "hidden_size": 16, "num_hidden_layers": 4, "patch_size": 2,
            "num_attention_heads": 2,
        }
    },
}  # fmt: skip


def seeing(name: str, tied: bool = False, **changes: Any) -> Any:
    """A wrapper's config with small towers around a small text part."""
    import transformers

    own = getattr(transformers, f"{name}Config")
    default = own()
    text = type(default.text_config)(**{**SIZES, "tie_word_embeddings": tied, **changes})
    parts = {
        part: tower(value)
        for part, value in vars(default).items()
        if part != "text_config" and isinstance(value, transformers.PretrainedConfig)
    }
    known = default.to_dict()
    marks = {key: 98 for key in known if key.endswith(("_token_id", "_token_index")) and known[key] is not None}
    return own(text_config=text, tie_word_embeddings=tied, **{**parts, **marks, **BESIDE.get(name, {})})


def _sections(*sections: int, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**_ROPE, "mrope_section": list(sections), **changes}}


CASES = {
    "glm4v": partial(seeing, "Glm4v", **_sections(1, 1, 1, partial_rotary_factor=0.75)),
    "glm_ocr": partial(seeing, "GlmOcr", head_dim=16, tied=True, **_sections(4, 2, 2)),
    "glm4v_moe": partial(
        seeing, "Glm4vMoe", head_dim=16, n_shared_experts=1, **{**_EXPERTS, "n_routed_experts": 9},
        **_sections(2, 1, 1, partial_rotary_factor=0.5),
    ),
    "paddleocr_vl": partial(seeing, "PaddleOCRVL", head_dim=16, tied=True, **_sections(4, 2, 2)),
    "hunyuan_vl": partial(
        seeing, "HunYuanVL", head_dim=16, tied=True,
        rope_parameters={**_ROPE, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "mrope_section": [4, 2, 2]},
    ),
    "inkling-wrapped": partial(
        seeing, "Inkling", num_hidden_layers=2, head_dim=16, swa_head_dim=8, swa_num_attention_heads=6, d_rel=4,
        swa_num_key_value_heads=3, sliding_window_size=13, moe_intermediate_size=24, n_routed_experts=5,
        num_experts_per_tok=2, logits_mup_width_multiplier=0.5, layer_types=["hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "sparse"], rel_extent=40, route_scale=1.5,
    ),
    "inkling2-wrapped": partial(
        seeing, "Inkling2", num_hidden_layers=2, head_dim=16, swa_head_dim=8, swa_num_attention_heads=6, d_rel=4,
        swa_num_key_value_heads=3, sliding_window_size=13, n_routed_experts=5, num_experts_per_tok=2, rel_extent=40,
        layer_types=["hybrid_sliding", "hybrid"], unpadded_vocab_size=99,
    ),
    "qwen2-got_ocr2": partial(seeing, "GotOcr2"),
    "persimmon-fuyu": partial(seeing, "Fuyu"),
    "qwen3-moss": partial(seeing, "MossTranscribeDiarize", head_dim=16, tied=True),
    "emu3": partial(seeing, "Emu3", pad_token_id=0),
    "mllama": partial(
        seeing, "Mllama", num_hidden_layers=3, cross_attention_layers=[1], pad_token_id=0,
        rope_parameters={**_ROPE},
    ),
    "granite4_vision": partial(seeing, "Granite4Vision", embedding_multiplier=3.0, logits_scaling=2.0),
    "aria-wrapped": partial(seeing, "Aria", moe_num_experts=5, moe_topk=2, intermediate_size=24),
    "granite_docling": partial(seeing, "GraniteDocling", attention_multiplier=0.3, residual_multiplier=0.4, tied=True),
    "ernie4_5_vl_moe": partial(
        seeing, "Ernie4_5_VLMoe", head_dim=16, moe_num_experts=7, moe_k=2, moe_intermediate_size=[24, 16],
        moe_num_shared_experts=1, tied=True, **_sections(3, 3, 2),
    ),
    "step3p5": partial(
        seeing, "Step3p7", head_dim=16, num_hidden_layers=4, layer_types=[F, S, S, F], sliding_window=14,
        num_sliding_attention_heads=8, mlp_layer_types=["dense", "sparse", "dense", "sparse"], share_expert_dim=40,
        swiglu_limits=[None, 0.05, 0.0, None], swiglu_limits_shared=[None, 0.04, 0.06, None],
        moe_router_scaling_factor=2.0, pad_token_id=1, partial_rotary_factors=[0.5, 1.0, 1.0, 0.5],
        rope_theta=[5000.0, 1000.0, 1000.0, 5000.0],
        n_routed_experts=9, num_experts_per_tok=2, moe_intermediate_size=24,
    ),
    "qwen4_exp-wrapped": partial(
        seeing, "Qwen4Exp", head_dim=16, num_hidden_layers=4, num_experts=5, num_experts_per_tok=2,
        moe_intermediate_size=24, shared_expert_intermediate_size=40, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=8, hc_count=2, hc_lowrank=10,
        indexer_n_heads=32, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=24, indexer_compress_ratio=4,
        **_sections(4, 2, 2),
    ),
    "deepseek_ocr2": partial(
        seeing, "DeepseekOcr2", mlp_layer_types=["dense", "sparse", "sparse"], routed_scaling_factor=1.5, **_EXPERTS
    ),
}  # fmt: skip
