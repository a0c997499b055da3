"""A model on a GPU beside transformers' on the same random weights: prompts and decoding, eager and as CUDA graphs.

By turns in one process, each run waited for; medians of the rounds, in tokens a second. transformers decodes eagerly
with a `DynamicCache`, and compiled (`reduce-overhead`) with a `StaticCache`; lmstate likewise on a growing and on a
static state. `python -m bench.gpu [--shape 135M] [--rounds 3] [--device cuda]`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "135M": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "1.7B": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 49152, "tie_word_embeddings": True,
    },
}  # fmt: skip
PROMPTS, STEPS, NEAR = (512, 4096), 16, (512, 3500)
Run = Callable[[], int]  # does it, and says how many tokens that was


def models(shape: str, device: str, kinds: list[str]) -> tuple[Any, dict[str, Any]]:
    """The peer in bfloat16, and ours for each kind of weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import lmstate

    torch.manual_seed(0)
    with torch.device(device):
        config = LlamaConfig(max_position_embeddings=8192, **SHAPES[shape])
        theirs = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = {kind: lmstate.load(Path(folder), weights=kind, device=device) for kind in kinds}
    return theirs, ours


def ids(length: int) -> list[int]:
    return [3 + (7919 * i) % 40000 for i in range(length)]


def our_prompt(model: Any, length: int) -> Run:
    def run() -> int:
        model([ids(length)], model.new_state())
        return length

    return run


def our_decode(model: Any, rows: int, near: int) -> Run:
    state = model.new_state(rows, rewind=STEPS)
    model([ids(near)] * rows, state)

    def run() -> int:
        step = [[7]] * rows
        for _ in range(STEPS):
            step = model(step, state).argmax(-1, keepdim=True).tolist()
        for row in range(rows):
            state.rewind(row, near)
        return STEPS * rows

    return run


def our_graph(model: Any, rows: int, near: int) -> Run:
    step = torch.compile(model.decode_step, fullgraph=True, dynamic=False, mode="reduce-overhead")
    state = model.new_state(rows, capacity=near + 2 * STEPS, static=True)
    model([ids(near)] * rows, state)

    def run() -> int:
        token = torch.full((rows, 1), 7, device=model.device)
        for _ in range(STEPS):
            token = step(token, state).argmax(-1, keepdim=True)
            state.commit()
        for row in range(rows):
            state.rewind(row, near)
        return STEPS * rows

    return run


def their_prompt(model: Any, length: int) -> Run:
    from transformers import DynamicCache

    tokens = torch.tensor([ids(length)], device=model.device)

    def run() -> int:
        with torch.inference_mode():
            model(tokens, past_key_values=DynamicCache(), logits_to_keep=1)
        return length

    return run


def their_decode(model: Any, rows: int, near: int) -> Run:
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([ids(near)] * rows, device=model.device), past_key_values=cache, logits_to_keep=1)

    def run() -> int:
        token = torch.full((rows, 1), 7, device=model.device)
        with torch.inference_mode():
            for _ in range(STEPS):
                token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
                token.tolist()  # as who streams them, and as our commit does
        cache.crop(-STEPS)
        return STEPS * rows

    return run


def their_graph(model: Any, rows: int, near: int) -> Run:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=near + 2 * STEPS)
    forward = torch.compile(model.forward, fullgraph=True, dynamic=False, mode="reduce-overhead")
    with torch.no_grad():
        model(torch.tensor([ids(near)] * rows, device=model.device), past_key_values=cache, logits_to_keep=1)

    def run() -> int:
        token = torch.full((rows, 1), 7, device=model.device)
        for at in range(near, near + STEPS):
            positions = torch.full((rows, 1), at, device=model.device)
            with torch.no_grad():
                logits = forward(token, past_key_values=cache, position_ids=positions).logits
            token = logits[:, -1].argmax(-1, keepdim=True).clone()
            token.tolist()
        for layer in cache.layers:  # the same places again
            layer.cumulative_length.fill_(near)
        return STEPS * rows

    return run


def rates(runs: dict[str, Run], rounds: int, device: str) -> dict[str, float]:
    """Tokens a second, round by round, each in turn. What fails is said, and left out."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 3):  # a graph is compiled, recorded, and replayed from the third time on
        for name in list(found):
            try:
                begun = perf_counter()
                count = runs[name]()
                if device == "cuda":
                    torch.cuda.synchronize()
                if number >= 3:
                    found[name].append(count / (perf_counter() - begun))
            except Exception as error:  # of a peer's version, say
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                del found[name]
    return {name: statistics.median(each) for name, each in found.items()}


def measured(
    shape: str, device: str, rounds: int, kinds: list[str], graphs: bool, only: str
) -> list[tuple[str, dict[str, float]]]:
    theirs, ours = models(shape, device, kinds)
    rows: list[tuple[str, dict[str, float]]] = []

    def add(name: str, make: Callable[[], dict[str, Run]]) -> None:
        if only in name:
            rows.append((name, rates(make(), rounds, device)))
            print(f"{shape} {name}: " + ", ".join(f"{k} {v:.0f}" for k, v in rows[-1][1].items()), flush=True)

    for length in PROMPTS:
        add(
            f"prompt {length}",
            lambda length=length: {
                "transformers": their_prompt(theirs, length),
                **{f"lmstate {kind}": our_prompt(model, length) for kind, model in ours.items()},
            },
        )
    for batch, near in ((1, NEAR[0]), (1, NEAR[1]), (8, NEAR[0])):
        add(
            f"decode {batch} near {near}",
            lambda batch=batch, near=near: {
                "transformers": their_decode(theirs, batch, near),
                **{f"lmstate {kind}": our_decode(model, batch, near) for kind, model in ours.items()},
            },
        )
        if graphs and near == NEAR[0]:
            add(
                f"graph {batch} near {near}",
                lambda batch=batch, near=near: {
                    "transformers": their_graph(theirs, batch, near),
                    **{f"lmstate {k}": our_graph(model, batch, near) for k, model in ours.items() if "int" not in k},
                },
            )
    return rows


def markdown(shape: str, rows: list[tuple[str, dict[str, float]]]) -> str:
    names = list(dict.fromkeys(name for _, each in rows for name in each))
    lines = [f"| {shape}, tokens/s | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for case, each in rows:
        lines.append(f"| {case} | " + " | ".join(f"{each[n]:.0f}" if n in each else "" for n in names) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", nargs="+", default=["bfloat16", "int4"])
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--only", default="", help="cases with this in their name")
    options = parser.parse_args()
    rows = measured(options.shape, options.device, options.rounds, options.kinds, not options.no_graphs, options.only)
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"\n{name}, torch {torch.__version__}\n\n{markdown(options.shape, rows)}")


if __name__ == "__main__":
    main()
