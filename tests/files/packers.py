"""Packers of integer weights, written from the formats' descriptions: a matrix as tensors of a tool, and its floats.

Each makes random integers `[N, K]` and gives the `quantization_config`, the tensors by the ends of their names, and
float32 `[N, K]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Packed = tuple[dict[str, Any], dict[str, Tensor], Tensor]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def pack(q: np.ndarray, bits: int, axis: int) -> Tensor:
    """Neighbors along an axis in one int32, the first in its lowest bits."""
    q = np.moveaxis(q.astype(np.uint64), axis, -1)
    each = 32 // bits
    q = np.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, -q.shape[-1] % each)])
    words = q.reshape(*q.shape[:-1], -1, each) << np.arange(0, 32, bits, dtype=np.uint64)
    whole = words.sum(-1).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(whole, -1, axis)))


def _numbers(
    rng: np.random.Generator, n: int, k: int, groups: int, bits: int, symmetric: bool
) -> tuple[np.ndarray, ...]:
    q = rng.integers(0, 2**bits, (n, k))
    zero = np.full((n, groups), 2 ** (bits - 1)) if symmetric else rng.integers(1, 2**bits, (n, groups))
    scale = (rng.random((n, groups)) * 0.02 + 0.005).astype(np.float16)
    return q, zero, scale


def _floats(q: np.ndarray, zero: np.ndarray, scale: np.ndarray, index: np.ndarray) -> Tensor:
    return torch.from_numpy((q - zero[:, index]).astype(np.float32) * scale[:, index].astype(np.float32))


def bitnet(n: int, k: int, online: bool = False) -> Packed:
    """As transformers packs it; `online`: floats that are to be made ternary."""
    from transformers.integrations.bitnet import pack_weights

    rng = np.random.default_rng(n + k)
    if online:
        weight = torch.from_numpy(rng.standard_normal((n, k)).astype(np.float32) * 0.02)
        size = weight.abs().mean()
        said = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
        return said, {"weight": weight}, (weight / size).round().clamp(-1, 1) * size
    q, size = torch.from_numpy(rng.integers(-1, 2, (n, k))).float(), 0.03125
    tensors = {"weight": pack_weights(q.clone()), "weight_scale": torch.tensor([1 / size])}
    return {"quant_method": "bitnet"}, tensors, q * size


def gptq(
    n: int, k: int, bits: int = 4, size: int = 32, symmetric: bool = True, ordered: bool = False, version: str = "gptq"
) -> Packed:
    rng = np.random.default_rng(n + k)
    size = k if size == -1 else size
    q, zero, scale = _numbers(rng, n, k, k // size, bits, symmetric)
    index = np.arange(k) // size
    if ordered:
        rng.shuffle(index)
    tensors = {
        "qweight": pack(q.T, bits, 0),
        "qzeros": pack(zero.T - (version == "gptq"), bits, 1),
        "scales": torch.from_numpy(scale.T.copy()),
        "g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    said = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": ordered, "checkpoint_format": version}
    return said, tensors, _floats(q, zero, scale, index)


def awq(n: int, k: int, size: int = 32, symmetric: bool = False) -> Packed:
    rng = np.random.default_rng(n + k)
    q, zero, scale = _numbers(rng, n, k, k // size, 4, symmetric)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(values: np.ndarray) -> Tensor:
        return pack(values.reshape(len(values), -1, 8)[:, :, order].reshape(len(values), -1), 4, 1)

    tensors = {"qweight": interleaved(q.T), "qzeros": interleaved(zero.T), "scales": torch.from_numpy(scale.T.copy())}
    said = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return said, tensors, _floats(q, zero, scale, np.arange(k) // size)


def compressed(n: int, k: int, bits: int = 4, size: int = 32, symmetric: bool = True, ordered: bool = False) -> Packed:
    rng = np.random.default_rng(n + k)
    size = k if size == -1 else size
    q, zero, scale = _numbers(rng, n, k, k // size, bits, symmetric)
    index = np.arange(k) // size
    tensors = {
        "weight_packed": pack(q, bits, 1),
        "weight_scale": torch.from_numpy(scale).bfloat16(),
        "weight_shape": torch.tensor([n, k]),
    }
    if ordered:
        rng.shuffle(index)
        tensors["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
    if not symmetric:
        tensors["weight_zero_point"] = pack(zero, bits, 0)
    groups = {"group_0": {"weights": {"num_bits": bits, "group_size": size, "type": "int", "symmetric": symmetric}}}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return said, tensors, _floats(q, zero, tensors["weight_scale"].float().numpy(), index)


def int8(n: int, k: int) -> Packed:
    rng = np.random.default_rng(n + k)
    q = rng.integers(-127, 128, (n, k), dtype=np.int8)
    scale = torch.from_numpy(rng.random((n, 1), np.float32) * 0.002 + 0.001).bfloat16()
    said = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}
    return said, {"weight": torch.from_numpy(q), "weight_scale": scale}, torch.from_numpy(q).float() * scale.float()


def llm_int8(n: int, k: int) -> Packed:
    rng = np.random.default_rng(n + k)
    q = rng.integers(-127, 128, (n, k), dtype=np.int8)
    absmax = torch.from_numpy(rng.random(n, np.float32) * 0.2 + 0.1)
    tensors = {"weight": torch.from_numpy(q), "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        tensors,
        torch.from_numpy(q).float() * (absmax / 127.0)[:, None],
    )


def nvfp4(n: int, k: int, tool: str = "modelopt") -> Packed:
    rng = np.random.default_rng(n + k)
    q = rng.integers(0, 16, (n, k))
    scale = torch.from_numpy(rng.random((n, k // 16), np.float32) * 100 + 10).to(torch.float8_e4m3fn)
    packed = torch.from_numpy((q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8))
    whole = torch.tensor(0.0003) if tool == "modelopt" else torch.tensor([3000.0])
    each = scale.float() * whole if tool == "modelopt" else scale.float() / whole
    floats = torch.from_numpy(E2M1[q]).view(n, -1, 16) * each.unsqueeze(-1)
    if tool == "modelopt":
        said = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(1.0)}
    else:
        said = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole}
    return said, tensors, floats.view(n, k)


def nf4(n: int, k: int, nested: bool = False, block: int = 64) -> Packed:
    rng = np.random.default_rng(n + k)
    q = rng.integers(0, 16, n * k)
    table = torch.linspace(-1, 1, 16)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    tensors = {"weight": torch.from_numpy((q[::2] << 4 | q[1::2]).astype(np.uint8)).view(-1, 1)}
    blocks = n * k // block
    if nested:
        codes, inner = torch.linspace(-1, 1, 256), 256
        index = torch.from_numpy(rng.integers(0, 256, blocks, dtype=np.uint8))
        outer = torch.rand(-(-blocks // inner)) * 0.01
        state |= {"nested_blocksize": inner, "nested_dtype": "float32", "nested_offset": 0.03}
        absmax = codes[index.long()] * outer.repeat_interleave(inner)[:blocks] + 0.03
        tensors |= {"weight.absmax": index, "weight.nested_absmax": outer, "weight.nested_quant_map": codes}
    else:
        absmax = torch.from_numpy(rng.random(blocks, np.float32) * 0.05)
        tensors["weight.absmax"] = absmax
    tensors["weight.quant_map"] = table
    told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = told
    floats = (table[torch.from_numpy(q)].view(-1, block) * absmax[:, None]).view(n, k)
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, tensors, floats


Maker = Callable[[int, int], Packed]
