"""Checkpoints that another tool quantized: which of them are read, and what to say of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.huggingface import fp8, packed
from lmstate.checkpoints.source import dtype_name
from lmstate.errors import ModelError
from lmstate.files.safetensors import TensorEntry

MXFP4 = "mxfp4"  # its blocks are bytes, which the family takes apart
# What quantized matrices are packed in. Indices, which checkpoints of floats may hold too, are int64.
PACKED = (torch.int8, torch.uint8, torch.int16, torch.int32)
FORMS = ("format", "checkpoint_format", "quant_algo")  # where tools say which of several ways it is
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def settings(config: dict[str, Any], path: Path) -> Config:
    """A config's `quantization_config`, which some wrappers have in their `text_config`; empty if there is none."""
    whole = Config(config, f"config of {path}")
    inner = whole.fields("text_config", None) or Config({})
    return whole.fields("quantization_config", None) or inner.fields("quantization_config", None) or Config({})


def check_read(quantization: Config, tensors: Mapping[str, TensorEntry], path: Path) -> None:
    """Raise `ModelError` if the config names how matrices were quantized, and some are in a way that is not read.

    The tensors decide: tools name themselves in the configs of models that they left as they were.
    """
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method == MXFP4:
        return
    refused = PACKED if method in fp8.METHODS else (*PACKED, *EIGHT_BITS)
    matrices = {name: entry.dtype for name, entry in tensors.items() if entry.dtype in refused and len(entry.shape) > 1}
    if not matrices:
        return
    name = min(matrices)
    form = next((f" ({each[:80]!r})" for key in FORMS if isinstance(each := quantization.get(key), str)), "")
    raise ModelError(
        f"{path} is quantized in a way that lmstate does not read: quant_method {method[:80]!r}{form} of its "
        f"quantization_config, and {name[:80]!r} holds {dtype_name(matrices[name])} numbers. It reads {MXFP4!r}, "
        f"{', '.join(map(repr, packed.METHODS))}, and the 8-bit floats of {', '.join(map(repr, fp8.METHODS))}. "
        f'Load a GGUF of this model, or its original weights, with weights="int4" to have them small'
    )
