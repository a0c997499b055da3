"""Mixtures of experts from GGUF, under the names that the gguf package gives their tensors and converted as llama.cpp
does it: their logits are those of transformers on the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from torch import Tensor

from lmstate.errors import ModelError
from tests.files.test_gguf_attention import loaded, original, same
from tests.zoo import CASES, pair

ARCH = gguf.MODEL_ARCH
GROUPS = {"expert_group_count": 4, "expert_group_used_count": 2}
# A case of the zoo -> its architecture, and what its file says beside the sizes.
FILES: dict[str, tuple[ARCH, dict[str, Any]]] = {
    "afmoe": (
        ARCH.AFMOE,
        {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_norm": True,
         "expert_weights_scale": 1.0, "attention.sliding_window": 13},
    ),
    "qwen2_moe": (ARCH.QWEN2MOE, {"expert_shared_feed_forward_length": 40}),
    "qwen3_vl_moe": (ARCH.QWEN3VLMOE, {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 1}),
    "olmoe": (ARCH.OLMOE, {}),
    "glm4_moe": (
        ARCH.GLM4_MOE,
        {"rope.dimension_count": 8, "leading_dense_block_count": 1, "expert_shared_count": 1,
         "expert_weights_scale": 1.5, "expert_weights_norm": True},
    ),
    "glm4_moe-groups": (
        ARCH.GLM4_MOE, {"leading_dense_block_count": 2, "expert_shared_count": 2, "expert_weights_scale": 1.0, **GROUPS}
    ),
    "minimax_m2": (ARCH.MINIMAXM2, {"rope.dimension_count": 8}),
    "minimax_m2-whole": (ARCH.MINIMAXM2, {}),
    "dots1": (
        ARCH.DOTS1,
        {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 2.5,
         "expert_weights_norm": True},
    ),
    "exaone_moe": (
        ARCH.EXAONE_MOE,
        {"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_weights_scale": 2.5,
         "expert_weights_norm": True, "attention.sliding_window": 14,
         "attention.sliding_window_pattern": [True, True, True, False, True]},
    ),
    "ernie4_5_moe": (ARCH.ERNIE4_5_MOE, {"leading_dense_block_count": 1, "expert_shared_count": 2}),
    "hunyuan_v1_moe": (ARCH.HUNYUAN_MOE, {"expert_shared_feed_forward_length": 40, "expert_shared_count": 1}),
}  # fmt: skip


def first(config: Any, *names: str) -> Any:
    return next(value for name in names if (value := getattr(config, name, None)) is not None)


def metadata(arch: ARCH, config: Any, more: dict[str, Any]) -> dict[str, Any]:
    heads = config.num_attention_heads
    values = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "context_length": config.max_position_embeddings,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "expert_count": first(config, "num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": config.num_experts_per_tok,
    }
    if arch is not ARCH.OLMOE:
        own = arch not in (ARCH.MINIMAXM2, ARCH.HUNYUAN_MOE)
        values["expert_feed_forward_length"] = config.moe_intermediate_size if own else config.intermediate_size
    return {f"{gguf.MODEL_ARCH_NAMES[arch]}.{key}": value for key, value in {**values, **more}.items()}


def converted(arch: ARCH, theirs: Any, config: Any) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    out: dict[str, Tensor] = {}
    for full, tensor in theirs.state_dict().items():
        name = full.replace(".language_model", "")
        if name.startswith("model.visual.") or (name == "lm_head.weight" and theirs.config.tie_word_embeddings):
            continue
        if name.endswith(".mlp.experts.gate_up_proj"):
            stem = f"blk.{name.split('.')[2]}.ffn_"
            out[f"{stem}gate_exps.weight"], out[f"{stem}up_exps.weight"] = tensor.chunk(2, dim=1)
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace(".gate.moe_", ".moe_")
        name = f"{name}.bias" if name.endswith(".expert_bias") else name
        name = f"{name}.weight" if name.endswith(".experts.down_proj") else name
        if arch is ARCH.MINIMAXM2:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        found = names.get_name(name, (".weight", ".bias"))
        if found is None and name.endswith(".experts.down_proj.weight"):
            found = f"blk.{name.split('.')[2]}.ffn_down_exps.weight"
        assert found is not None, name
        out[found] = tensor
    return {name: np.ascontiguousarray(tensor.detach().float().numpy()) for name, tensor in out.items()}


def drafts(arch: str, layer: int, values: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """A head for multi-token prediction behind the last layer, as another block."""
    values[f"{arch}.block_count"] += 1
    values[f"{arch}.nextn_predict_layers"] = 1
    tensors[f"blk.{layer}.nextn.eh_proj.weight"] = np.ones((2, 2), dtype=np.float32)
    tensors[f"blk.{layer}.attn_norm.weight"] = np.ones(2, dtype=np.float32)


def without_windows(case: str) -> Any:
    config = CASES[case]()
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    return original(config)


@pytest.mark.parametrize("case", FILES)
def test_a_mixture_from_gguf(case: str, tmp_path: Path) -> None:
    arch, more = FILES[case]
    theirs = without_windows("dots1") if arch is ARCH.DOTS1 else pair(case)[0]
    config = getattr(theirs.config, "text_config", theirs.config)
    values, tensors = metadata(arch, config, more), converted(arch, theirs, config)
    name = gguf.MODEL_ARCH_NAMES[arch]
    if case in ("glm4_moe", "exaone_moe"):
        drafts(name, config.num_hidden_layers, values, tensors)
    same(loaded(tmp_path, name, values, tensors), theirs)


def test_projections_that_are_clipped_are_refused(tmp_path: Path) -> None:
    theirs, _ = pair("olmoe")
    values = metadata(ARCH.OLMOE, theirs.config, {"attention.clamp_kqv": 8.0})
    with pytest.raises(ModelError, match="clip_qkv"):
        loaded(tmp_path, "olmoe", values, converted(ARCH.OLMOE, theirs, theirs.config))


def test_a_pattern_of_another_length_is_refused(tmp_path: Path) -> None:
    theirs, _ = pair("exaone_moe")
    arch, more = FILES["exaone_moe"]
    values = metadata(arch, theirs.config, {**more, "attention.sliding_window_pattern": [True, False]})
    with pytest.raises(ModelError, match="5 flags"):
        loaded(tmp_path, "exaone-moe", values, converted(arch, theirs, theirs.config))
