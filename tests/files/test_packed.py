"""Checkpoints of packed integers are read as the numbers that their tools mean, rounded again only where they must."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lmstate
from lmstate.checkpoints.open import open_source
from lmstate.checkpoints.source import GroupedQuant, floats
from lmstate.errors import ModelError
from tests.files import packers
from tests.zoo import text as ids

# How a matrix is packed; the storage that it gets; whether that holds the same numbers.
CASES = {
    "gptq": (packers.gptq, "int4", True),
    "gptq-128": (partial(packers.gptq, size=128), "int4", True),
    "gptq-per-output": (partial(packers.gptq, size=-1), "int4", True),
    "gptq-zeros": (partial(packers.gptq, symmetric=False), "int4", True),
    "gptq-v2": (partial(packers.gptq, symmetric=False, version="gptq_v2"), "int4", True),
    "gptq-2-bits": (partial(packers.gptq, bits=2), "int4", True),
    "gptq-8-bits": (partial(packers.gptq, bits=8), "int8", True),
    "gptq-ordered": (partial(packers.gptq, ordered=True), "int8", False),
    "gptq-16": (partial(packers.gptq, size=16), "int8", False),
    "awq": (packers.awq, "int4", True),
    "awq-64": (partial(packers.awq, size=64), "int4", True),
    "awq-16": (partial(packers.awq, size=16), "int8", False),
    "compressed": (packers.compressed, "int4", True),
    "compressed-128": (partial(packers.compressed, size=128), "int4", True),
    "compressed-zeros": (partial(packers.compressed, symmetric=False), "int4", True),
    "compressed-8-bits": (partial(packers.compressed, bits=8, size=-1), "int8", True),
    "compressed-ordered": (partial(packers.compressed, ordered=True), "int8", False),
    "compressed-int8": (packers.int8, "int8", True),
    "compressed-nvfp4": (partial(packers.nvfp4, tool="llm-compressor"), "int8", False),
    "modelopt-nvfp4": (packers.nvfp4, "int8", False),
    "bitnet": (packers.bitnet, "int4", True),
    "bitnet-online": (partial(packers.bitnet, online=True), "int4", True),
    "bitsandbytes-nf4": (packers.nf4, "int8", False),
    "bitsandbytes-nf4-nested": (partial(packers.nf4, nested=True), "int8", False),
    "bitsandbytes-int8": (packers.llm_int8, "int8", True),
}
LAYER = "model.layers.0.self_attn.q_proj"


def folders(where: Path, maker: packers.Maker) -> tuple[Path, Path]:
    """A small Llama whose matrices in layers are packed, and the same one with the floats that they stand for."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=99, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for name in ("packed", "plain"):
        model.save_pretrained(where / name)
    tensors = load_file(where / "plain" / "model.safetensors")
    packed, plain, said = dict(tensors), dict(tensors), {}
    for name, matrix in tensors.items():
        if name.endswith("_proj.weight"):
            said, parts, plain[name] = maker(*matrix.shape)
            del packed[name]
            packed |= {f"{name.removesuffix('.weight')}.{end}": part for end, part in parts.items()}
    save_file(packed, where / "packed" / "model.safetensors")
    save_file(plain, where / "plain" / "model.safetensors")
    told = json.loads((where / "packed" / "config.json").read_text()) | {"quantization_config": said}
    (where / "packed" / "config.json").write_text(json.dumps(told))
    return where / "packed", where / "plain"


@pytest.mark.parametrize("case", CASES)
def test_packed_matrices_are_the_numbers_they_stand_for(case: str, tmp_path: Path) -> None:
    maker, kind, exact = CASES[case]
    packed, plain = folders(tmp_path, maker)
    source, expected = open_source(packed), open_source(plain)
    assert source.names() == expected.names()
    for name in expected.names():
        found, wanted = source.read(name), floats(expected.read(name))
        assert source.shape(name) == tuple(wanted.shape)
        tolerance = 2e-7 if isinstance(found, GroupedQuant) and found.minimum is not None else 0.0
        assert (floats(found) - wanted).abs().max() <= tolerance
    assert isinstance(source.read(f"{LAYER}.weight"), GroupedQuant) == exact
    assert bool(source.conversions) != exact
    tokens = ids(20).tolist()
    ours, theirs = (lmstate.load(folder, weights="float32")(tokens)[0] for folder in (packed, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    model = lmstate.load(packed)
    assert model.blocks[0].mixer.out.kind == kind and model.notes == source.conversions


def damaged(folder: Path, **changes: torch.Tensor | None) -> Path:
    tensors = load_file(folder / "model.safetensors") | {f"{LAYER}.{end}": part for end, part in changes.items()}
    save_file({name: part for name, part in tensors.items() if part is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("maker", "changes"),
    [
        (packers.gptq, {"scales": None}),
        (packers.gptq, {"qzeros": torch.zeros(1, 2, dtype=torch.int32)}),
        (packers.gptq, {"g_idx": torch.full((128,), 99, dtype=torch.int32)}),
        (packers.gptq, {"scales": torch.full((4, 128), torch.nan, dtype=torch.float16)}),
        (packers.awq, {"scales": torch.ones(5, 128)}),
        (packers.compressed, {"weight_scale": torch.ones(128, 3)}),
        (packers.nvfp4, {"weight_scale": torch.ones(128, 2)}),
        (packers.bitnet, {"weight_scale": torch.ones(3)}),
        (packers.nf4, {"weight.quant_map": torch.ones(3)}),
        (packers.nf4, {"weight.absmax": torch.ones(3)}),
        (packers.nf4, {"weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, maker: packers.Maker, changes: dict) -> None:
    packed, _ = folders(tmp_path, maker)
    with pytest.raises(ModelError, match="q_proj"):
        lmstate.load(damaged(packed, **changes), weights="float32")
