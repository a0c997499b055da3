"""Models with an encoder, whose tokens read a source."""

from __future__ import annotations

from functools import partial
from typing import Any

BART = {
    "vocab_size": 99, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 6, "max_position_embeddings": 250,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": 99, "d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 6,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
}  # fmt: skip
GEMMA = {
    "vocab_size": 99, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 13, "query_pre_attn_scalar": 20,
    "final_logit_softcapping": 5.0, "attn_logit_softcapping": 4.0,
}  # fmt: skip
WHISPER = {
    "vocab_size": 99, "num_mel_bins": 12, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 6, "encoder_ffn_dim": 80, "decoder_ffn_dim": 64,
    "max_source_positions": 35, "max_target_positions": 250, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3, "begin_suppress_tokens": None,
}  # fmt: skip


def _config(name: str, **fields: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**fields)


def _t5gemma(encoder: dict[str, Any], decoder: dict[str, Any], **fields: Any) -> Any:
    import transformers as t

    parts = (
        t.T5GemmaModuleConfig(**{**GEMMA, **own}, pad_token_id=0, eos_token_id=1, bos_token_id=2)
        for own in (encoder, decoder)
    )
    return t.T5GemmaConfig(**dict(zip(("encoder", "decoder"), parts)), vocab_size=99, **fields)


CASES = {
    "bart": partial(_config, "BartConfig", **BART),
    "bart-scaled": partial(_config, "BartConfig", **BART, scale_embedding=True, activation_function="relu"),
    "mbart": partial(_config, "MBartConfig", **BART, scale_embedding=True),
    "marian": partial(_config, "MarianConfig", **BART, scale_embedding=True, activation_function="swish"),
    "m2m_100": partial(_config, "M2M100Config", **BART),
    "pegasus": partial(_config, "PegasusConfig", **BART),
    "t5": partial(_config, "T5Config", **T5),
    "t5-gated": partial(
        _config, "T5Config", **{**T5, "d_kv": 16, "num_heads": 2, "num_layers": 3, "num_decoder_layers": 2},
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    ),
    "t5gemma": partial(
        _t5gemma, {"sliding_window": 9}, {"num_hidden_layers": 3, "hidden_size": 32, "num_key_value_heads": 1}
    ),
    "t5gemma-own-head": partial(
        _t5gemma, {"num_hidden_layers": 3}, {"sliding_window": 20, "final_logit_softcapping": None},
        tie_word_embeddings=False,
    ),
    "mt5": partial(_config, "MT5Config", **T5),
    "whisper": partial(_config, "WhisperConfig", **WHISPER),
    "whisper-relu": partial(
        _config, "WhisperConfig", **{**WHISPER, "num_mel_bins": 7, "d_model": 32, "decoder_attention_heads": 2},
        activation_function="relu",
    ),
    "umt5": partial(_config, "UMT5Config", **{**T5, "relative_attention_num_buckets": 32,
                                              "relative_attention_max_distance": 128}),
}  # fmt: skip
