"""Quality against bytes for every storage policy, `python -m bench.longcontext [--tokens N] [--budgets 512 1024]`.

On the documentation that ships with Python, fed 256 tokens at a time: the perplexity of SmolLM2 over it, and how many
of eight facts, sown evenly into it, the model still tells when asked at the end (a fact's number counts if every token
of it has the largest logit). Beside them `transformers`' `QuantizedCache` on the same weights, if `optimum-quanto` is
installed. Prints a table in Markdown, a row when it is measured; `--only WORD ...` measures those whose names have a
word in them.

`--json PATH` keeps the rows there: those that it has already, of as many tokens, are not measured again, so that a run
that was stopped goes on. `--plot PATH` draws all of them, perplexity against bytes a token.

`--speed` times decode steps instead, after long prompts: see `bench.longcontext_speed`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from time import process_time

import torch
from torch import Tensor

import lmstate
from bench import longcontext_speed
from lmstate import kv
from lmstate.checkpoints.hub import resolve

TOPICS = ("types", "specialnames", "exceptions", "assert", "import", "function", "class")
STEP = 256
AFTER = 32
CITIES = ("Paris", "Tokyo", "Cairo", "Lima", "Oslo", "Delhi", "Rome", "Quito")

Forward = Callable[[list[int]], Tensor]
"""The next tokens of a stream -> logits `[n, V]` of them; the stream remembers them."""


@dataclass(frozen=True)
class Result:
    name: str
    perplexity: float
    facts: int | None  # of those in CITIES; None where it was not asked
    state_bytes: int  # of the attention layers, AFTER single tokens later: what a step of many needed is given back
    seconds: float  # of one core and more: all threads together
    tokens: int


def text() -> str:
    """Some topics of Python's reference: prose and code, the same on every machine with this version of Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in TOPICS if name in topics)


