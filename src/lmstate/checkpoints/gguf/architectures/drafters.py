"""Drafters in GGUF, which have a file of their own: EAGLE-3, DFlash with DSpark, Gemma 4's assistants.

Their configs and names are those of the folders that `lmstate.models.heads.published` reads.
"""

from __future__ import annotations

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import (
    HEAD_NORMS,
    MOST_WIDTH,
    OUTSIDE,
    STANDARD,
    Architecture,
    HFConfig,
    Tensors,
    layer_kinds,
)
from lmstate.checkpoints.gguf.architectures.shared_kv import SHARED, gemma4
from lmstate.errors import ModelError

GEMMA4 = SHARED["gemma4"]


def _eagle3(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    taps = f"{prefix}.target_layers"
    if taps not in metadata:
        taps = f"{prefix}.extract_layers"  # of the first converters
    config |= {
        "eagle_aux_hidden_state_layer_ids": list(metadata.ints(taps, 3)),
        "norm_before_residual": metadata.bool(f"{prefix}.norm_before_residual", default=False),
        "norm_before_fc": metadata.bool(f"{prefix}.norm_before_fc", default=False),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }
    if (known := tensors.get("d2t")) is not None:
        config["draft_vocab_size"] = known.shape[0]


def _dflash(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """DFlash, and DSpark where there is its low-rank part. The file counts the blocks in front of which it reads."""
    if metadata.int(f"{prefix}.hyper_connection.count", 0, default=0) or "selector_hidden.weight" in tensors:
        raise ModelError(f"{metadata.where} is DeepSeek-V4's DSpark or a DFlash 2; from GGUF, lmstate reads neither")
    if size := metadata.int(f"{prefix}.attention.sliding_window", 0, default=0):
        config["sliding_window"] = size
        config["layer_types"] = layer_kinds(metadata, prefix, config["num_hidden_layers"])
    config |= {
        "block_size": metadata.int(f"{prefix}.block_size", 1),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "dflash_config": {
            "mask_token_id": metadata.int("tokenizer.ggml.mask_token_id"),
            "target_layer_ids": [index - 1 for index in metadata.ints(f"{prefix}.target_layers", low=1)],
            "causal": metadata.bool(f"{prefix}.attention.causal", default=False),
        },
    }
    if (low := tensors.get("markov_w1.weight")) is None:
        return
    if not metadata.bool(f"{prefix}.sample_from_anchor", default=True):
        raise ModelError(f"{metadata.where} drafts nothing at the first place of its blocks, which lmstate cannot run")
    config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": low.shape[-1]}


def _assistant(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Clusters of tokens are left out, as in llama.cpp: its drafts are the most likely of all tokens."""
    gemma4(metadata, prefix, config, tensors)
    config["text_config"] = {**config, "model_type": "gemma4_text"}
    config["backbone_hidden_size"] = metadata.int(f"{prefix}.embedding_length_out", 1, MOST_WIDTH)


DRAFTERS = {
    "eagle3": Architecture(
        "eagle3",
        "LlamaForCausalLMEagle3",
        {**STANDARD, "attn_norm_2": "hidden_norm"},
        paired=True,
        extra=_eagle3,
        outside={**OUTSIDE, "fc.weight": "model.fc.weight", "enc.output_norm.weight": "model.input_norm.weight"},
        changed={"d2t": "token ids"},
        drafter=True,
    ),
    "dflash": Architecture(
        "dflash",
        "DFlashDraftModel",
        {**STANDARD, **HEAD_NORMS},
        extra=_dflash,
        outside={
            "output_norm.weight": "norm.weight",
            "enc.output_norm.weight": "hidden_norm.weight",
            "markov_w1.weight": "markov_head.markov_w1.weight",
            "markov_w2.weight": "markov_head.markov_w2.weight",
            "conf_proj.weight": "confidence_head.proj.weight",
            "conf_proj.bias": "confidence_head.proj.bias",
            "token_embd.weight": "embed_tokens.weight",
            "output.weight": "lm_head.weight",
        },
        layers="layers",
        drafter=True,
    ),
    "gemma4-assistant": Architecture(
        "gemma4_assistant",
        "Gemma4AssistantForCausalLM",
        GEMMA4.layer,
        extra=_assistant,
        whole=GEMMA4.whole,
        outside={
            **OUTSIDE,
            "nextn.pre_projection.weight": "pre_projection.weight",
            "nextn.post_projection.weight": "post_projection.weight",
        },
        varied=True,
        drafter=True,
    ),
}
