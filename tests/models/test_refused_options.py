"""Options of a config that lmstate cannot do are refused by name, and never silently ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lmstate
from lmstate.errors import ModelError
from tests.zoo import pair

REFUSED = {
    "ALiBi": ("falcon", {"alibi": True}),
    "new architecture": ("falcon-grouped", {"parallel_attn": False}),
    "cannot share": ("falcon-grouped", {"num_kv_heads": 4}),
    "both directions": ("gemma", {"use_bidirectional_attention": True}),
    "'hidden_act' = 'quick_gelu'": ("apertus", {"hidden_act": "quick_gelu"}),
    "another text": ("gpt2", {"add_cross_attention": True}),
    "nothing to stretch": ("hunyuan_v1_dense-alpha", {"head_dim": 2}),
    "logits_scaling = 0": ("granite_swa", {"logits_scaling": 0.0}),
    "clip_qkv": ("olmoe", {"clip_qkv": 8.0}),
    "'moe_norm_min'": ("ernie4_5_moe", {"moe_norm_min": 0.1}),
    "'sliding_window'": ("exaone_moe", {"sliding_window": None}),
    "'score_func' = 'softmax'": ("afmoe", {"score_func": "softmax"}),
    "norms in the stream": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "alibi=False": ("mpt", {"attn_config": {"alibi": False}}),
    "all its router does": ("phimoe", {"num_experts_per_tok": 1}),
    "has longrope or none": ("phimoe", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "'zero_expert_type' = 'random'": ("longcat_flash", {"zero_expert_type": "random"}),
    "moe_router_logit_softcapping": ("laguna", {"moe_router_logit_softcapping": 30.0}),
    "moe_apply_router_weight_on_input": ("laguna", {"moe_apply_router_weight_on_input": True}),
    "gating = False": ("laguna", {"gating": False}),
    "choice depends on later tokens": ("doge", {"is_moe": True}),
    "chosen keys of": ("doge", {"keep_window_size": 100}),
    "'recurrent_kv_cache_mode' = 'last_loop'": ("dory", {"recurrent_kv_cache_mode": "last_loop"}),
    "evenly": ("laguna", {"num_key_value_heads": 5, "num_attention_heads": 5}),
    "'moe_normalize_expert_weights' = 2": (
        "dbrx",
        {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_normalize_expert_weights": 2.0}},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_option_that_cannot_be_is_refused(message: str, tmp_path: Path) -> None:
    case, change = REFUSED[message]
    pair(case)[0].save_pretrained(tmp_path)
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        lmstate.load(tmp_path)
