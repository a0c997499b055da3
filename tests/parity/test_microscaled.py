"""Checkpoints whose scales are powers of two: 8-bit and 4-bit floats give the logits of the numbers they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.errors import ModelError
from lmstate.models.families import build
from tests.parity.test_fp8 import original
from tests.zoo import text

Tensors = dict[str, Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
EXPERT = "model.layers.0.ffn.experts.0.w1"


def exponents(blocks: Tensor, largest: float) -> Tensor:
    """The smallest powers of two, as bytes, by which blocks `[..., n]` are at most `largest`."""
    return (blocks.abs().amax(-1) / largest).log2().ceil().add(127).to(torch.uint8)


def eight_bits(matrix: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """E4M3 numbers, exponents of blocks, and the numbers that they stand for, of a matrix `[..., N, K]`."""
    blocks = (
        matrix.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).movedim(-3, -2)
    )  # [.., N', K', rows, columns]
    powers = exponents(blocks.flatten(-2), 448.0)
    whole = torch.exp2(powers.float() - 127)[..., None, None]
    numbers = (blocks / whole).to(torch.float8_e4m3fn)

    def joined(parts: Tensor) -> Tensor:
        return parts.movedim(-2, -3).flatten(-4, -3).flatten(-2).contiguous()

    return joined(numbers.float()).to(torch.float8_e4m3fn), powers, joined(numbers.float() * whole)


def four_bits(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two E2M1 numbers a byte, the first in its low half, exponents of groups of 32, and what they stand for."""
    groups = matrix.unflatten(-1, (-1, 32))
    powers = exponents(groups, 6.0)
    whole = torch.exp2(powers.float() - 127)[..., None]
    codes = (groups[..., None] / whole[..., None] - E2M1).abs().argmin(-1)
    bits = codes.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2))
    return (bits[..., 0] | bits[..., 1] << 4).view(torch.int8), powers, (E2M1[codes] * whole).flatten(-2)


def deepseek_v4(name: str, tensor: Tensor) -> tuple[Tensors, Tensor] | None:
    """As DeepSeek-V4 is published: experts of four bits, and blocks of eight elsewhere."""
    stem = name.removesuffix("weight")
    if ".experts." in name:
        packed, powers, whole = four_bits(tensor)
    elif ".attn.w" in name and min(tensor.shape) >= 16 and not tensor.shape[0] % 16 and not tensor.shape[1] % 16:
        packed, powers, whole = eight_bits(tensor, 16, 16)
    else:
        return None
    return {name: packed, f"{stem}scale": powers.view(torch.float8_e8m0fnu)}, whole


def inkling2(name: str, tensor: Tensor) -> tuple[Tensors, Tensor] | None:
    """As Inkling 2 is published: experts of eight bits in groups of 32, whose exponents are bytes."""
    if ".experts." not in name:
        return None
    packed, powers, whole = eight_bits(tensor, 1, 32)
    return {name: packed, f"{name}_scale": powers}, whole


V4 = {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "deepseek_v4": (deepseek_v4, {"hidden_size": 64, "intermediate_size": 32, "q_lora_rank": 16}, V4),
    "inkling2": (inkling2, {"hidden_size": 64, "intermediate_size": 32}, {"quant_method": "mxfp8"}),
}


def write(kind: str, folder: Path) -> tuple[Path, Path]:
    """Folders of a small model: quantized, and with the numbers that this stands for as floats."""
    pack, changes, settings = KINDS[kind]
    packed, plain = folder / "packed", folder / "plain"
    theirs = original(kind, changes)
    theirs.save_pretrained(packed)
    theirs.save_pretrained(plain)
    tensors, whole = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    found = {name: made for name, tensor in tensors.items() if (made := pack(name, tensor)) is not None}
    assert any(made[0][name].dtype == torch.float8_e4m3fn for name, made in found.items())
    for name, (parts, numbers) in found.items():
        tensors |= parts
        whole[name] = numbers
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": settings}
    (packed / "config.json").write_text(json.dumps(config))
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(whole, plain / "model.safetensors", metadata={"format": "pt"})
    return packed, plain


@pytest.mark.parametrize("kind", KINDS)
def test_published_scales_give_the_logits_of_their_numbers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    packed, plain = write(kind, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    ours = build(WeightLoader(open_source(packed), "float32"))
    with torch.no_grad():
        torch.testing.assert_close(ours(text(40)), theirs(text(40)).logits, atol=1e-4, rtol=1e-4)
    # Four bits lie in groups of eight without rounding.
    build(WeightLoader(open_source(packed), "auto"))(text(9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[f"{EXPERT}.scale"].view(torch.uint8).fill_(255), "infinities or NaN"),
        (lambda t: t.update({f"{EXPERT}.scale": t[f"{EXPERT}.scale"][:, :1].contiguous()}), "should have"),
        (lambda t: t.update({f"{EXPERT}.weight": t[f"{EXPERT}.weight"][:, :8].contiguous()}), "groups of 32"),
        (lambda t: t.pop(f"{EXPERT}.scale"), "int8"),
        (lambda t: t["model.layers.0.attn.wq_b.scale"].view(torch.uint8).fill_(255), "infinities or NaN"),
    ],
)
def test_damaged_scales_are_refused(change: Callable[[Tensors], Any], message: str, tmp_path: Path) -> None:
    packed, _ = write("deepseek_v4", tmp_path)
    tensors = load_file(packed / "model.safetensors")
    change(tensors)
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        build(WeightLoader(open_source(packed), "float32"))
