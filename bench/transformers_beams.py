"""Beam search through transformers after a long prompt, with its own cache and with ours: `python -m
bench.transformers_beams [--tokens N] [--new N] [--rounds N] [--threads N]`.

A small random Llama: little is computed beside what a reorder of the beams copies. The prompt is fed to every beam
before the clock starts, as `generate` does, and each run goes on from a fork; the two caches take turns. Seconds and
bytes written by copies (a gather and a scatter count both; `DynamicCache` concatenates at every token besides) are of
one step: reordering the beams, and a step of all of them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("index_select", "index", "clone", "copy_", "cat", "_to_copy")


@dataclass(frozen=True)
class Row:
    """Median milliseconds of one cache over all rounds, and mean megabytes of one round.

    The first reorder stands alone, in which `StateCache` compares the rows and copies what it shares with the prompt's
    cache; the rest is of the steps after it.
    """

    beams: int
    cache: str
    first_ms: float
    reorder_ms: float
    step_ms: float
    reorder_mb: float
    step_mb: float


class CopiedBytes(TorchDispatchMode):
    """Bytes of keys and values (floats of four axes) that copies write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        written = args[3] if name == "index_copy_" else out if name in COPIES else None
        if isinstance(written, Tensor) and written.is_floating_point() and written.ndim == 4:
            self.bytes += written.nbytes
        return out


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=8192, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def search(
    model: Any, cache: Any, beams: int, steps: int, meter: Callable[[], float]
) -> tuple[list[float], list[float], Tensor]:
    """The meter's run over each reorder and over each whole step, and the most likely texts `[beams, steps]`."""
    reorders, wholes = [], []
    scores = torch.zeros(beams)
    texts, last = torch.zeros(beams, 0, dtype=torch.long), torch.arange(beams)[:, None]
    for _ in range(steps):
        begun = meter()
        logits = model(last, past_key_values=cache, use_cache=True).logits[:, -1]
        scores, best = (scores[:, None] + logits.log_softmax(-1)).flatten().topk(beams)
        order, last = best // logits.shape[-1], (best % logits.shape[-1])[:, None]
        middle = meter()
        cache.reorder_cache(order)
        ended = meter()
        reorders.append(ended - middle)
        wholes.append(ended - begun)
        texts = torch.cat([texts[order], last], dim=1)
    return reorders, wholes, texts


@torch.no_grad()
def run(beams: Sequence[int] = (4, 8), tokens: int = 4000, new: int = 32, rounds: int = 3) -> list[Row]:
    """Measure both caches; raises `RuntimeError` if their beams are not the same."""
    from transformers import DynamicCache

    from lmstate.integrations.transformers import StateCache

    model, rows = llama(), []
    prompt = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(1))
    for count in beams:
        caches = {"DynamicCache": DynamicCache(config=model.config), "StateCache": StateCache(model)}
        for cache in caches.values():
            for piece in prompt.repeat(count, 1).split(256, dim=1):
                model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        times: dict[str, tuple[list[list[float]], list[list[float]]]] = {name: ([], []) for name in caches}
        for number in range(rounds):
            texts = []
            for name in list(caches)[:: -1 if number % 2 else 1]:
                *taken, text = search(model, copy.deepcopy(caches[name]), count, new, time.perf_counter)
                texts.append(text)
                for kept, more in zip(times[name], taken):
                    kept.append(more)
            if not torch.equal(*texts):
                raise RuntimeError(f"{count} beams differ between the caches")
        for name, cache in caches.items():
            with CopiedBytes() as copied:
                *counted, _ = search(model, copy.deepcopy(cache), count, new, lambda: copied.bytes)
            first_ms = 1000 * statistics.median(taken[0] for taken in times[name][0])
            reorder_ms, step_ms = (
                1000 * statistics.median(second for taken in rounds_ for second in taken[1:]) for rounds_ in times[name]
            )
            reorder_mb, step_mb = (statistics.mean(taken[1:]) / 2**20 for taken in counted)
            rows.append(Row(count, name, first_ms, reorder_ms, step_ms, reorder_mb, step_mb))
    return rows


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(prog="python -m bench.transformers_beams", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {options.tokens:,} tokens of prompt\n")
    print(
        "| beams | cache | reorder, ms | step, ms | reorder copies, MB | step copies, MB |\n|---|---|---|---|---|---|"
    )
    for row in run(tokens=options.tokens, new=options.new, rounds=options.rounds):
        print(
            f"| {row.beams} | {row.cache} | {row.first_ms:.2f} | {row.reorder_ms:.2f} | {row.step_ms:.2f} | "
            f"{row.reorder_mb:.2f} | {row.step_mb:.2f} |"
        )


if __name__ == "__main__":
    main()
