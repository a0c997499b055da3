"""Small GGUF files built in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "inner": 96, "layers": 2, "vocab": 64, "experts": 3}
NORMS = ("attn_norm.weight", "ffn_norm.weight")


def blocks(format_: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random valid rows of a format: uint8 [rows, bytes]. Their float16 scales are made finite."""
    form = gguf.GGMLQuantizationType[format_]
    numbers, nbytes = gguf.GGML_QUANT_SIZES[form]
    raw = np.random.default_rng(seed).integers(0, 256, (rows * columns // numbers, nbytes), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
    halves |= {"TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (54,)}
    for at in halves.get(format_, (0, 2) if format_ in ("Q4_K", "Q5_K") else (0,)):
        raw[:, at + 1] = raw[:, at + 1] & 0x83 | 0x20  # exponents from 8 to 11 of 31: scales near 0.01
    return raw.reshape(rows, -1)


def write(
    path: Path,
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
    tensors: dict | None = None,
    sizes: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file: `metadata` on top of the required keys, `tensors` name -> float array or (uint8 rows, format).

    `sizes`: in place of those of `SIZES`; None leaves a key out.
    """
    wanted = {**SIZES, "eps": 1e-5, **(sizes or {})}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(wanted["layers"])
    writer.add_embedding_length(wanted["hidden"])
    if wanted["inner"] is not None:
        writer.add_feed_forward_length(wanted["inner"])
    writer.add_head_count(wanted["heads"])
    if wanted["kv_heads"] is not None:
        writer.add_head_count_kv(wanted["kv_heads"])
    if wanted["head_dim"] is not None:
        writer.add_key_length(wanted["head_dim"])
    writer.add_context_length(256)
    writer.add_layer_norm_rms_eps(wanted["eps"])
    finish(writer, metadata or {}, llama_tensors() if tensors is None else tensors)
    return path


def finish(writer: gguf.GGUFWriter, metadata: dict[str, Any], tensors: dict) -> None:
    """Write metadata and tensors, as in `write`, and close the file."""
    for name, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value[0], int) and max(value) >= 2**31:
            types = gguf.GGUFValueType
            writer.add_key_value(name, value, types.ARRAY, sub_type=types.UINT64)
        else:
            writer.add_array(name, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=gguf.GGMLQuantizationType[value[1]])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def llama_tensors(matrix=lambda name, rows, columns: floats(rows, columns)) -> dict:
    s = SIZES
    queries, keys = s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
    shapes = {
        "attn_q": (queries, s["hidden"]),
        "attn_k": (keys, s["hidden"]),
        "attn_v": (keys, s["hidden"]),
        "attn_output": (s["hidden"], queries),
        "ffn_gate": (s["inner"], s["hidden"]),
        "ffn_up": (s["inner"], s["hidden"]),
        "ffn_down": (s["hidden"], s["inner"]),
    }
    tensors = {"token_embd.weight": matrix("token_embd", s["vocab"], s["hidden"]), "output_norm.weight": floats(64)}
    for layer in range(s["layers"]):
        tensors |= {f"blk.{layer}.{name}": floats(s["hidden"], seed=layer) for name in NORMS}
        tensors |= {f"blk.{layer}.{name}.weight": matrix(name, *shape) for name, shape in shapes.items()}
    return tensors
