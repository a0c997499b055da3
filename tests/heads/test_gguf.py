"""Multi-token prediction heads from GGUF (`blk.N.nextn.*`), named by the gguf package, converted as llama.cpp does."""

from __future__ import annotations

from dataclasses import replace
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
from tests.files import ggufs, test_gguf_delta, test_gguf_experts, test_gguf_streams
from tests.files.test_gguf_attention import write
from tests.heads.test_parity import logits_of
from tests.heads.zoo import HEADS, Pair, heads_of, pair, past_the_last
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


def opened(path: Path) -> lmstate.Model:
    return build(WeightLoader(open_source(path), "float32", heads=True))


def check(path: Path, name: str) -> None:
    check_made(path, replace(pair(name), ours=opened(path)))


def check_made(path: Path, made: Pair) -> None:
    ours, ids = made.ours, text(40, rows=2)
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


def test_heads_on_wide_streams_from_gguf(tmp_path: Path) -> None:
    """Qwen4-Exp's: two projections in one, and what mixes the streams beside the layer."""
    case, theirs = HEADS["qwen4_exp"], test_gguf_streams.original("qwen4_exp", ple_layer_ids=[2])
    heads = heads_of(theirs, case)
    layers, values = theirs.config.num_hidden_layers, test_gguf_streams.qwen4_exp_values(theirs)
    values |= {"qwen4exp.block_count": layers + 1, "qwen4exp.nextn_predict_layers": 1}
    values["qwen4exp.attention.compress_ratios"] += [0]
    parts = {name: tensor.float().numpy() for name, tensor in heads.layers.state_dict().items()}
    inside = "blocks.0.layer."
    last = {
        name.replace(inside, f"model.layers.{layers}."): part for name, part in parts.items() if name.startswith(inside)
    }
    mixer = "hyper_connection_mixer"
    head = {
        "eh_proj": np.concatenate([parts["fc_embedding.weight"], parts["fc_hidden.weight"]], axis=1),
        "enorm": parts["pre_fc_norm_embedding.weight"] + 1,
        "hnorm": parts["pre_fc_norm_hidden.weight"] + 1,
        "hc_head_norm": parts[f"{mixer}.hc_norm.weight"] + 1,
        **{f"hc_head_{part}": parts[f"{mixer}.input_mix_weight_{part}.weight"] for part in ("down", "up")},
    }
    tensors = {
        **dict(test_gguf_streams.qwen4_exp(theirs)),
        **dict(test_gguf_streams.qwen4_exp_tensors(theirs.config, last)),
        **{f"blk.{layers}.nextn.{name}.weight": value for name, value in head.items()},
    }
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    path = ggufs.write(tmp_path / "model.gguf", "qwen4exp", values, tensors, sizes={"inner": None})
    check_made(path, Pair(case, theirs, heads, opened(path)))


def test_heads_with_an_index_from_gguf(tmp_path: Path) -> None:
    """GLM-5.3's: on one stream, behind layers on several."""
    case, theirs = HEADS["glm5_next"], test_gguf_streams.original("glm5_next", linear_num_heads=6)
    heads, config = heads_of(theirs, case), theirs.config.get_text_config()
    layers, values = config.num_hidden_layers, test_gguf_streams.glm5_next_values(config)
    values |= {"glm5-next.block_count": layers + 1, "glm5-next.nextn_predict_layers": 1}
    values["glm5-next.attention.head_count_kv"] += [1]
    parts = {name: tensor.float().numpy() for name, tensor in heads.layers.state_dict().items()}
    inside = "blocks.0."
    last = {name.replace(inside, f"layers.{layers}."): part for name, part in parts.items() if name.startswith(inside)}
    names = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "post_norm": "shared_head_norm"}
    tensors = {
        **dict(test_gguf_streams.glm5_next(theirs)),
        **dict(test_gguf_streams.glm5_next_tensors(config, last)),
        **{f"blk.{layers}.nextn.{ours}.weight": parts[f"{name}.weight"] for name, ours in names.items()},
    }
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    path = write(tmp_path / "model.gguf", "glm5-next", values, tensors)
    check_made(path, Pair(case, theirs, heads, opened(path)))


def test_a_file_without_heads_says_so(tmp_path: Path) -> None:
    theirs = pair("qwen3_5").theirs
    path = test_gguf_delta.write(tmp_path / "model.gguf", "qwen35", theirs, tmp_path / "saved")
    with pytest.raises(lmstate.ModelError, match="has no multi-token prediction heads"):
        build(WeightLoader(open_source(path), "float32", heads=True))
