"""Multi-token prediction heads from GGUF (`blk.N.nextn.*`), named by the gguf package, converted as llama.cpp does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from tests.files import test_gguf_delta, test_gguf_experts
from tests.files.test_gguf_attention import write
from tests.heads.test_parity import logits_of
from tests.heads.zoo import pair, past_the_last
from tests.zoo import text

BOUND = 1e-4
NEXTN = {  # which older gguf packages have no architecture for
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}


def head_tensors(arch: Any, name: str) -> dict[str, np.ndarray]:
    """The head's tensors under ggml's names, as block N behind the last."""
    made = pair(name)
    layers = made.theirs.config.num_hidden_layers
    names = gguf.get_tensor_name_map(arch, layers + 1)
    out: dict[str, Tensor] = {}
    for theirs, tensor in made.mtp.layers.state_dict().items():
        full = past_the_last(f"layers.{theirs}", layers)
        stem = full.removesuffix(".weight").removeprefix(f"model.layers.{layers}.")
        if full.endswith(".mlp.experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            out |= {f"blk.{layers}.ffn_gate_exps.weight": gate, f"blk.{layers}.ffn_up_exps.weight": up}
        elif full.endswith(".mlp.experts.down_proj"):
            out[f"blk.{layers}.ffn_down_exps.weight"] = tensor
        elif stem in NEXTN:
            out[f"blk.{layers}.{NEXTN[stem]}.weight"] = tensor
        else:
            full = full.replace("e_score_correction_bias", "e_score_correction.bias")
            found = names.get_name(full, (".weight", ".bias"))
            assert found is not None, full
            out[found] = tensor
    return {name: np.ascontiguousarray(tensor.float().numpy()) for name, tensor in out.items()}


def check(path: Path, name: str) -> None:
    made, ids = pair(name), text(40, rows=2)
    ours = build(WeightLoader(open_source(path), "float32", heads=True))
    (expected,), (got,) = made.logits(ids), logits_of(ours, ids)
    torch.testing.assert_close(got[:, 1:], expected, atol=BOUND, rtol=BOUND)
    without = build(WeightLoader(open_source(path), "float32"))
    assert not without.heads
    torch.testing.assert_close(without(ids), ours(ids), atol=0, rtol=0)


@pytest.mark.parametrize("name", ["glm4_moe", "exaone_moe"])
def test_heads_of_mixtures_from_gguf(name: str, tmp_path: Path) -> None:
    arch, more = test_gguf_experts.FILES[name]
    config = pair(name).theirs.config
    values = test_gguf_experts.metadata(arch, config, more)
    kind = gguf.MODEL_ARCH_NAMES[arch]
    values |= {f"{kind}.block_count": config.num_hidden_layers + 1, f"{kind}.nextn_predict_layers": 1}
    tensors = test_gguf_experts.converted(arch, pair(name).theirs, config) | head_tensors(arch, name)
    check(write(tmp_path / "model.gguf", kind, values, tensors), name)


def test_heads_of_hybrids_from_gguf(tmp_path: Path) -> None:
    tensors = head_tensors(gguf.MODEL_ARCH.QWEN35, "qwen3_5")
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = tensor + 1  # the converter adds what the model adds
    theirs = pair("qwen3_5").theirs
    path = tmp_path / "model.gguf"
    test_gguf_delta.write(path, "qwen35", theirs, tmp_path / "saved", drafts=1, more=tensors)
    check(path, "qwen3_5")


def test_a_file_without_heads_says_so(tmp_path: Path) -> None:
    theirs = pair("qwen3_5").theirs
    path = test_gguf_delta.write(tmp_path / "model.gguf", "qwen35", theirs, tmp_path / "saved")
    with pytest.raises(lmstate.ModelError, match="has no multi-token prediction heads"):
        build(WeightLoader(open_source(path), "float32", heads=True))
