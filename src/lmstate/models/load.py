"""`lmstate.load`: from a name to a model that runs."""

from __future__ import annotations

import os
from typing import Literal

import torch

from lmstate.models.decoder import Model


def load(
    name: str | os.PathLike[str],
    weights: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    trainable: bool | Literal["lora"] = False,
) -> Model:
    """Load a model by alias ("smollm2"), directory, `.gguf` file or Hub id.

    weights: storage of the matrices, "auto", "int4", "int8", "bfloat16" or "float32"; "auto" keeps the precision of a
    quantised file, and takes float checkpoints in bfloat16 where the processor multiplies it, else in float32.
    dtype: of stored keys and values and of large products; float32 for float32 weights, else bfloat16.
    device: the CPU unless given.
    Raises `ModelError` (a `ValueError`) for a checkpoint that is damaged or not supported, `OSError` for files that are
    missing or cannot be fetched.
    """
    from lmstate.models.families import build
    from lmstate.models.hub import open_checkpoint

    opened, tokenizer, defaults = open_checkpoint(os.fspath(name), weights, dtype, device)
    if trainable:
        from lmstate.training import trainable_model

        model = trainable_model(opened, trainable)
    else:
        model = build(opened)
    model.name = str(name)
    model.defaults = defaults
    model._tokenizer = tokenizer
    eos = defaults.get("eos_token_id")
    model.eos_ids = frozenset(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos])
    return model
