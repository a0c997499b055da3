"""Linear recurrences of fixed or gated rate, beside attention (RecurrentGemma, MiniMax) or alone (xLSTM, RWKV)."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.small import config

_config = partial(
    config,
    num_hidden_layers=4,
)


_FACTORS = {
    f"{part}_{which}_factor": 1.0 + 0.1 * i + 0.05 * j
    for i, part in enumerate(("full_attn", "linear_attn", "mlp"))
    for j, which in enumerate(("alpha", "beta"))
}


def _xlstm(**changes: Any) -> Any:
    """Without a cache: that of the peer knows heads of keys and values whose widths add up to multiples of 64 alone."""
    import transformers

    sizes = {
        "vocab_size": 99, "hidden_size": 48, "num_blocks": 3, "num_hidden_layers": 3, "num_heads": 3, "chunk_size": 32,
        "ffn_round_up_to_multiple_of": 8, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": None,
    }  # fmt: skip
    return transformers.xLSTMConfig(**{**sizes, **changes})


def _rwkv(**changes: Any) -> Any:
    import transformers

    sizes = {"vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.RwkvConfig(**{**sizes, **changes})


CASES = {
    "recurrent_gemma": partial(_config, "RecurrentGemmaConfig", attention_window_size=20),
    "recurrent_gemma-wide": partial(
        _config, "RecurrentGemmaConfig", attention_window_size=7, lru_width=72, conv1d_width=3, num_key_value_heads=1,
        block_types=["attention", "recurrent"], num_hidden_layers=3, logits_soft_cap=5.0,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
    ),
    "minimax": partial(
        _config, "MiniMaxConfig", num_local_experts=4, num_experts_per_tok=2, block_size=32, head_dim=16, **_FACTORS
    ),
    "minimax-pattern": partial(
        _config, "MiniMaxConfig", num_local_experts=3, num_experts_per_tok=1, block_size=16, num_key_value_heads=6,
        layer_types=["linear_attention", "linear_attention", "full_attention"], num_hidden_layers=3,
        tie_word_embeddings=True,
    ),
    "xlstm": _xlstm,
    "xlstm-biased": partial(
        _xlstm, use_bias=True, num_heads=4, qk_dim_factor=0.75, v_dim_factor=1.5, gate_soft_cap=4.0, eps=1e-2,
        output_logit_soft_cap=2.0, ffn_proj_factor=1.3, norm_eps=1e-3, chunk_size=16,
    ),
    "rwkv": _rwkv,
    "rwkv-wide": partial(  # without a cache, for that of the peer is as wide as the stream
        _rwkv, attention_hidden_size=72, intermediate_size=80, num_hidden_layers=3, layer_norm_epsilon=1e-3,
        tie_word_embeddings=True, rescale_every=2, use_cache=False,
    ),
}  # fmt: skip
