"""Models of windows, sinks and latents from GGUF: converted here as llama.cpp does it, their logits are those of
transformers on the original."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from lmstate.errors import ModelError
from lmstate.models.families import build
from tests.files.ggufs import write
from tests.zoo import latent, randomize, text, windows

Named = Iterator[tuple[str, Tensor]]
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INSIDE = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.router": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "input_layernorm": "attn_norm",
}  # fmt: skip
LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def original(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    return model


def converted(model: Any, norms: dict[str, str], special: Callable[[str, Tensor], Named | None]) -> dict[str, Any]:
    """The tensors of a GGUF file. `special(name inside a layer, tensor)` yields those that do not keep their form."""
    names = {**INSIDE, **norms}
    out: dict[str, Tensor] = {}
    for full, tensor in model.state_dict().items():
        if full == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if not full.startswith("model.layers."):
            stem, ending = full.rsplit(".", 1)
            made = special(stem, tensor)
            out[f"{OUTSIDE[stem]}.{ending}"] = dict(made)["norm"] if made is not None else tensor
            continue
        layer, inside = full.removeprefix("model.layers.").split(".", 1)
        for name, value in special(inside, tensor) or iter([(inside, tensor)]):
            stem, ending = name.rsplit(".", 1)
            out[f"blk.{layer}.{names.get(stem, stem)}.{ending}"] = value
    return {name: np.ascontiguousarray(tensor.detach().float().numpy()) for name, tensor in out.items()}


def metadata(config: Any, arch: str, **more: Any) -> dict[str, Any]:
    values = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "context_length": config.max_position_embeddings,
    } | {name.replace("__", "."): value for name, value in more.items()}
    return {f"{arch}.{name}": value for name, value in values.items()}


def loaded(path: Path, arch: str, values: dict[str, Any], tensors: dict[str, Any], kind: str = "float32") -> Any:
    return build(WeightLoader(open_source(write(path / "model.gguf", arch, values, tensors)), kind))


def same(ours: lmstate.Model, theirs: Any, bound: float = 1e-4, length: int = 100) -> None:
    ids = text(length, rows=2)
    with torch.no_grad():
        expected = theirs(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(ids), expected, atol=bound, rtol=bound)


def gemma_special(name: str, tensor: Tensor) -> Named | None:
    if name == "model.norm":
        return iter([("norm", tensor + 1)])
    return iter([(name, tensor + 1)]) if name.endswith("norm.weight") else None


def test_gemma2_from_gguf(tmp_path: Path) -> None:
    config = windows._config(
        "Gemma2Config", head_dim=16, sliding_window=11, query_pre_attn_scalar=16, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    )  # fmt: skip
    theirs = original(config)
    values = metadata(
        config, "gemma2", attention__sliding_window=11, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    )
    same(loaded(tmp_path, "gemma2", values, converted(theirs, GEMMA_NORMS, gemma_special)), theirs)


def test_gemma3_from_gguf(tmp_path: Path) -> None:
    config = windows._config(
        "Gemma3TextConfig", head_dim=16, sliding_window=10, query_pre_attn_scalar=16, num_hidden_layers=7,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    theirs = original(config)
    more = {"rope__freq_base": 1e6, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    values = metadata(config, "gemma3", attention__sliding_window=10, **more)
    same(loaded(tmp_path, "gemma3", values, converted(theirs, GEMMA_NORMS, gemma_special)), theirs)


def gpt_oss(**changes: Any) -> tuple[Any, dict[str, Any]]:
    """The original, and the metadata of its file."""
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = windows._config(
        "GptOssConfig", hidden_size=64, intermediate_size=32, head_dim=16, sliding_window=13, num_local_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, rope_parameters=yarn, max_position_embeddings=256, **changes,
    )  # fmt: skip
    more = {
        "attention__sliding_window": 13, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
        "rope__freq_base": 1e4, "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 64, "rope__scaling__yarn_beta_fast": 32.0,
        "rope__scaling__yarn_beta_slow": 1.0,
    }  # fmt: skip
    return original(config), metadata(config, "gpt-oss", **more)


def gpt_oss_special(name: str, tensor: Tensor) -> Named | None:
    if name == "self_attn.sinks":
        return iter([("attn_sinks.weight", tensor)])
    if ".experts." not in name:
        return None
    if name.endswith("_bias"):
        ending, parts = "bias", (tensor[..., 0::2], tensor[..., 1::2])
    else:
        ending, tensor = "weight", tensor.mT
        parts = (tensor[:, 0::2], tensor[:, 1::2])
    if "gate_up" in name:
        return iter([(f"ffn_gate_exps.{ending}", parts[0]), (f"ffn_up_exps.{ending}", parts[1])])
    return iter([(f"ffn_down_exps.{ending}", tensor)])


GPT_OSS_NORMS = {"post_attention_layernorm": "post_attention_norm"}


def test_gpt_oss_from_gguf(tmp_path: Path) -> None:
    theirs, values = gpt_oss()
    same(loaded(tmp_path, "gpt-oss", values, converted(theirs, GPT_OSS_NORMS, gpt_oss_special)), theirs)


def test_biases_that_do_not_fit_their_matrices_are_refused(tmp_path: Path) -> None:
    theirs, values = gpt_oss()
    tensors = converted(theirs, GPT_OSS_NORMS, gpt_oss_special)
    for name, wrong in (("blk.0.attn_q.bias", "blk.0.attn_v.bias"), ("blk.0.attn_output.bias", "blk.0.attn_k.bias")):
        with pytest.raises(ModelError, match="has the shape"):
            loaded(tmp_path, "gpt-oss", values, {**tensors, name: tensors[wrong]})


def with_blocks(theirs: Any) -> dict[str, Tensor]:
    """Gives a gpt-oss model experts that MXFP4 can hold; returns its tensors as a published checkpoint stores them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(5)
    out: dict[str, Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")) or ".experts." not in name:
            out[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, shape[:-1], generator=generator, dtype=torch.uint8)
        tensor.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        out |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return out


def save_mxfp4(folder: Path) -> Any:
    """Write a gpt-oss checkpoint as it is published; returns transformers' model of it."""
    import json

    from safetensors.torch import save_file

    theirs, _ = gpt_oss()
    tensors = with_blocks(theirs)
    theirs.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return theirs


@pytest.mark.parametrize("kind", ["float32", "auto"])
def test_gpt_oss_from_mxfp4_checkpoint(tmp_path: Path, kind: str) -> None:
    theirs = save_mxfp4(tmp_path)
    ours = build(WeightLoader(open_source(tmp_path), kind))
    expert = ours.blocks[0].mlp.experts[1]  # type: ignore[union-attr]
    exact = theirs.model.layers[0].mlp.experts.down_proj[1].T
    assert expert.down.kind == ("float32" if kind == "float32" else "int8")
    assert torch.equal(expert.down.dequantize(), exact)
    if kind == "float32":
        same(ours, theirs)


def test_gpt_oss_from_mxfp4_gguf(tmp_path: Path) -> None:
    theirs, values = gpt_oss()
    tensors = converted(theirs, GPT_OSS_NORMS, gpt_oss_special)
    generator = np.random.default_rng(3)
    exact = {}
    for name in [name for name in tensors if "_exps.weight" in name]:
        experts, rows, columns = tensors[name].shape
        raw = generator.integers(0, 256, (experts, rows, columns // 32, 17), dtype=np.uint8)
        raw[..., 0] = 120 + raw[..., 0] % 5
        raw = raw.reshape(experts, rows, -1)
        exact[name] = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4))
        tensors[name] = (raw, "MXFP4")
    for index, layer in enumerate(theirs.model.layers):
        gate, up, down = (exact[f"blk.{index}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        layer.mlp.experts.gate_up_proj.data = torch.stack([gate, up], dim=2).flatten(1, 2).mT.contiguous()
        layer.mlp.experts.down_proj.data = down.mT.contiguous()
    same(loaded(tmp_path, "gpt-oss", values, tensors), theirs)


def latent_special(config: Any, parted: bool) -> Callable[[str, Tensor], Named | None]:
    """What of latent attention and its experts does not keep its form; `parted`: `kv_b_proj` is two tensors."""
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim

    def special(name: str, tensor: Tensor) -> Named | None:
        if name == "mlp.gate.e_score_correction_bias":
            return iter([("exp_probs_b.bias", tensor)])
        if name == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            return iter([("ffn_gate_exps.weight", gate), ("ffn_up_exps.weight", up)])
        if name == "mlp.experts.down_proj":
            return iter([("ffn_down_exps.weight", tensor)])
        if name == "self_attn.kv_b_proj.weight" and parted:
            keys, values = tensor.view(heads, -1, tensor.shape[1]).split([nope, config.v_head_dim], dim=1)
            return iter([("attn_k_b.weight", keys.mT), ("attn_v_b.weight", values)])
        return None

    return special


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_deepseek_from_gguf(tmp_path: Path, version: int, parted: bool) -> None:
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 0.7,
    }  # fmt: skip
    extra = {"topk_method": "group_limited_greedy", "q_lora_rank": None} if version == 2 else {}
    config = latent._config(f"DeepseekV{version}Config", rope_parameters=yarn, routed_scaling_factor=1.5, **extra)
    theirs = original(config)
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    more = {
        "attention__key_length": key, "attention__value_length": config.v_head_dim,
        "attention__kv_lora_rank": config.kv_lora_rank, "rope__dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": 1, "expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 24,
        "expert_shared_count": config.n_shared_experts, "expert_weights_scale": 1.5,
        "expert_weights_norm": version == 3, "expert_gating_func": version - 1, "expert_group_count": 4,
        "expert_group_used_count": 2, "rope__freq_base": 1e4, "rope__scaling__type": "yarn",
        "rope__scaling__factor": 8.0, "rope__scaling__original_context_length": 64,
        "rope__scaling__yarn_log_multiplier": 0.07,
    }  # fmt: skip
    if version == 3:
        more["attention__q_lora_rank"] = config.q_lora_rank
    if parted:
        more |= {
            "attention__key_length_mla": key, "attention__value_length_mla": config.v_head_dim,
            "attention__key_length": config.kv_lora_rank + config.qk_rope_head_dim,
            "attention__value_length": config.kv_lora_rank, "attention__head_count_kv": 1,
        }  # fmt: skip
    values = metadata(config, "deepseek2", **more)
    tensors = converted(theirs, LLAMA_NORMS, latent_special(config, parted))
    same(loaded(tmp_path, "deepseek2", values, tensors), theirs)


@pytest.mark.parametrize("case", ["glm_moe_dsa", "glm_moe_dsa-shared"])
def test_glm5_from_gguf(tmp_path: Path, case: str) -> None:
    config = latent.CASES[case]()
    theirs = original(config)
    more = {
        "attention__key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention__value_length_mla": config.v_head_dim, "attention__head_count_kv": 1,
        "attention__key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention__value_length": config.kv_lora_rank, "attention__kv_lora_rank": config.kv_lora_rank,
        "attention__q_lora_rank": config.q_lora_rank, "rope__dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": 1, "expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 24,
        "expert_shared_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2,
        "expert_group_count": 4, "expert_group_used_count": 2, "rope__freq_base": 1e4,
        "attention__indexer__head_count": config.index_n_heads,
        "attention__indexer__key_length": config.index_head_dim, "attention__indexer__top_k": config.index_topk,
    }  # fmt: skip
    tensors = converted(theirs, LLAMA_NORMS, latent_special(config, parted=True))
    same(loaded(tmp_path, "glm-dsa", metadata(config, "glm-dsa", **more), tensors), theirs)


def test_mixtral_from_gguf(tmp_path: Path) -> None:
    config = windows._config("MixtralConfig", head_dim=8, num_local_experts=5, num_experts_per_tok=2)
    theirs = original(config)

    def special(name: str, tensor: Tensor) -> Named | None:
        for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if name == f"self_attn.{part}_proj.weight":  # halves of a head to neighboring pairs
                turned = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
                return iter([(f"attn_{part}.weight", turned)])
        if name == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            return iter([("ffn_gate_exps.weight", gate), ("ffn_up_exps.weight", up)])
        return iter([("ffn_down_exps.weight", tensor)]) if name == "mlp.experts.down_proj" else None

    values = metadata(config, "llama", expert_count=5, expert_used_count=2, rope__freq_base=1e6)
    same(loaded(tmp_path, "llama", values, converted(theirs, LLAMA_NORMS, special)), theirs)
