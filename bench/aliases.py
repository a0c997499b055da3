"""Find model types of transformers that a family here already runs: `python -m bench.aliases [TYPE ...]`.

Builds each causal type that has no family small, with random weights, renames it to every family, and compares logits.
A family whose logits agree runs the type: it then needs a line in `FAMILIES`, the defaults of its config class, and a
case in the zoo of the tests. Run it again whenever transformers moves; it takes some minutes for all types.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import lmstate
from lmstate.models.families import FAMILIES

# What a config of each of these fields gets, where its class has the field and a number in it.
SMALL = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "sliding_window": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "n_embd": 64, "n_layer": 4, "n_head": 4, "d_model": 64,
}  # fmt: skip
BOUND = 1e-4
TOKENS = 40  # past the small windows


def small(name: str) -> Any:
    """A small random model of a type of transformers, in float32."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[name]
    known = config_class().to_dict()
    changes: dict[str, Any] = {field: value for field, value in SMALL.items() if isinstance(known.get(field), int)}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**changes), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.6 / parameter.shape[-1] ** 0.5
    return model


def agreeing(name: str) -> Iterator[tuple[str, float]]:
    """The families that run a type, and the largest difference of a logit."""
    model = small(name)
    tokens = torch.arange(1, TOKENS + 1)[None] * 7 % 90 + 3
    with torch.no_grad():
        expected = model(tokens).logits
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = Path(folder) / "config.json"
        config = json.loads(path.read_text())
        for family in FAMILIES:
            path.write_text(json.dumps({**config, "model_type": family}))
            try:
                logits = lmstate.load(folder, weights="float32")(tokens.tolist())
            except (ValueError, RuntimeError, OSError):
                continue
            difference = float((logits - expected).abs().max())
            if difference < BOUND:
                yield family, difference


def main(names: list[str]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for name in names or [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in FAMILIES]:
        try:
            found = ", ".join(f"{family} ({difference:.0e})" for family, difference in agreeing(name))
        except Exception as error:  # a type that does not shrink so is not looked at
            print(f"{name}: not built small ({type(error).__name__}: {str(error).splitlines()[0][:80]})", flush=True)
            continue
        print(f"{name}: {found or 'none'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
