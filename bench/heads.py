"""What multi-token prediction heads cost and give: `python -m bench.heads MODEL [--weights KIND] [--tokens N]`.

MODEL is a checkpoint that carries them. Decoded tokens a second of the model without its heads, of the model with heads
that follow the text and draft nothing, and of the model that drafts with them; by turns in one process, medians of the
rounds. Below: how many drafted tokens held, by their place in a draft, and what a draft costs over a step of one token.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from time import perf_counter

import torch

import lmstate
from bench.speculation import PROSE
from lmstate.generation import Generation

DEPTHS = (1, 2, 4, 8)


def speed(model: lmstate.Model, prompt: list[int], tokens: int, draft: str | None) -> tuple[float, Generation]:
    """Decoded tokens a second, and the generation."""
    generation = Generation(model, [prompt], max_new_tokens=tokens, draft=draft)
    for _ in generation:
        pass
    return generation.report().tokens_per_second, generation


def draft_costs(model: lmstate.Model, prompt: list[int], rounds: int) -> dict[int, float]:
    """Seconds of a draft of at most so many tokens over those of a step of one token."""
    state = model.new_state()
    model([prompt], state)
    last, step = {0: prompt[-1]}, []
    drafts: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for _ in range(rounds + 2):
        begin = perf_counter()
        model([[last[0]]], state, commit=False)
        state.discard()
        step.append(perf_counter() - begin)
        for depth, seconds in drafts.items():
            begin = perf_counter()
            model.draft_ahead(state, last, depth)
            seconds.append(perf_counter() - begin)
    plain = statistics.median(step[2:])
    return {depth: statistics.median(seconds[2:]) / plain for depth, seconds in drafts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.heads", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", default=PROSE)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    headed = replace(lmstate.load(options.model, options.weights, heads=True), eos_ids=frozenset())
    plain = replace(headed, network=replace(headed.network, heads=()), _fingerprint=None)
    prompt = headed.tokenizer.encode(options.prompt) if headed.has_tokenizer else [3 + 7 * at for at in range(64)]

    runs = {"no heads": (plain, None), "heads, no drafts": (headed, None), "heads draft": (headed, "heads")}
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    answers = []
    for _ in range(options.rounds):
        for name, (model, draft) in runs.items():
            seconds, generation = speed(model, prompt, options.tokens, draft)
            speeds[name].append(seconds)
            answers.append(generation.ids)
    if any(answer != answers[0] for answer in answers):
        raise SystemExit("the text with heads is not the text without")
    first = statistics.median(speeds["no heads"])
    print("| | tokens/s | over no heads |\n|---|---|---|")
    for name, each in speeds.items():
        print(f"| {name} | {statistics.median(each):.1f} | {statistics.median(each) / first:.2f} |")
    report = generation.report().draft
    rates = [f"{held / tried:.2f}" for held, tried in zip(report.held, report.verified)]
    print(f"\n{report.drafted} tokens drafted, {report.accepted} held; by place: {', '.join(rates) or 'none'}")
    costs = draft_costs(headed, prompt, 8 * options.rounds)
    print("\n| tokens drafted | " + " | ".join(map(str, costs)) + " |\n|---|" + "---|" * len(costs))
    print("| over a step of one token | " + " | ".join(f"{cost:.2f}" for cost in costs.values()) + " |")


if __name__ == "__main__":
    main()
