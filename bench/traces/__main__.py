"""`python -m bench.traces`: tokens that agents' traffic computes over those that are new, by layer kind and budget.

Counts, of small models of random weights: any machine gives them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import lmstate
from bench.traces import TRACES
from bench.traces.run import run_budgets

PARTS = (1, 2, 4, 8)  # of the memory that holds all, one in so many
KINDS = ("attention", "window", "latent", "hybrid", "state space")
COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def config(kind: str) -> Any:
    import transformers as hf

    if kind == "attention":
        return hf.LlamaConfig(**COMMON)
    if kind == "window":
        return hf.MistralConfig(**COMMON, sliding_window=256)
    if kind == "latent":
        return hf.DeepseekV2Config(
            **COMMON | {"num_key_value_heads": 4}, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16,
            qk_rope_head_dim=8, v_head_dim=16, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
            n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
        )  # fmt: skip
    if kind == "hybrid":  # one layer in four attends, the others are gated delta rules
        return hf.Qwen3_5TextConfig(
            **COMMON, head_dim=16, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=16,
            linear_value_head_dim=16,
        )  # fmt: skip
    plain = {name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id")}
    return hf.Mamba2Config(**plain, num_heads=8, head_dim=16, state_size=16, n_groups=1, chunk_size=64)


def tiny(kind: str) -> lmstate.Model:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config(kind)).save_pretrained(folder)
        model = lmstate.load(folder, weights="float32")
        return replace(model, eos_ids=frozenset({COMMON["eos_token_id"]}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.traces", description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--out", type=Path, default=Path("build/bench/traces.json"))
    options = parser.parse_args()
    print("| layers | trace | new | " + " | ".join(f"1/{part}" if part > 1 else "all" for part in PARTS) + " |")
    print("|---|---|---|" + "---|" * len(PARTS))
    rows = []
    for kind in options.kinds.split(","):
        model = tiny(kind)
        for name in TRACES:
            runs = run_budgets(model, name, PARTS)
            ratios = " | ".join(f"{run.computed / run.new:.3f}" for run in runs)
            print(f"| {kind} | {name} | {runs[0].new} | {ratios} |", flush=True)
            rows += [{"layers": kind, **asdict(run)} for run in runs]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
