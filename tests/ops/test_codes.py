"""Bodies of attention over codes: each native one stores and reads what the references do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmstate.ops import AttentionParams, CausalMask, dispatch
from lmstate.ops.attention.attend_quantized import attend_quantized
from lmstate.ops.types import kv_format
from lmstate.ops.types.kv_format import BLOCK
from lmstate.ops.types.params import QuantizedKV
from tests.kv.test_quantized import Stored, every_dtype, every_width


def numbers(kv: QuantizedKV) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Keys and values as their codes have them, and the distance between two codes of each."""
    k, v, k_scale, v_scale = (x for x in kv.tensors if isinstance(x, Tensor))
    values = kv_format.decode(v, v_scale, kv.bits), v_scale.float().expand(*v.shape[:3], v.shape[3] * 8 // kv.bits)
    if kv.tail is None:
        return (kv_format.decode(k, k_scale, kv.bits), k_scale.float().expand_as(values[1])), values
    keys = kv_format.decode_blocks(k, k_scale, kv.bits)
    across = k_scale.unflatten(2, (-1, BLOCK)).flatten(3)[..., None, : keys.shape[3]]  # [R, K, blocks, 1, D]
    return (keys, across.float().expand(-1, -1, -1, BLOCK, -1).flatten(2, 3)), values


@every_width
@every_dtype
@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize(("dim", "window"), [(64, None), (40, 70)])
def test_native_bodies_store_and_read_what_references_do(
    bits: int, dtype: torch.dtype, dim: int, window: int | None
) -> None:
    """One arithmetic: codes but for numbers on an edge of two, and attention over the same codes but for rounding."""
    native, reference = (Stored(bits, dim, 256, dtype=dtype) for _ in "nr")
    params, mask, starts = AttentionParams(dim**-0.5), CausalMask(window), torch.zeros(3, dtype=torch.int64)
    for counts in [(40, 7, 0), (40, 33, 40), (1, 40, 30), (40, 1, 9)]:
        q, k, v = native.new(counts)
        given = starts, torch.tensor(counts), params, mask
        got = attend_quantized(q, (k, v), None, native.kv, *given, dtype=dtype)
        with dispatch.references():
            attend_quantized(q, (k, v), None, reference.kv, *given, dtype=dtype)
        for (ours, step), (theirs, _) in zip(numbers(native.kv), numbers(reference.kv)):
            # Scales are float16, and may fall to either side as well.
            apart = (ours - theirs).abs() - 2**-8 * theirs.abs()
            assert (apart <= 1.01 * step).all() and (apart > 0.5 * step).float().mean() < 1e-3
        for into, own in zip(reference.kv[1:], native.kv[1:]):
            if isinstance(into, Tensor) and isinstance(own, Tensor):
                into.copy_(own)
        with dispatch.references():
            want = attend_quantized(q, None, None, reference.kv, *given, dtype=dtype)
        # In bfloat16 numbers up to 8 are rounded by 2^-5, where they are stored and where they are multiplied.
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 if dtype == torch.float32 else 2**-4)
        starts = starts + torch.tensor(counts)
