"""The one place that picks an operation's body: the reference in torch, or the native library of this processor.

`LMSTATE_OPS` forces one: `reference`, or a native variant (`portable`, `avx2`, `avxvnni`, `avx512`). It is read once,
at the first operation.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmstate.ops.cpu.contention import contention
from lmstate.ops.types.block_table import Stored

if TYPE_CHECKING:
    from lmstate.ops.cpu import Library

VARIABLE = "LMSTATE_OPS"


@dataclass(frozen=True)
class Choice:
    """The bodies that run on the processor, and why."""

    name: str
    why: str
    library: Library | None
    exact: bool = False
    """The references were asked for: no product in less than float32 either."""


@lru_cache(maxsize=1)
def choice() -> Choice:
    """Made once. ValueError for a name that there is not, NativeError for a variant that cannot run here."""
    from lmstate.ops import cpu

    asked = os.environ.get(VARIABLE, "").strip().lower()
    if asked == "reference":
        return Choice("reference", f"{VARIABLE}=reference", None, exact=True)
    if asked:
        if asked not in cpu.VARIANTS:
            raise ValueError(f"{VARIABLE}={asked}: there are reference, {', '.join(cpu.VARIANTS)}")
        return Choice(asked, f"{VARIABLE}={asked}", cpu.open_library(asked))
    usable = cpu.usable()
    if not usable:
        why = (
            "no native library was built from these sources: install the package (again) where a C compiler with "
            "OpenMP is found"
        )
        warnings.warn(f"lmstate runs on its references in torch, which are slow: {why}", RuntimeWarning, stacklevel=2)
        return Choice("reference", why, None)
    return Choice(
        usable[-1], "the fastest variant that was built and that this processor runs", cpu.open_library(usable[-1])
    )


_referring: ContextVar[bool] = ContextVar("referring", default=False)


@contextmanager
def references() -> Iterator[None]:
    """Run on the references inside, as where a gradient follows: the same numbers, whether one does or not."""
    token = _referring.set(True)
    try:
        yield
    finally:
        _referring.reset(token)


def is_referring() -> bool:
    """Whether `references` was entered: gradients follow, or what runs here is computed once more where they do."""
    return _referring.get()


@contextmanager
def giving_way() -> Iterator[Callable[[], None]]:
    """Compute on fewer threads inside while other processes keep processors busy; see `ops.cpu.contention`.

    Gives what looks again, to be called between the parts of something long.
    """
    library = choice().library
    if library is None:
        yield lambda: None
        return
    most = now = torch.get_num_threads()

    def look() -> None:
        nonlocal now
        left = contention.threads(most)
        if left != now:
            library.set_threads(left)
            now = left

    look()
    try:
        yield look
    finally:
        contention.rest()
        if now != most:
            library.set_threads(most)


def native(*tensors: Stored | None) -> Library | None:
    """The native library where these tensors may go there: on the processor, with no gradient to follow, not traced."""
    if tensors[0] is not None and not tensors[0].is_cpu:  # at once: there, what is asked before a launch is its time
        return None
    if torch.compiler.is_compiling() or _referring.get():
        return None
    follow = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (not tensor.is_cpu or (follow and tensor.requires_grad)):
            return None
    return choice().library


def gpu(*tensors: Stored | None) -> bool:
    """Whether the Triton bodies of `ops.cuda` take these tensors: on a GPU that runs them, with no gradient to follow,
    not traced. `LMSTATE_OPS=reference` forces the references there too."""
    first = next((tensor for tensor in tensors if tensor is not None), None)
    if first is None or first.is_cpu or first.device.type != "cuda":
        return False
    if torch.compiler.is_compiling() or _referring.get() or is_forced():
        return False
    follow = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (tensor.is_cpu or (follow and tensor.requires_grad)):
            return False
    from lmstate.ops.cuda.device import usable

    return usable(first.device.index or 0)


def is_forced() -> bool:
    """Whether the environment asks for the references."""
    return os.environ.get(VARIABLE, "").strip().lower() == "reference"


def is_intercepted() -> bool:
    """Whether torch traces, transforms or intercepts operations (`jit.trace`, `func.vmap`, forward derivatives,
    dispatch modes) and would miss a native one. Asked where others' models come in; there is no public way to ask."""
    return (
        torch._C._is_tracing()
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd.forward_ad._current_level >= 0
    )


def exact(*tensors: Tensor | None) -> bool:
    """Whether a reference in float32 is wanted over a faster product: it was forced, or a gradient is to follow."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    return not torch.compiler.is_compiling() and (_referring.get() or choice().exact)


_ALIKE = (
    "attend_latent",
    "choose_positions",
    "norm",
    "rope",
    "append",
    "glu",
    "argmax",
    "sample",
    "causal_conv",
    "gated_norm",
    "selective_scan",
    "rg_lru",
)
_RECURRENT = ("gated_delta_mixer", "mamba2_mixer", "gated_delta_rule", "ssd", "linear_attention")


def info() -> list[dict[str, str]]:
    """Name of each operation on the processor, the body that runs, and why. For `lmstate doctor`."""
    body, why, library = choice().name, choice().why, choice().library
    if library is None:
        return [{"op": op, "body": body, "why": why} for op in ("attend", "linear", *_ALIKE, *_RECURRENT)]
    pairs = "bfloat16 weights, keys and values multiply what is rounded to bfloat16"
    pairs = pairs if library.dense.rounds_to_bf16 else why
    tiles = f"{pairs}; products in tiles of AMX" if library.dense.uses_amx else pairs
    return [
        {"op": "attend", "body": body, "why": pairs},
        {"op": "linear", "body": body, "why": tiles},
        *({"op": op, "body": body, "why": why} for op in (*_ALIKE, *_RECURRENT)),
    ]


_TRITON = (
    "attend", "attend_latent", "attend_chosen", "choose_positions", "8-bit keys and values",
    "4-, 3- and 2-bit keys and values", "append", "rope", "linear", "per_head_matmul", "norm", "glu", "choose_experts",
    "experts", "argmax", "sample", "causal_conv", "gated_norm", "gated_delta_rule", "linear_attention", "ssd",
    "selective_scan", "rg_lru", "wkv",
)  # fmt: skip


def gpu_info(index: int = 0) -> list[dict[str, str]]:
    """The same on the GPU of this index; empty where torch finds none."""
    from lmstate.ops.cuda import configs, device

    if not torch.cuda.is_available():
        return []
    why = f"{VARIABLE}=reference" if is_forced() else device.reason(index)
    if why:
        return [{"op": op, "body": "reference", "why": why} for op in _TRITON]
    found = dict.fromkeys(_TRITON, ("Triton", "the GPU runs the kernels of ops/cuda"))
    if not device.keeps_bits():
        found["linear"] = ("Triton and torch", f"{device.BITS}=0: torch's products from {configs.LARGE} rows on")
    shared = device.shared_bytes(index)
    for op, width in (("attend", 256), ("attend_latent", 512), ("attend_chosen", 512)):
        if shared < configs.shared_needed(width, 4):
            found[op] = "Triton or reference", f"float32 vectors of {width} numbers need more shared memory"
    return [{"op": op, "body": body, "why": reason} for op, (body, reason) in found.items()]
