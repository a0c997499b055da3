"""Repairs of Triton's interpreter: products and casts of bfloat16, products whose rows do not meet, and its time.

Triton 3.7 multiplies the bit patterns of bfloat16 numbers and truncates casts to it (triton#11584). Its products go to
a BLAS library, whose sums depend on the number of rows; a GPU's matrix unit sums each row in one order. It lists all
members of its modules at each call of a function.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def widened(handle: Any) -> np.ndarray:
    """The numbers of a handle in float32."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right = widened(a), widened(b)
    total = np.array(d.data, dtype=np.float32)
    for k in range(left.shape[-1]):
        total += left[:, k, None] * right[None, k, :]
    return interpreter.TensorHandle(total, d.dtype.scalar)


@cache
def builtins_of(package: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, member in builtins_of(package):
        if getattr(package, name) is member:  # else a function that calls this one has replaced it
            interpreter._patch_attr(package, name, member, builder, scope)


def shim(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = interpreter._convert_float

    def rounded(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16:
            values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)
