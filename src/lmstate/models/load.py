"""`lmstate.load`: from a name to a model that runs."""

from __future__ import annotations

import os

import torch

from lmstate.models.model import Model


def load(
    name: str | os.PathLike[str],
    weights: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Model:
    """Load a model by alias ("smollm2"), directory, `.gguf` file or Hub id.

    weights: storage of the matrices, "auto", "int4", "int8", "bfloat16" or "float32"; "auto" keeps the precision of a
    quantised file, and takes float checkpoints in bfloat16 where the processor multiplies it, else in float32.
    dtype: of stored keys and values and of large products; float32 for float32 weights, else bfloat16.
    device: the CPU unless given.
    Raises `ModelError` (a `ValueError`) for a checkpoint that is damaged or not supported, `OSError` for files that are
    missing or cannot be fetched.
    """
    from lmstate.checkpoints.hub import open_checkpoint
    from lmstate.models.families import build

    _check_device(device)
    opened, tokenizer, defaults = open_checkpoint(name, weights, dtype, device)
    model = build(opened)
    model.name = str(name)
    model.defaults = defaults
    model._tokenizer = tokenizer
    eos = defaults.get("eos_token_id")
    model.eos_ids = frozenset(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos])
    return model


def _check_device(device: torch.device | str | None) -> None:
    """Raise ValueError for a device that torch does not know or cannot use here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"load(device={str(device)!r}) was asked for, but torch cannot use it here ({str(error).splitlines()[0]}); "
            "leave device out for the CPU"
        ) from error
