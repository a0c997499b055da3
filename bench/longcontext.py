"""Quality against bytes for every storage policy, `python -m bench.longcontext [--tokens N] [--budgets 512 1024]`.

On the documentation that ships with Python, fed 256 tokens at a time: the perplexity of SmolLM2 over it, and how many
of eight facts, sown evenly into it, the model still tells when asked at the end (a fact's number counts if every token
of it has the largest logit). Beside them `transformers`' `QuantizedCache` on the same weights, if `optimum-quanto` is
installed. Prints a table; with `--json PATH` and `--plot PATH` also writes it, and a picture of perplexity against the
bytes of the state.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from time import process_time

import torch
from torch import Tensor

import lmstate
from lmstate import kv
from lmstate.models.hub import resolve

TOPICS = ("types", "specialnames", "exceptions", "assert", "import", "function", "class")
STEP = 256
CITIES = ("Paris", "Tokyo", "Cairo", "Lima", "Oslo", "Delhi", "Rome", "Quito")

Forward = Callable[[list[int]], Tensor]
"""The next tokens of a stream -> logits `[n, V]` of them; the stream remembers them."""


@dataclass(frozen=True)
class Result:
    name: str
    perplexity: float
    facts: int | None  # of those in CITIES; None where it was not asked
    state_bytes: int  # of the attention layers, after the last token
    seconds: float  # of one core and more: all threads together


def text() -> str:
    """Some topics of Python's reference: prose and code, the same on every machine with this version of Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in TOPICS if name in topics)


def policies(budgets: list[int]) -> dict[str, kv.Policy]:
    table: dict[str, kv.Policy] = {"bfloat16": kv.Dense(torch.bfloat16), "float32": kv.Dense(torch.float32)}
    table |= {f"quantized {bits}": kv.Quantized(bits) for bits in (8, 4, 2)}
    for budget in budgets:
        one = {
            "recent": kv.Recent(budget=budget),
            "h2o": kv.H2O(budget=budget, recent=budget // 4),
            "h2o, quantized 8": kv.H2O(budget=budget, recent=budget // 4, storage=kv.Quantized(8)),
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
    return Result(name, loss, told, held, process_time() - begin)


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
    return Result(f"transformers, quanto {bits}", loss, None, held, process_time() - begin)


def plot(results: list[Result], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for result in results:
        axes.scatter(result.state_bytes / 1e6, result.perplexity)
        axes.annotate(result.name, (result.state_bytes / 1e6, result.perplexity), fontsize=7)
    axes.set(xlabel="MB of keys and values", ylabel="perplexity", xscale="log")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.longcontext", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--budgets", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = lmstate.load(options.model)
    ids = model.tokenizer.encode(text())[: options.tokens]
    results: list[Result] = []
    print(
        f"{len(ids)} tokens\n{'policy':36} perplexity   against float32   facts     MB  smaller than bfloat16  seconds"
    )
    runs = [(lambda n=name, p=policy: measure(model, n, p, ids)) for name, policy in policies(options.budgets).items()]
    peer = all(find_spec(name) for name in ("optimum", "accelerate"))  # what it quantises and reads a GGUF with
    runs += [(lambda b=bits: measure_peer(b, ids)) for bits in (4, 2)] if peer else []
    print(f"{len(ids)} tokens; smaller: than bfloat16")
    print(f"{'policy':36} perplexity  facts     MB   smaller  seconds")
    for run in runs:
        results.append(result := run())
        facts = "-" if result.facts is None else f"{result.facts}/{len(CITIES)}"
        print(
            f"{result.name:36} {result.perplexity:10.3f} {facts:>6} {result.state_bytes / 1e6:6.1f} "
            f"{results[0].state_bytes / result.state_bytes:8.2f}x {result.seconds:8.1f}",
            flush=True,
        )
    if not peer:
        print("transformers' QuantizedCache did not run: it needs optimum-quanto, and accelerate to read these weights")
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=1))
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
