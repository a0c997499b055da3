"""The policies that every property is tested with, small enough to evict all the time."""

from __future__ import annotations

from lmstate import kv

BUDGETS: dict[str, kv.Budget] = {
    "recent": kv.Recent(budget=12, sinks=2),
    "h2o": kv.H2O(budget=14, recent=4, sinks=1),
    "snapkv": kv.SnapKV(budget=14, window=4, sinks=1, pool=3),
    "expected": kv.ExpectedAttention(budget=14, recent=2, sinks=1, window=6, future=20),
}
# Windows longer than the budgets and shorter, sinks, softcaps, chunks, latents, recurrences beside attention and in it,
# layers that read what others keep.
FAMILIES = [
    "llama",
    "mistral",
    "gemma2",
    "gpt_oss",
    "llama4",
    "qwen3_next",
    "falcon_h1",
    "zamba2",
    "deepseek_v3",
    "kimi_linear",
    "bailing_hybrid",
    "zaya-windows",
    "gemma4-shared",
]
