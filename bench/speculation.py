"""What speculation gives: `python -m bench.speculation [--threads N] [--tokens N]`.

On SmolLM2's real weights: text that is repeated with small changes, free prose, eight rows at once; on a hybrid of
random weights, a drafter that is right with a given probability; and what verifying several tokens costs over one.
Speeds are those of plain decoding and of decoding with drafts, by turns in one process; medians of the rounds. With
transformers and accelerate installed, its prompt lookup runs on the same text (float32 there).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

import lmstate
from lmstate.generation import Generation

CODE = '''def total(items):
    """The sum of the prices of items."""
    result = 0
    for item in items:
        if item.price is None:
            continue
        result = result + item.price * item.count
    return result


def cheapest(items):
    """The item of the lowest price."""
    best = None
    for item in items:
        if best is None or item.price < best.price:
            best = item
    return best
'''
COPY = f"A file:\n\n{CODE}\n\nThe same file, with `items` renamed to `goods`:\n\n" + CODE[:24].replace("items", "goods")
PROSE = "The lighthouse keeper had not spoken to anyone for eleven days when the boat came. "
WIDTHS = (1, 2, 4, 8, 16, 32)


class Chance:
    """Knows the plain text, and is right about each token with a given probability."""

    def __init__(self, whole: Sequence[int], right: float, vocab: int) -> None:
        self.whole, self.right, self.vocab = list(whole), right, vocab
        self.held = 0
        self.random = random.Random(0)

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        self.held += len(accepted[0])

    def propose(self, rows: Sequence[int], depth: int) -> list[list[int]]:
        ahead = self.whole[self.held : self.held + depth]
        return [[t if self.random.random() < self.right else self.random.randrange(self.vocab) for t in ahead]]


def speed(model: lmstate.Model, prompts: list[list[int]], tokens: int, draft: object) -> tuple[float, Generation]:
    """Decoded tokens a second, and the generation."""
    generation = Generation(model, prompts, max_new_tokens=tokens, draft=draft)  # type: ignore[arg-type]
    for _ in generation:
        pass
    return generation.report().tokens_per_second, generation


def by_turns(
    model: lmstate.Model, prompts: list[list[int]], tokens: int, draft: Callable[[], object], rounds: int
) -> tuple[float, float, float]:
    """Median tokens a second without and with drafts, and the part of the drafted tokens that held."""
    speeds: tuple[list[float], list[float]] = ([], [])
    held = 0.0
    for _ in range(rounds):
        plain, one = speed(model, prompts, tokens, None)
        drafted, two = speed(model, prompts, tokens, draft())
        if one.texts != two.texts:
            raise SystemExit("the text with drafts is not the text without")
        report = two.report().draft
        held = report.accepted / report.drafted if report.drafted else 0.0
        speeds[0].append(plain)
        speeds[1].append(drafted)
    return statistics.median(speeds[0]), statistics.median(speeds[1]), held


def verify_costs(model: lmstate.Model, rounds: int) -> list[float]:
    """Seconds of a step of each of `WIDTHS` tokens, after 500 tokens of text, over that of one."""
    state = model.new_state()
    model([[5 + 7919 * at % 40000 for at in range(500)]], state)
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(rounds + 2):
        for width in WIDTHS:
            begin = perf_counter()
            model([list(range(50, 50 + width))], state, logits="all", commit=False)
            state.discard()
            times[width].append(perf_counter() - begin)
    medians = [statistics.median(each[2:]) for each in times.values()]
    return [each / medians[0] for each in medians]


def plot(costs: Sequence[float], path: Path) -> None:
    """The costs of verifying as a chart."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(WIDTHS, costs, marker="o", label="a step")
    axes.plot(WIDTHS, WIDTHS, linestyle=":", label="as many steps of one token")
    axes.set(xlabel="tokens of a step", ylabel="seconds over a step of one token")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def hybrid(rounds: int, tokens: int) -> tuple[float, float, float]:
    """A hybrid of random weights, and a drafter that is right with probability 0.8."""
    from bench.hybrids import checkpoint

    with checkpoint("qwen3.5-0.8b") as folder:
        model = lmstate.load(folder, weights="int4")
    model = replace(model, _tokenizer=lmstate.load("smollm2").tokenizer, eos_ids=frozenset())
    prompt = [3 + 7919 * at % 40000 for at in range(64)]
    state = model.new_state()
    for _ in Generation(model, [prompt], state, max_new_tokens=tokens, draft=None):
        pass
    whole = state.tokens(0)
    return by_turns(model, [prompt], tokens, lambda: Chance(whole, 0.8, 40000), rounds)


def prompt_lookup(prompt: str, tokens: int) -> str:
    """Tokens a second of transformers, plain and with its prompt lookup."""
    try:
        import accelerate  # noqa: F401 - transformers reads GGUF files with it
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        return "transformers and accelerate are not both installed: no numbers of its prompt lookup"
    from lmstate.checkpoints.hub import resolve

    path = resolve("smollm2")
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    speeds = []
    for options in ({}, {"prompt_lookup_num_tokens": 8}):
        begin = perf_counter()
        out = theirs.generate(ids, max_new_tokens=tokens, do_sample=False, **options)
        speeds.append((out.shape[1] - ids.shape[1]) / (perf_counter() - begin))
    plain, looked_up = speeds
    ratio = looked_up / plain
    return f"transformers (float32): {plain:.1f} tokens/s, with prompt lookup {looked_up:.1f} ({ratio:.2f}x)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="write the chart of the costs of verifying there (needs matplotlib)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = replace(lmstate.load("smollm2"), eos_ids=frozenset())

    print("| text | plain tokens/s | with drafts | ratio | drafted tokens that held |\n|---|---|---|---|---|")
    for name, prompt, rows in (
        ("code under edit", COPY, 1),
        ("free prose", PROSE, 1),
        ("code under edit, 8 rows", COPY, 8),
        ("free prose, 8 rows", PROSE, 8),
    ):
        ids = model.tokenizer.encode(prompt)
        plain, drafted, held = by_turns(model, [ids] * rows, options.tokens, lambda: "auto", options.rounds)
        print(f"| {name} | {plain:.1f} | {drafted:.1f} | {drafted / plain:.2f} | {held:.2f} |")
    plain, drafted, held = hybrid(options.rounds, options.tokens)
    print(f"| hybrid, drafts right with 0.8 | {plain:.1f} | {drafted:.1f} | {drafted / plain:.2f} | {held:.2f} |")

    costs = verify_costs(model, 8 * options.rounds)
    print("\n| tokens verified |" + " | ".join(map(str, WIDTHS)) + " |\n|---|" + "---|" * len(WIDTHS))
    print("| over one token | " + " | ".join(f"{cost:.2f}" for cost in costs) + " |")
    if options.plot:
        plot(costs, options.plot)
    print("\n" + prompt_lookup(COPY, options.tokens))


if __name__ == "__main__":
    main()
