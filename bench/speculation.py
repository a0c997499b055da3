"""Gain of speculation: `python -m bench.speculation [--threads N] [--tokens N] [--processor-time]`.

On SmolLM2's real weights: text that is repeated with small changes, free prose (also sampled), eight rows at once of
the same and of different text, and the engine; on a hybrid of random weights, a drafter that is right with a given
probability; and the cost of verifying several tokens over one. Plain decoding and decoding with drafts run by turns in
one process; each counts as fast as in the best of its rounds, since what else runs on the machine can only add. With
transformers and accelerate installed, its prompt lookup runs on the same text (float32 there), and with
`--llama-server PATH` that of llama.cpp (`--spec-type ngram-simple`, on the same file).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time

import torch

import lmstate
from bench.llama_server import llama_server
from lmstate.checkpoints.hub import resolve
from lmstate.generation import Generation, Sampler

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
OPENINGS = (
    PROSE,
    "In the spring of that year the price of bread ",
    "A short introduction to the theory of groups: ",
    "Dear Margaret, I was sorry to hear that ",
    "The recipe for a good onion soup begins with ",
    "Whales breathe air, and so they must ",
    "He opened the old wooden box and inside ",
    "The committee met on Tuesday to discuss ",
)
SAMPLED = Sampler(temperature=0.9, top_p=0.95, seed=1)
clock = perf_counter
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


def speed(
    model: lmstate.Model, prompts: list[list[int]], tokens: int, draft: object, sampler: Sampler | None
) -> tuple[float, Generation]:
    """Decoded tokens a second, and the generation."""
    generation = Generation(model, prompts, max_new_tokens=tokens, draft=draft, params=sampler)  # type: ignore[arg-type]
    for _ in generation:
        pass
    return generation.report().tokens_per_second, generation


def by_turns(
    model: lmstate.Model,
    prompts: list[list[int]],
    tokens: int,
    draft: Callable[[], object],
    rounds: int,
    sampler: Sampler | None = None,
) -> tuple[float, float, float]:
    """Most tokens a second without and with drafts, and the part of the drafted tokens that held."""
    best = [0.0, 0.0]
    drafted = accepted = 0
    for _ in range(rounds):
        plain, one = speed(model, prompts, tokens, None, sampler)
        fast, two = speed(model, prompts, tokens, draft(), sampler)
        if one.texts != two.texts:
            raise SystemExit("the text with drafts is not the text without")
        report = two.report().draft
        drafted, accepted = drafted + report.drafted, accepted + report.accepted
        best = [max(best[0], plain), max(best[1], fast)]
    return best[0], best[1], accepted / max(1, drafted)


def engine_by_turns(
    model: lmstate.Model, prompts: Sequence[list[int]], tokens: int, rounds: int
) -> tuple[float, float, float]:
    """`by_turns` of requests to an engine, all at once. Prefixes are kept for no longer than a round."""
    best = [0.0, 0.0]
    drafted = accepted = 0
    for _ in range(rounds):
        texts = []
        for way, draft in enumerate((None, "auto")):
            with lmstate.Engine(model, rows=8, draft=draft) as engine:
                begin = clock()
                requests = [engine.submit(ids, max_new_tokens=tokens) for ids in prompts]
                done = [request.result() for request in requests]
                generated = sum(one.usage.generated for one in done)
                best[way] = max(best[way], generated / (clock() - begin))
            texts.append([one.texts for one in done])
            drafted += sum(one.usage.drafted for one in done)
            accepted += sum(one.usage.accepted for one in done)
        if texts[0] != texts[1]:
            raise SystemExit("the answers with drafts are not those without")
    return best[0], best[1], accepted / max(1, drafted)


def verify_costs(model: lmstate.Model, rounds: int) -> list[float]:
    """Seconds of a step of each of `WIDTHS` tokens, after 500 tokens of text, over that of one."""
    state = model.new_state()
    model([[5 + 7919 * at % 40000 for at in range(500)]], state)
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(rounds + 2):
        for width in WIDTHS:
            begin = clock()
            model([list(range(50, 50 + width))], state, logits="all", commit=False)
            state.discard()
            times[width].append(clock() - begin)
    best = [min(each) for each in times.values()]
    return [each / best[0] for each in best]


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


def prompt_lookup(prompt: str, tokens: int, rounds: int) -> str:
    """Tokens a second of transformers, plain and with its prompt lookup."""
    try:
        import accelerate  # noqa: F401 - transformers reads GGUF files with it
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        return "transformers and accelerate are not both installed: no numbers of its prompt lookup"
    path = resolve("smollm2")
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    speeds = [0.0, 0.0]
    for _ in range(rounds):
        for way, options in enumerate(({}, {"prompt_lookup_num_tokens": 8})):
            begin = clock()
            out = theirs.generate(ids, max_new_tokens=tokens, do_sample=False, **options)
            speeds[way] = max(speeds[way], (out.shape[1] - ids.shape[1]) / (clock() - begin))
    plain, looked_up = speeds
    ratio = looked_up / plain
    return f"transformers (float32): {plain:.1f} tokens/s, with prompt lookup {looked_up:.1f} ({ratio:.2f}x)"


def llama_lookup(binary: str, prompt: list[int], tokens: int, rounds: int, threads: int) -> str:
    """Tokens a second of llama.cpp, plain and with its prompt lookup; the prompt is in its cache after the first."""
    path = str(resolve("smollm2"))
    speeds = [0.0, 0.0]
    with (
        llama_server(binary, path, threads, 1) as plain,
        llama_server(binary, path, threads, 1, ("--spec-type", "ngram-simple")) as drafting,
    ):
        for _ in range(rounds + 1):
            for way, server in enumerate((plain, drafting)):
                begin = perf_counter()
                speeds[way] = max(speeds[way], len(server.ask(prompt, tokens)()) / (perf_counter() - begin))
    ratio = speeds[1] / speeds[0]
    return f"llama.cpp: {speeds[0]:.1f} tokens/s, with prompt lookup {speeds[1]:.1f} ({ratio:.2f}x)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--plot", type=Path, help="write the chart of the costs of verifying there (needs matplotlib)")
    parser.add_argument(
        "--processor-time", action="store_true", help="measure that, of one thread: for a machine that others use too"
    )
    parser.add_argument("--llama-server", metavar="PATH", help="the program, whose prompt lookup runs beside")
    options = parser.parse_args()
    if options.processor_time:
        global clock
        clock = process_time
        for module in ("generation.generate", "speculation.speculator"):
            sys.modules[f"lmstate.{module}"].perf_counter = process_time
        options.threads = 1
    torch.set_num_threads(options.threads)
    model = replace(lmstate.load("smollm2"), eos_ids=frozenset())
    tokens, rounds = options.tokens, options.rounds

    print("| text | plain tokens/s | with drafts | ratio | drafted tokens that held |\n|---|---|---|---|---|")

    def line(name: str, plain: float, drafted: float, held: float) -> None:
        print(f"| {name} | {plain:.1f} | {drafted:.1f} | {drafted / plain:.2f} | {held:.2f} |", flush=True)

    for name, prompts, sampler in (
        ("code under edit", [COPY], None),
        ("free prose", [PROSE], None),
        ("free prose, sampled", [PROSE], SAMPLED),
        ("code under edit, 8 rows", [COPY] * 8, None),
        ("prose, 8 rows of different text", OPENINGS, None),
        ("prose, 8 rows of different text, sampled", OPENINGS, SAMPLED),
        ("code and prose, 4 rows each", [*OPENINGS[:4], *[COPY] * 4], None),
    ):
        ids = [model.tokenizer.encode(prompt) for prompt in prompts]
        line(name, *by_turns(model, ids, tokens, lambda: "auto", rounds, sampler))
    ids = [model.tokenizer.encode(prompt) for prompt in (*OPENINGS[:4], *[COPY] * 4)]
    line("engine: code and prose, 4 requests each", *engine_by_turns(model, ids, tokens, rounds))
    line("engine: code under edit, 1 request", *engine_by_turns(model, ids[-1:], tokens, rounds))
    line("hybrid, drafts right with 0.8", *hybrid(rounds, tokens))

    costs = verify_costs(model, 8 * rounds)
    print("\n| tokens verified |" + " | ".join(map(str, WIDTHS)) + " |\n|---|" + "---|" * len(WIDTHS))
    print("| over one token | " + " | ".join(f"{cost:.2f}" for cost in costs) + " |")
    if options.plot:
        plot(costs, options.plot)
    print("\n" + prompt_lookup(COPY, tokens, rounds))
    if options.llama_server:
        print(llama_lookup(options.llama_server, model.tokenizer.encode(COPY), tokens, rounds, options.threads))


if __name__ == "__main__":
    main()
