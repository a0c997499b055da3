"""Dense models from GGUF, under the names that the gguf package gives their tensors and converted as llama.cpp does it:
their logits are those of transformers on the original."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from lmstate.errors import ModelError
from tests.files.test_gguf_attention import loaded, same
from tests.zoo import pair

ARCH = gguf.MODEL_ARCH
# A case of the zoo -> its architecture, and what its file says beside the sizes.
FILES: dict[str, tuple[ARCH, dict[str, Any]]] = {
    "gemma": (ARCH.GEMMA, {}),
    "apertus": (ARCH.APERTUS, {"rope.freq_base": 12e6}),
    "arcee": (ARCH.ARCEE, {}),
    "cohere-head-norms": (ARCH.COMMAND_R, {"logit_scale": 2.0, "rope.scaling.type": "none"}),
    "ernie4_5": (ARCH.ERNIE4_5, {}),
    "exaone4": (ARCH.EXAONE4, {"attention.sliding_window": 13}),
    "exaone4-full": (ARCH.EXAONE4, {}),
    "exaone4-pattern": (
        ARCH.EXAONE4,
        {"attention.sliding_window": 30, "attention.sliding_window_pattern": [False, True, True]},
    ),
    "glm4": (ARCH.GLM4, {"rope.dimension_count": 8}),
    "glm4-tied": (ARCH.GLM4, {"rope.dimension_count": 2}),
    "hunyuan_v1_dense": (ARCH.HUNYUAN_DENSE, {}),
    "hunyuan_v1_dense-alpha": (ARCH.HUNYUAN_DENSE, {"rope.freq_base": 1e4 * 50.0 ** (8 / 6)}),
    "ministral3": (
        ARCH.MISTRAL3,
        {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.5,
        },
    ),
    "nemotron": (ARCH.NEMOTRON, {"rope.dimension_count": 8}),
    "olmo": (ARCH.OLMO, {"attention.layer_norm_epsilon": 1e-5}),
    "olmo-clipped": (ARCH.OLMO, {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 0.7}),
    "phi": (ARCH.PHI2, {"rope.dimension_count": 4}),
    "qwen2_vl": (ARCH.QWEN2VL, {"rope.dimension_sections": [1, 1, 2, 0]}),
    "qwen3_vl": (ARCH.QWEN3VL, {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 1}),
    "stablelm": (ARCH.STABLELM, {"rope.dimension_count": 2}),
    "stablelm-parallel": (ARCH.STABLELM, {"rope.dimension_count": 8}),
    "seed_oss": (ARCH.SEED_OSS, {}),
    "seed_oss-biased": (ARCH.SEED_OSS, {}),
}  # fmt: skip
PERMUTED = (ARCH.ARCEE, ARCH.LLAMA, ARCH.MISTRAL3, ARCH.OLMO)
ONE_MORE = (ARCH.GEMMA, ARCH.GEMMA3, ARCH.NEMOTRON)
SEEN = (
    "model.vision",
    "model.visual.",
    "model.multi_modal_projector.",
    "model.connector.",
    "model.image_newline",
)  # of pictures


def metadata(arch: ARCH, config: Any, more: dict[str, Any]) -> dict[str, Any]:
    name = gguf.MODEL_ARCH_NAMES[arch]
    heads = config.num_attention_heads
    eps = next(value for key in ("layer_norm_eps", "norm_eps") if (value := getattr(config, key, 1e-5)))
    values = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", 1e-5),
        "attention.layer_norm_epsilon": eps,
        "context_length": config.max_position_embeddings,
        "rope.freq_base": config.rope_parameters.get("rope_theta", 1e6),  # of Gemma 3, which has two
    }
    return {f"{name}.{key}": value for key, value in {**values, **more}.items()}


def halves_to_pairs(tensor: Tensor, heads: int) -> Tensor:
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def converted(arch: ARCH, theirs: Any, config: Any) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {re.sub(r"\.(language|text)_model", "", name): tensor for name, tensor in theirs.state_dict().items()}
    if theirs.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if arch is ARCH.STABLELM:
        for name in [name for name in tensors if name.endswith(".norms.0.weight")]:
            stem, heads = name.removesuffix(".norms.0.weight"), []
            while (each := f"{stem}.norms.{len(heads)}.weight") in tensors:
                heads.append(tensors.pop(each))
            tensors[f"{stem}.weight"] = torch.stack(heads)
    out = {}
    for name, tensor in tensors.items():
        if name.startswith(SEEN) or ".act_fn." in name:
            continue
        if arch in PERMUTED and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            kv = "k_proj" in name
            tensor = halves_to_pairs(tensor, config.num_key_value_heads if kv else config.num_attention_heads)
        if arch in ONE_MORE and name.endswith("norm.weight"):
            tensor = tensor + 1
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        out[found] = np.ascontiguousarray(tensor.detach().float().numpy())
    return out


@pytest.mark.parametrize("case", FILES)
def test_a_dense_model_from_gguf(case: str, tmp_path: Path) -> None:
    arch, more = FILES[case]
    theirs, _ = pair(case)
    config = getattr(theirs.config, "text_config", theirs.config)
    values, tensors = metadata(arch, config, more), converted(arch, theirs, config)
    if arch is ARCH.APERTUS:
        for name in ("alpha_p", "alpha_n", "beta", "eps"):
            values[f"xielu.{name}"] = [getattr(layer.mlp.act_fn, name).item() for layer in theirs.model.layers]
        slowed = theirs.model.rotary_emb.inv_freq
        plain = config.rope_parameters["rope_theta"] ** -torch.linspace(0, 1, len(slowed) + 1)[:-1]
        tensors["rope_freqs.weight"] = (plain / slowed).numpy()
    same(loaded(tmp_path, gguf.MODEL_ARCH_NAMES[arch], values, tensors), theirs)


def test_a_phi_whose_projections_are_one_matrix_is_refused(tmp_path: Path) -> None:
    theirs, _ = pair("phi")
    tensors = converted(ARCH.PHI2, theirs, theirs.config)
    tensors["blk.0.attn_qkv.weight"] = tensors.pop("blk.0.attn_q.weight")
    with pytest.raises(ModelError, match="one matrix"):
        loaded(tmp_path, "phi2", metadata(ARCH.PHI2, theirs.config, {}), tensors)
