"""What most small models share; every module of the zoo changes some of it."""

from __future__ import annotations

from typing import Any

S, F = "sliding_attention", "full_attention"

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def config(name: str, **changes: Any) -> Any:
    """A config of this class of `transformers`."""
    import transformers

    return getattr(transformers, name)(**{**SIZES, **changes})
