"""Capabilities of the processor that torch does not report."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch


@lru_cache
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are at least as fast as in float32 there.

    Torch has them everywhere; where the processor has not, they take several times as long.
    """
    if device.type != "cpu":
        return True
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    line = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), "")
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(line.split()))
