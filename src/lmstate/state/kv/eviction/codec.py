"""Encoding and decoding of the keys and values in an evicting state's slots."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops.attention.attend_quantized import WHOLE
from lmstate.ops.types import kv_format
from lmstate.state.kv.policies.storage import Dense, Quantized, Storage


class Codec:
    """Keys and values as floats, or as codes with their scales after a Hadamard transform, by names."""

    def __init__(self, storage: Storage, dims: dict[str, int], dtype: torch.dtype):
        """`dims`: the widths of "k" and "v"; `dtype`: of floats where the storage names none."""
        self.bits = storage.bits if isinstance(storage, Quantized) else None
        dtype = storage.dtype or dtype if isinstance(storage, Dense) else dtype
        self.tensors: dict[str, tuple[int, torch.dtype]] = {}
        """Width and dtype of each tensor."""
        for name, dim in dims.items():
            if self.bits is None:
                self.tensors[name] = (dim, dtype)
            else:
                codes, scales = kv_format.widths(dim, self.bits, WHOLE)
                self.tensors[name] = (codes, kv_format.code_dtype(self.bits))
                self.tensors[f"{name}.scale"] = (scales, torch.float16)

    def encode(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """k `[..., D]`, v `[..., Dv]` -> what is stored of them, `[..., width]` each."""
        if self.bits is None:
            return {name: x.to(self.tensors[name][1]) for name, x in (("k", k), ("v", v))}
        coded: dict[str, Tensor] = {}
        for name, x in (("k", k), ("v", v)):
            coded[name], coded[f"{name}.scale"] = kv_format.encode(kv_format.hadamard(x), self.bits, WHOLE)
        return coded

    def decode(self, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values as they are in the slots, transformed where the storage transforms them."""
        if self.bits is None:
            return stored["k"], stored["v"]
        k, v = (kv_format.decode(stored[name], stored[f"{name}.scale"], self.bits) for name in ("k", "v"))
        return k, v

    def transform(self, x: Tensor) -> Tensor:
        """Queries transformed as keys are, or outputs transformed back."""
        return x if self.bits is None else kv_format.hadamard(x)
