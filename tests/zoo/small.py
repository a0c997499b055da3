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


# Whatever of these a tower's config knows, it gets: towers are built to be left out.
TOWERS: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "num_heads": 2, "attention_heads": 2, "depth": 1, "num_layers": 1,
    "image_size": 28, "patch_size": 14, "out_hidden_size": 48, "projection_dim": 16, "vocab_size": 20,
    "base_channels": 32, "latent_channels": 8, "num_filters": 2, "n_filters": 2, "embed_dim": 16,
    "mlp_dim": 16, "num_embeddings": 20, "output_channels": 8,
}  # fmt: skip


def tower(config: Any) -> Any:
    """A tower's config of the same class, as small as its class lets it be."""
    import transformers

    known = config.to_dict()
    changes = {name: value for name, value in TOWERS.items() if type(known.get(name)) is type(value)}
    inner = {
        name: tower(part) for name, part in vars(config).items() if isinstance(part, transformers.PretrainedConfig)
    }
    return type(config)(**changes, **inner)
