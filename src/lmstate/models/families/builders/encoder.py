"""Fields that models with an encoder share."""

from __future__ import annotations

from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError


def start_id(config: Config, vocab: int) -> int:
    """The token that every answer begins with: `decoder_start_token_id`, or that of padding, as in T5."""
    for name in ("decoder_start_token_id", "pad_token_id", "bos_token_id"):
        if (found := config.int(name, high=vocab - 1, default=None)) is not None:
            return found
    raise ModelError(f"{config.where} has no decoder_start_token_id, which every answer begins with")