def policies(budgets: list[int]) -> dict[str, kv.Policy]:
    table: dict[str, kv.Policy] = {"bfloat16": kv.Dense(torch.bfloat16), "float32": kv.Dense(torch.float32)}
    table |= {f"quantized {bits}": kv.Quantized(bits) for bits in (8, 4, 3, 2)}
    for budget in budgets:
        one = {
            "recent": kv.Recent(budget=budget),
            "h2o": kv.H2O(budget=budget, recent=budget // 4),
            "h2o, quantized 8": kv.H2O(budget=budget, recent=budget // 4, storage=kv.Quantized(8)),
            "h2o, quantized 4": kv.H2O(budget=budget, recent=budget // 4, storage=kv.Quantized(4)),
            "snapkv": kv.SnapKV(budget=budget),
            "expected": kv.ExpectedAttention(budget=budget),
        }
        table |= {f"{name}, {budget} tokens": policy for name, policy in one.items()}
    return table


def perplexity(forward: Forward, ids: list[int]) -> float:
    loss = 0.0
    for first in range(0, len(ids) - 1, STEP):
        logits = forward(ids[first : first + STEP])
        following = torch.tensor(ids[first + 1 : first + STEP + 1])[:, None]
        loss -= float(logits[: len(following)].float().log_softmax(-1).gather(1, following).sum())
        print(f"\r{first + STEP} of {len(ids)} tokens ", end="", file=sys.stderr, flush=True)
    print("\r", end="", file=sys.stderr)
    return math.exp(loss / (len(ids) - 1))


def sown(model: lmstate.Model, ids: list[int]) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """The text with the facts in it, as long as before, and for each fact the question and the answer."""
    encode, part = model.tokenizer.encode, len(ids) // len(CITIES)
    stream: list[int] = []
    questions = []
    for index, city in enumerate(CITIES):
        fact, answer = f"\n\nRemember: the secret number of {city} is", encode(f" {7919 * (index + 3) % 9000 + 1000}")
        sentence = [*encode(fact), *answer, *encode(".\n\n")]
        stream += ids[index * part : (index + 1) * part - len(sentence)] + sentence
        questions.append((encode(fact), answer))
    return stream, questions


def measure(model: lmstate.Model, name: str, policy: kv.Policy, ids: list[int]) -> Result:
    begin, state = process_time(), model.new_state(kv=policy)

    def forward(new: list[int]) -> Tensor:
        logits = model([new], state, logits="all")
        assert logits is not None
        return logits[0]

    loss = perplexity(forward, ids)
    for token in ids[:AFTER]:
        forward([token])
    held = state.memory()["attention"]
    stream, questions = sown(model, ids)
    state = model.new_state(kv=policy)
    for first in range(0, len(stream), STEP):
        model([stream[first : first + STEP]], state, logits="none")
    told = 0
    for question, answer in questions:
        logits = model([question + answer], state, logits="all", commit=False)
        state.discard()
        assert logits is not None
        told += logits[0, len(question) - 1 : -1].argmax(-1).tolist() == answer
    return Result(name, loss, told, held, process_time() - begin, len(ids))


def measure_peer(bits: int, ids: list[int]) -> Result:
    """`QuantizedCache` of transformers: 64 numbers of a token share a scale, the last 128 tokens stay floats."""
    from transformers import AutoModelForCausalLM, QuantizedCache

    path = resolve("smollm2")
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).eval()
    cache = QuantizedCache("quanto", theirs.config, nbits=bits)
    begin = process_time()

    def forward(new: list[int]) -> Tensor:
        with torch.no_grad():
            return theirs(torch.tensor([new]), past_key_values=cache).logits[0]

    loss = perplexity(forward, ids)
    held = 0
    for layer in cache.layers:
        for quantized in (layer._quantized_keys, layer._quantized_values):
            names, _ = quantized.__tensor_flatten__()
            for inner in (getattr(quantized, name) for name in names):
                held += inner._data.nbytes if type(inner).__name__ == "PackedTensor" else inner.nbytes
        held += layer.keys.nbytes + layer.values.nbytes
    return Result(f"transformers, quanto {bits}", loss, None, held, process_time() - begin, len(ids))


def plot(results: list[Result], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    kinds = sorted({result.name.partition(",")[0] for result in results})
    for kind in kinds:
        some = [result for result in results if result.name.partition(",")[0] == kind]
        sizes = [result.state_bytes / result.tokens for result in some]
        axes.scatter(sizes, [result.perplexity for result in some], label=kind)
        for size, result in zip(sizes, some):
            axes.annotate(result.name, (size, result.perplexity), fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.set(xlabel="bytes of keys and values a token of the text", ylabel="perplexity", xscale="log")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150, bbox_inches="tight")


HEADER = "| policy | perplexity | against float32 | facts told | bytes a token | smaller than bfloat16 | CPU seconds |"


def line(result: Result, others: list[Result]) -> str:
    """A row of the table; what it is compared with must be among the others."""
    exact = next((each.perplexity for each in others if each.name == "float32"), None)
    dense = next((each.state_bytes for each in others if each.name == "bfloat16"), None)
    apart = "-" if exact is None else f"{100 * (result.perplexity / exact - 1):+.2f} %"
    smaller = "-" if dense is None else f"{dense / result.state_bytes:.2f}x"
    facts = "-" if result.facts is None else f"{result.facts}/{len(CITIES)}"
    return (
        f"| {result.name} | {result.perplexity:.3f} | {apart} | {facts} | {result.state_bytes / result.tokens:,.0f} "
        f"| {smaller} | {result.seconds:.0f} |"
    )


def known(path: str | None, tokens: int) -> list[Result]:
    if path is None or not Path(path).exists():
        return []
    rows = [Result(**row) for row in json.loads(Path(path).read_text())]
    return [row for row in rows if row.tokens == tokens]


def quality(options: argparse.Namespace) -> None:
    model = lmstate.load(options.model, activations=16)
    ids = model.tokenizer.encode(text())[options.first : options.first + options.tokens]
    results = known(options.json, len(ids))
    runs: dict[str, Callable[[], Result]] = {
        name: lambda name=name, policy=policy: measure(model, name, policy, ids)  # type: ignore[misc]
        for name, policy in policies(options.budgets).items()
    }
    peer = all(find_spec(name) for name in ("optimum", "accelerate"))  # what it quantizes and reads a GGUF with
    for bits in (4, 2) if peer else ():
        runs[f"transformers, quanto {bits}"] = lambda bits=bits: measure_peer(bits, ids)  # type: ignore[misc]
    if options.only:
        runs = {name: run for name, run in runs.items() if any(word in name for word in options.only)}
    print(f"{len(ids)} tokens, {options.threads} threads\n\n{HEADER}\n|---|---|---|---|---|---|---|", flush=True)
    for name, run in runs.items():
        result = next((row for row in results if row.name == name), None)
        if result is None:
            results.append(result := run())
            if options.json:
                Path(options.json).write_text(json.dumps([asdict(row) for row in results], indent=1) + "\n")
        print(line(result, results), flush=True)
    if not peer:
        print(
            "\nNo row of transformers' QuantizedCache: it needs optimum-quanto, and accelerate to read these weights."
        )
    if options.plot:
        plot(results, options.plot)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.longcontext", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--first", type=int, default=0, help="the token of the text to begin at")
    parser.add_argument("--budgets", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", metavar="WORD")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--plot", metavar="PATH")
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.speed:
        longcontext_speed.run(lmstate.load(options.model, activations=16), options.only)
    else:
        quality(options)


if __name__ == "__main__":
    main()
