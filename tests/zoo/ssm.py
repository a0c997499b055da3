"""State space models, alone and beside attention. Chunks of the peer's scan are set to lie inside the text."""

from __future__ import annotations

from functools import partial
from typing import Any


def _config(name: str, **changes: Any) -> Any:
    import transformers

    sizes = {"vocab_size": 99, "hidden_size": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    if name != "NemotronHConfig":  # it counts the layers that it is given
        sizes["num_hidden_layers"] = 3
    return getattr(transformers, name)(**{**sizes, **changes})


_ATTENTION = {
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# 12 heads of 8 features over a hidden size of 48 that expands twice.
_MAMBA2 = {"mamba_n_heads": 12, "mamba_d_state": 10, "mamba_chunk_size": 32}
_GRANITE = {
    "embedding_multiplier": 2.5, "logits_scaling": 0.7, "residual_multiplier": 0.6, "attention_multiplier": 0.3
}  # fmt: skip
_FALCON_H1 = {
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.7, 1.4],
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.6, 1.5, 1.2, 0.7, 1.1],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
}
_NEMOTRON_H = {"mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 10, "chunk_size": 32, "time_step_min": 0.6}
_ZAMBA = {"intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "use_associative_scan": False}
_ZAMBA2 = {"n_mamba_heads": 12, "mamba_d_state": 10, "chunk_size": 32, "adapter_rank": 4, "time_step_min": 0.6}

CASES = {
    "mamba2": partial(_config, "Mamba2Config", num_heads=12, head_dim=8, state_size=10, n_groups=1, chunk_size=32),
    "mamba2-groups": partial(
        _config, "Mamba2Config", num_heads=6, head_dim=16, state_size=6, n_groups=3, conv_kernel=3, chunk_size=16,
        use_bias=True, use_conv_bias=False, tie_word_embeddings=True, time_step_limit=(0.3, 0.9),
    ),
    "bamba": partial(_config, "BambaConfig", **_ATTENTION, **_MAMBA2, attn_layer_indices=[1]),
    "bamba-groups": partial(
        _config, "BambaConfig", **{**_ATTENTION, "num_attention_heads": 3, "num_key_value_heads": 3}, **_MAMBA2,
        attn_layer_indices=[0, 2], mamba_n_groups=3, mamba_proj_bias=True, mamba_conv_bias=False, attention_bias=True,
        tie_word_embeddings=True, mamba_d_conv=3,
    ),
    "granitemoehybrid": partial(
        _config, "GraniteMoeHybridConfig", **_ATTENTION, **_MAMBA2, shared_intermediate_size=56, num_local_experts=0,
        layer_types=["mamba", "attention", "mamba"], **_GRANITE, tie_word_embeddings=True,
    ),
    "granitemoehybrid-moe": partial(
        _config, "GraniteMoeHybridConfig", **_ATTENTION, **_MAMBA2, shared_intermediate_size=40, num_local_experts=5,
        num_experts_per_tok=2, layer_types=["linear_attention", "full_attention", "linear_attention"], **_GRANITE,
        position_embedding_type="rope", mamba_n_groups=2, mamba_proj_bias=True,
    ),
    "granitemoehybrid-attention": partial(
        _config, "GraniteMoeHybridConfig", **_ATTENTION, shared_intermediate_size=56, num_local_experts=0,
        layer_types=["full_attention"] * 3, **_GRANITE, mamba_n_heads=12, position_embedding_type="rope",
    ),
    "granite": partial(_config, "GraniteConfig", **_ATTENTION, **_GRANITE, mlp_bias=True, attention_bias=True),
    "granitemoe": partial(
        _config, "GraniteMoeConfig", **_ATTENTION, **_GRANITE, num_local_experts=4, num_experts_per_tok=2
    ),
    "granitemoeshared": partial(
        _config, "GraniteMoeSharedConfig", **_ATTENTION, **_GRANITE, num_local_experts=4, num_experts_per_tok=3,
        shared_intermediate_size=32, tie_word_embeddings=True,
    ),
    "falcon_h1": partial(
        _config, "FalconH1Config", **_ATTENTION, **_MAMBA2, mamba_d_ssm=72, key_multiplier=0.4, **_FALCON_H1,
    ),
    "falcon_h1-norm": partial(
        _config, "FalconH1Config", **{**_ATTENTION, "num_key_value_heads": 3}, **_MAMBA2, mamba_d_ssm=None,
        mamba_n_groups=2, mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_proj_bias=True, attention_bias=True,
        mlp_bias=True, projectors_bias=True, tie_word_embeddings=True, head_dim=12, **_FALCON_H1,
    ),
    "falcon_h1-gate-last": partial(
        _config, "FalconH1Config", **_ATTENTION, **_MAMBA2, mamba_d_ssm=96, mamba_n_groups=3, mamba_rms_norm=True,
        mamba_norm_before_gate=True,
    ),
    "mamba": partial(_config, "MambaConfig", state_size=5),
    "mamba-bias": partial(
        _config, "MambaConfig", state_size=8, expand=3, conv_kernel=3, time_step_rank=7, use_bias=True,
        use_conv_bias=False, tie_word_embeddings=False,
    ),
    "falcon_mamba": partial(_config, "FalconMambaConfig", state_size=5, mixer_rms_eps=1e-3),
    "falcon_mamba-untied": partial(
        _config, "FalconMambaConfig", state_size=4, expand=1, conv_kernel=5, time_step_rank=6, use_bias=True,
        tie_word_embeddings=False,
    ),
    "jamba": partial(
        _config, "JambaConfig", **_ATTENTION, mamba_d_state=5, attn_layer_period=3, attn_layer_offset=1, num_experts=4,
    ),
    "jamba-dense": partial(
        _config, "JambaConfig", **{**_ATTENTION, "num_key_value_heads": 6}, mamba_d_state=4, mamba_expand=1,
        mamba_d_conv=3, mamba_dt_rank=5, mamba_proj_bias=True, mamba_conv_bias=False, attn_layer_period=2,
        attn_layer_offset=0, num_experts=1, tie_word_embeddings=True,
    ),
    "nemotron_h": partial(
        _config, "NemotronHConfig", **_ATTENTION, **_NEMOTRON_H, head_dim=12, n_groups=1,
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    ),
    "nemotron_h-moe": partial(
        _config, "NemotronHConfig", **_ATTENTION, **_NEMOTRON_H, head_dim=8, n_groups=2,
        layers_block_type=["moe", "linear_attention", "full_attention", "moe", "moe"], n_routed_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=24, moe_shared_expert_intermediate_size=20, n_group=3,
        topk_group=2, routed_scaling_factor=1.7, use_bias=True,
    ),
    "nemotron_h-latent": partial(
        _config, "NemotronHConfig", **{**_ATTENTION, "num_key_value_heads": 6}, **_NEMOTRON_H, head_dim=8, n_groups=3,
        layers_block_type=["linear_attention", "moe", "full_attention"], n_routed_experts=5, num_experts_per_tok=3,
        moe_intermediate_size=24, moe_shared_expert_intermediate_size=20, moe_latent_size=16, norm_topk_prob=False,
        mlp_bias=True, use_conv_bias=False,
    ),
    "zamba": partial(
        _config, "ZambaConfig", **_ZAMBA, mamba_d_state=5, num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        max_position_embeddings=512,
    ),
    "zamba-deep": partial(
        _config, "ZambaConfig", **{**_ZAMBA, "num_key_value_heads": 4}, num_hidden_layers=7, n_mamba_heads=3,
        attn_layer_period=2, attn_layer_offset=1, mamba_d_conv=3, mamba_dt_rank=5, mamba_proj_bias=True,
        mamba_conv_bias=False, attention_head_dim=12, max_position_embeddings=512,
    ),
    "zamba2": partial(
        _config, "Zamba2Config", **{**_ATTENTION, "num_attention_heads": 4, "num_key_value_heads": 2}, **_ZAMBA2,
        num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
    ),
    "zamba2-adapters": partial(
        _config, "Zamba2Config", **{**_ATTENTION, "num_key_value_heads": 6}, **_ZAMBA2, num_hidden_layers=6,
        layers_block_type=["hybrid", "hybrid", "linear_attention", "hybrid", "hybrid", "hybrid"], num_mem_blocks=2,
        mamba_ngroups=3, use_shared_attention_adapter=True, use_mem_rope=True, add_bias_linear=True,
    ),
    "zamba2-untied": partial(  # the peer unties the shared blocks too
        _config, "Zamba2Config", **_ATTENTION, **_ZAMBA2, num_hidden_layers=4, num_mem_blocks=2,
        layers_block_type=["mamba", "hybrid", "hybrid", "hybrid"], tie_word_embeddings=False, use_mem_rope=True,
    ),
}  # fmt: skip
