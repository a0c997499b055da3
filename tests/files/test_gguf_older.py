"""GPT-2, GPT-NeoX, Falcon, StarCoder 2 and Cohere 2 from GGUF: their logits are those of transformers on the original.

Tensors have the names that the gguf package gives them, and are converted as llama.cpp does it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from torch import Tensor

from tests.files.test_gguf_attention import loaded, same
from tests.zoo import pair

ARCH = gguf.MODEL_ARCH
# A case of the zoo -> its architecture, and what its file says beside the sizes.
FILES: dict[str, tuple[ARCH, dict[str, Any]]] = {
    "cohere2": (ARCH.COHERE2, {"attention.sliding_window": 20, "logit_scale": 0.5, "rope.scaling.type": "none"}),
    "falcon": (ARCH.FALCON, {}),
    "falcon-grouped": (ARCH.FALCON, {}),
    "falcon-one-norm": (ARCH.FALCON, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
    "gpt2": (ARCH.GPT2, {}),
    "gpt_neox": (ARCH.GPTNEOX, {"use_parallel_residual": True, "rope.dimension_count": 2}),
    "starcoder2": (ARCH.STARCODER2, {"attention.sliding_window": 15}),
    "starcoder2-unbiased": (ARCH.STARCODER2, {}),
}


def first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def metadata(arch: ARCH, config: Any, more: dict[str, Any]) -> dict[str, Any]:
    name, heads = gguf.MODEL_ARCH_NAMES[arch], config.num_attention_heads
    kv_heads = heads if arch in (ARCH.GPT2, ARCH.GPTNEOX) else first(config, "num_kv_heads", "num_key_value_heads")
    if arch is ARCH.FALCON and not config.new_decoder_architecture:
        kv_heads = 1
    values = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": first(config, "ffn_hidden_size", "n_inner", "intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "attention.layer_norm_epsilon": first(config, "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
        "context_length": config.max_position_embeddings,
    }
    if getattr(config, "rope_parameters", None):
        values["rope.freq_base"] = config.rope_parameters["rope_theta"]
    return {f"{name}.{key}": value for key, value in {**values, **more}.items()}


def apart(tensor: Tensor, kv_heads: int, head_dim: int) -> np.ndarray:
    """All queries, all keys, all values, of rows that are in groups of the queries of a key, it and its value."""
    groups = tensor.view(kv_heads, -1, head_dim, *tensor.shape[1:])
    parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
    return np.concatenate([part.reshape(-1, *tensor.shape[1:]).numpy() for part in parts])


@pytest.mark.parametrize("case", FILES)
def test_an_older_model_from_gguf(case: str, tmp_path: Path) -> None:
    arch, more = FILES[case]
    theirs, _ = pair(case)
    config = theirs.config
    values = metadata(arch, config, more)
    kv_heads = values[f"{gguf.MODEL_ARCH_NAMES[arch]}.attention.head_count_kv"]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        if config.tie_word_embeddings and name in ("lm_head.weight", "embed_out.weight"):
            continue
        if name.endswith((".masked_bias", ".attn.bias", "inv_freq")):
            continue
        numbers = tensor.detach().float().numpy()
        if "query_key_value" in name:
            numbers = apart(tensor.detach().float(), kv_heads, config.hidden_size // config.num_attention_heads)
        if arch is ARCH.GPT2 and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            numbers = numbers.T
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        tensors[found] = np.ascontiguousarray(numbers)
    same(loaded(tmp_path, gguf.MODEL_ARCH_NAMES[arch], values, tensors), theirs)
