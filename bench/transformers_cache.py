"""Decoding through transformers with its own cache, with ours, with our attention and with our products besides: one
token at a given length.

`python -m bench.transformers_cache`. The shape is SmolLM2-135M's, the weights are random: neither changes the work. The
caches are filled with random keys up to the length. All four take turns token by token, so that whatever else the
machine does meets them alike; a ratio is the median over all of them of the one's time over the other's next to it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

LENGTHS = (64, 512, 4000)
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Row:
    """Milliseconds a token; ratios say how many times as fast as `dynamic` it was."""

    dtype: str
    length: int
    dynamic_ms: float
    state_ms: float
    attention_ms: float
    products_ms: float
    state_ratio: float
    attention_ratio: float
    products_ratio: float
    dynamic_mb: float
    state_mb: float
    state_peak_mb: float


def run(
    lengths: Sequence[int] = LENGTHS, dtypes: Sequence[str] = DTYPES, steps: int = 16, rounds: int = 3, threads: int = 2
) -> list[Row]:
    """Measure every dtype and length."""
    torch.set_num_threads(threads)
    return [
        measure(model, length, steps, rounds)
        for dtype in dtypes
        for model in [smollm2(getattr(torch, dtype))]
        for length in lengths
    ]


def smollm2(dtype: torch.dtype) -> Any:
    """A model of SmolLM2-135M's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).eval()


def fill(cache: Any, length: int, dtype: torch.dtype) -> Any:
    k, v = (torch.randn(1, 3, length, 64).to(dtype) for _ in range(2))
    for layer in range(30):
        cache.update(k, v, layer)
    return cache


def measure(model: Any, length: int, steps: int, rounds: int) -> Row:
    from transformers import DynamicCache

    from lmstate.integrations.transformers import StateCache, use_native_linear, use_torch_linear

    caches = {
        "dynamic": fill(DynamicCache(config=model.config), length, model.dtype),
        "state": fill(StateCache(model), length, model.dtype),
        "attention": fill(StateCache(model), length, model.dtype),
        "products": fill(StateCache(model), length, model.dtype),
    }
    times: dict[str, list[float]] = {name: [] for name in caches}
    token = torch.ones(1, 1, dtype=torch.long)
    order = list(caches)
    with torch.inference_mode():
        for round_ in range(rounds + 1):
            for step in range(steps):
                turn = (round_ + step) % len(order)
                for name in order[turn:] + order[:turn]:
                    model.set_attn_implementation("lmstate" if name in ("attention", "products") else "sdpa")
                    (use_native_linear if name == "products" else use_torch_linear)(model)
                    begun = time.perf_counter()
                    model(token, past_key_values=caches[name], use_cache=True)
                    if round_:  # the first round warms up, and grows what has to grow
                        times[name].append(1000 * (time.perf_counter() - begun))
            for cache in caches.values():
                cache.crop(-steps)
    token_bytes = 30 * 2 * 3 * 64 * model.dtype.itemsize
    state = caches["state"]
    return Row(
        dtype=str(model.dtype).removeprefix("torch."),
        length=length,
        **{f"{name}_ms": round(statistics.median(taken), 2) for name, taken in times.items()},
        state_ratio=round(ratio(times["dynamic"], times["state"]), 3),
        attention_ratio=round(ratio(times["dynamic"], times["attention"]), 3),
        products_ratio=round(ratio(times["dynamic"], times["products"]), 3),
        dynamic_mb=round(length * token_bytes / 2**20, 2),
        state_mb=round(state.nbytes() / 2**20, 2),
        # Layers grow one after the other: beside what is held there is, for a moment, one layer's old memory.
        state_peak_mb=round((state.nbytes() + length * token_bytes / 30) / 2**20, 2),
    )


def ratio(base: list[float], other: list[float]) -> float:
    return statistics.median(b / o for b, o in zip(base, other))


def markdown(rows: list[Row]) -> str:
    lines = [
        "| dtype | tokens held | DynamicCache, ms | StateCache, ms | with our attention, ms | and our products, ms | "
        "StateCache | with attention | with both | memory: Dynamic, State, State at growth (MB) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.dtype} | {r.length} | {r.dynamic_ms} | {r.state_ms} | {r.attention_ms} | {r.products_ms} | "
        f"{r.state_ratio}x | {r.attention_ratio}x | {r.products_ratio}x | "
        f"{r.dynamic_mb}, {r.state_mb}, {r.state_peak_mb} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(prog="python -m bench.transformers_cache", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None, help="a file for the rows as JSON")
    options = parser.parse_args()
    rows = run(steps=options.steps, rounds=options.rounds, threads=options.threads)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {platform.processor()}\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
