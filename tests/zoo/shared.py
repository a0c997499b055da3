"""Layers that read the keys and values of others; each kind of layer has some that store and some that share."""

from __future__ import annotations

from functools import partial

from tests.zoo.small import F, S
from tests.zoo.small import config as _config

CASES = {
    "gemma4": partial(
        _config, "Gemma4TextConfig", num_hidden_layers=6, head_dim=8, global_head_dim=16, sliding_window=13,
        layer_types=[S, F, S, F, S, F], num_kv_shared_layers=2, hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=99, use_double_wide_mlp=True, pad_token_id=0, final_logit_softcapping=5.0,
    ),
    "gemma4_unified": partial(
        _config, "Gemma4UnifiedTextConfig", num_hidden_layers=6, head_dim=8, global_head_dim=16, sliding_window=13,
        layer_types=[S, F, S, F, S, F], num_key_value_heads=3, num_global_key_value_heads=1, attention_k_eq_v=True,
        num_kv_shared_layers=2, pad_token_id=0,
    ),
    "gemma4-experts": partial(
        _config, "Gemma4TextConfig", num_hidden_layers=4, head_dim=16, global_head_dim=32, sliding_window=30,
        layer_types=[S, S, S, F], hidden_size_per_layer_input=0, num_key_value_heads=3, num_global_key_value_heads=1,
        attention_k_eq_v=True, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24,
        pad_token_id=0, tie_word_embeddings=False,
    ),
    "gemma4-deep": partial(
        _config, "Gemma4TextConfig", num_hidden_layers=11, head_dim=8, global_head_dim=16, sliding_window=20,
        layer_types=[S, F, S, S, S, S, S, S, S, S, F], num_kv_shared_layers=9, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=99, pad_token_id=0,
    ),
    "gemma4-shared": partial(
        _config, "Gemma4TextConfig", num_hidden_layers=5, head_dim=8, global_head_dim=8, sliding_window=64,
        layer_types=[F, S, S, S, F], num_kv_shared_layers=3, hidden_size_per_layer_input=8, num_key_value_heads=1,
        vocab_size_per_layer_input=99, pad_token_id=0,
    ),
    "gemma3n": partial(
        _config, "Gemma3nTextConfig", num_hidden_layers=5, head_dim=8, sliding_window=17, layer_types=[S, F, S, S, F],
        num_kv_shared_layers=2, hidden_size_per_layer_input=12, vocab_size_per_layer_input=99, laurel_rank=6,
        activation_sparsity_pattern=[0.9, 0.5, 0.0, 0.0, 0.0], pad_token_id=0,
    ),
    "gemma3n-streams": partial(
        _config, "Gemma3nTextConfig", num_hidden_layers=3, head_dim=16, sliding_window=40, layer_types=[F, S, F],
        num_kv_shared_layers=1, hidden_size_per_layer_input=8, vocab_size_per_layer_input=80, laurel_rank=4,
        altup_num_inputs=3, altup_active_idx=1, altup_correct_scale=False, intermediate_size=[40, 60, 80],
        num_key_value_heads=3, pad_token_id=0, tie_word_embeddings=False,
    ),
}  # fmt: skip
