"""Models with an encoder, whose tokens read a source."""

from __future__ import annotations

from functools import partial
from typing import Any

BART = {
    "vocab_size": 99, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 6, "max_position_embeddings": 250,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip


def _config(name: str, **fields: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**fields)


CASES = {
    "bart": partial(_config, "BartConfig", **BART),
    "bart-scaled": partial(_config, "BartConfig", **BART, scale_embedding=True, activation_function="relu"),
    "mbart": partial(_config, "MBartConfig", **BART, scale_embedding=True),
    "marian": partial(_config, "MarianConfig", **BART, scale_embedding=True, activation_function="swish"),
    "m2m_100": partial(_config, "M2M100Config", **BART),
    "pegasus": partial(_config, "PegasusConfig", **BART),
}  # fmt: skip
