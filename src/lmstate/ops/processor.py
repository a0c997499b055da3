"""Capabilities of a device that torch does not report."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch


@lru_cache
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are at least as fast as in float32 there.

    Torch has them everywhere; where the processor has not, they take several times as long.
    """
    if device.type not in ("cpu", "meta"):  # meta plans for this processor
        return True
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    line = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), "")
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(line.split()))


@lru_cache
def gives_float32(device: torch.device) -> bool:
    """Whether torch's matrix product of bfloat16 can leave its sums in float32 there."""
    if device.type == "cpu":
        return False
    try:
        few = torch.zeros(8, 8, dtype=torch.bfloat16, device=device)
        return torch.mm(few, few, out_dtype=torch.float32).dtype == torch.float32
    except (RuntimeError, TypeError):  # of this backend, or of this version
        return False
