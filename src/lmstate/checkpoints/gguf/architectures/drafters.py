"""Drafters in GGUF, which have a file of their own: EAGLE-3.

Their configs and names are those of the folders that `lmstate.models.heads.published` reads.
"""

from __future__ import annotations

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import (
    OUTSIDE,
    STANDARD,
    Architecture,
    HFConfig,
    Tensors,
)


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
}
