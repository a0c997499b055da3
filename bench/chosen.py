"""Speed of layers that choose what they attend to: random weights, their published attention in few narrow layers.

Three bars. Decode at 32,000 tokens takes at most 1.3 times what it takes at 4,000. Prompts of 8,000 are at least twice
as fast as those of transformers, in the same process and by turns. Beside decode stands what a step reads
(`lmstate inspect MODEL` shows the same parts), and how much of the bandwidth of plain sums that is. Heads are a quarter
to an eighth of the published number, those of an index too.

`python -m bench.chosen [--threads N] [--cpu-time] [--only decode|prompts] [--rounds N] [name ...]`
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from bench import hybrids
from bench.hybrids import Ours, Peer, Result, alternate, checkpoint, decode, result, text
from bench.limits import bandwidth

SHORT, LONG, PROMPT = 4000, 32_000, 8000
ROUNDS = 9  # of decode
LONGER, FASTER = 1.3, 2.0  # the bars
SMALL: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "max_position_embeddings": 65_536,
}
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LATENT: dict[str, Any] = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 768, "kv_lora_rank": 512,
    "intermediate_size": 2816, "moe_intermediate_size": 512, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "index_n_heads": 8, "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip


def deepseek_v32() -> Any:
    from transformers import DeepseekV32Config

    return DeepseekV32Config(
        **SMALL, **IDS, **LATENT, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, head_dim=64,
        n_group=1, topk_group=1, mlp_layer_types=["dense", "sparse"],
    )  # fmt: skip


def minimax_m3() -> Any:
    from transformers import MiniMaxM3VLTextConfig

    return MiniMaxM3VLTextConfig(
        **SMALL, **IDS, num_attention_heads=16, num_key_value_heads=4, head_dim=128, intermediate_size=512,
        dense_intermediate_size=2816, shared_intermediate_size=512, num_local_experts=8, num_experts_per_tok=2,
        index_n_heads=4, index_head_dim=128, index_block_size=128, index_topk_blocks=16,
        layer_types=["minimax_m3_sparse"] * 2, mlp_layer_types=["dense", "sparse"],
    )  # fmt: skip


def qwen4_exp() -> Any:
    from transformers import Qwen4ExpTextConfig

    return Qwen4ExpTextConfig(
        **SMALL, **IDS, num_attention_heads=16, num_key_value_heads=2, head_dim=256, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_experts=8, num_experts_per_tok=2, hc_lowrank=160, ple_layer_ids=[],
        indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=2048, indexer_compress_ratio=4,
        layer_types=["linear_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    )  # fmt: skip


def glm5_next() -> Any:
    from transformers import Glm5NextConfig, Glm5NextTextConfig, Glm5NextVisionConfig

    words = Glm5NextTextConfig(
        **SMALL, **IDS, **LATENT, qk_nope_head_dim=256, qk_rope_head_dim=0, v_head_dim=256, n_shared_experts=1,
        linear_num_heads=16, index_kpool=16, layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
    )  # fmt: skip
    tower = Glm5NextVisionConfig(
        depth=1,
        hidden_size=64,
        num_heads=2,
        intermediate_size=64,
        out_hidden_size=1024,
        projection_intermediate_size=64,
    )
    return Glm5NextConfig(text_config=words, vision_config=tower)


def deepseek_v4() -> Any:
    from transformers import DeepseekV4Config

    return DeepseekV4Config(
        **SMALL, **IDS, num_attention_heads=16, num_key_value_heads=1, head_dim=512, q_lora_rank=512, o_groups=4,
        o_lora_rank=256, moe_intermediate_size=512, n_routed_experts=8, num_experts_per_tok=2,
        mlp_layer_types=["moe"] * 2, index_n_heads=16, index_head_dim=128, index_topk=512, sliding_window=128,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
    )  # fmt: skip


SHAPES: dict[str, Callable[[], Any]] = {
    "minimax-m3": minimax_m3,
    "deepseek-v3.2": deepseek_v32,
    "qwen4-exp": qwen4_exp,
    "glm-5.3": glm5_next,
    "deepseek-v4": deepseek_v4,
}


def measure(name: str, only: str | None, rounds: int) -> Iterator[Result]:
    with checkpoint(name, SHAPES) as folder:
        short = Ours(folder)
        long = Ours.of(short.model)
        if only != "decode":
            peer, prompt = Peer(folder), text(PROMPT)
            times = alternate(lambda: short.prefill(prompt), lambda: peer.prefill(prompt), rounds)
            del peer
            yield result(name, f"prompt of {PROMPT}", times, 1, FASTER)
        if only == "prompts":
            return
        short.prefill(text(SHORT))
        long.prefill(text(LONG))
        row = result(
            name,
            f"decode at {LONG} over {SHORT}",
            alternate(decode(long), decode(short), ROUNDS),
            hybrids.STEPS,
            LONGER,
        )
        reached = long.step_bytes() / row.ours
        yield replace(row, share=reached / bandwidth(row.threads))
        print(f"{name:20} {told(short)}\n{'':20} {told(long)}", flush=True)


def told(side: Ours) -> str:
    """What a step reads, in MB."""
    from lmstate.models.reads import state_reads, weight_reads

    network, length = side.model.network, side.state.lengths[0]
    read = state_reads(network, side.state.layers, [length])
    weights = weight_reads(network, 1)
    share = (weights + read.total) / (weights + read.total_of_all)
    parts = (weights, read.attended, read.index, read.fixed)
    mb = "{:.1f} MB of weights, {:.2f} attended to, {:.2f} of indexes, {:.2f} whatever the length".format(
        *(part / 1e6 for part in parts)
    )
    return f"at {length:,} a step reads {mb}: {share:.0%} of all that is stored"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *SHAPES])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="count the process's own seconds; see `hybrids.clock`")
    parser.add_argument("--only", choices=("decode", "prompts"), help="decode needs no transformers to run beside")
    parser.add_argument("--rounds", type=int, default=3, help="of prompts")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.cpu_time:
        hybrids.clock = time.process_time
    with torch.inference_mode():
        for name in given.names or SHAPES:
            for row in measure(name, given.only, given.rounds):
                print(hybrids.line(row), flush=True)
