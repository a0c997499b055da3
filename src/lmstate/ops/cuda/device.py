"""Whether the Triton bodies run on a GPU, and how kernels are launched."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lmstate.ops.types.slabs import on_device

OLDEST = (8, 0)  # compute capability: bfloat16 products
BITS = "LMSTATE_GPU_BITS"
FEW_ROWS = 16  # rows of the smallest tile of a product on the matrix unit
OPTIONS = {"enable_fp_fusion": False}
"""Of every launch: a multiplication and an addition that are fused in one kernel and not in another give other bits."""


@lru_cache(maxsize=8)
def reason(index: int) -> str:
    """The reason why the GPU of this index runs the references; empty where it runs the Triton bodies."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if torch.version.hip is not None:
        return "the Triton bodies are written for NVIDIA's GPUs"
    if find_spec("triton") is None:
        return "Triton is not installed; torch's CUDA wheels bring it along"
    if torch.cuda.get_device_capability(index) < OLDEST:
        major, minor = torch.cuda.get_device_capability(index)
        return f"compute capability {major}.{minor}; the Triton bodies need {OLDEST[0]}.{OLDEST[1]}"
    return ""


@lru_cache(maxsize=8)
def usable(index: int) -> bool:
    """Whether the Triton bodies run on this GPU. Warns once where they do not."""
    why = reason(index)
    if why and torch.cuda.is_available():
        warnings.warn(
            f"cuda:{index} runs on the references in torch, which are slow: {why}", RuntimeWarning, stacklevel=3
        )
    return not why


def keeps_bits() -> bool:
    """Whether a row has the same bits in any batch and cut; `LMSTATE_GPU_BITS=0` gives that up where it costs time."""
    return os.environ.get(BITS, "").strip() != "0"


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of the processor (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=8)
def shared_bytes(index: int) -> int:
    """Shared memory that one program may have on the GPU of this index; where kernels are interpreted, any."""
    if not on_real_gpu(torch.device("cuda", index)):
        return 1 << 30
    return int(torch.cuda.get_device_properties(index).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def on_real_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU with streams and pinned memory: not the processor, nor one that tests pretend."""
    return device.type == "cuda" and torch.cuda.is_available()


def launch(kernel: Any, grid: Sequence[int], *args: Any, warps: int = 4, stages: int = 2, **constants: Any) -> None:
    """Run `kernel[grid]` on the current stream of the device of its tensors.

    Inputs that do not begin at a multiple of 16 bytes are copied. For these Triton would compile the kernel again, and
    its threads might add numbers in another order. Results are new tensors, which do.
    """
    args = tuple(arg.clone() if isinstance(arg, Tensor) and arg.data_ptr() % 16 else arg for arg in args)
    options = {} if is_interpreted() else OPTIONS
    several = not is_interpreted() and torch.cuda.device_count() > 1
    # Triton launches on the current device.
    current = (
        torch.cuda.device(next(arg.device for arg in args if isinstance(arg, Tensor))) if several else nullcontext()
    )
    with current:
        kernel[tuple(grid)](*args, num_warps=warps, num_stages=stages, **constants, **options)


def is_recording() -> bool:
    """Whether launches of this thread are recorded as a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def on_gpu(values: Tensor, like: Tensor) -> Tensor:
    """Integers int64 `[R]` on the device of `like`: sent once for the layers of a step. RuntimeError for those of the
    host while a graph is recorded, where each replay would read them again."""
    if not values.is_cpu:
        return values
    if not like.is_cpu and is_recording():
        raise RuntimeError("an operation reads numbers of the host while a graph is recorded")
    return on_device(tuple(values.tolist()), like.device)


def padded(width: int, least: int = 16) -> int:
    """The power of two that holds `width`."""
    return max(least, 1 << (width - 1).bit_length())
