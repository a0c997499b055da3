"""The accuracy of activations in one byte beside two: `python -m bench.activations [MODEL] [--outliers FACTOR]`.

Perplexity of a text, the change of its logits, and how much of a greedy answer stays, for int4 and int8 weights.
`--outliers` gives the model outlier channels first, which change nothing in exact arithmetic: some features of each
norm, and some hidden ones, are FACTOR times as large, and the weights that multiply them so much smaller.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import lmstate
from bench.longcontext import text

PIECE = 512
CHANNELS = 4  # outliers of each norm, and of each hidden layer
BITS = (16, 8)
ANSWERS, PROMPT, ANSWER = 20, 64, 100


def logits_of(model: lmstate.Model, tokens: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits `[n, V]` of pieces of a text, and the tokens `[n]` that follow."""
    state = model.new_state()
    for start in range(0, len(tokens) - 1, PIECE):
        piece = tokens[start : start + PIECE]
        logits = model([piece], state, logits="all")
        assert logits is not None
        following = torch.tensor(tokens[start + 1 : start + 1 + PIECE])
        yield logits[0, : len(following)], following


def answers(model: lmstate.Model, tokens: list[int]) -> list[list[int]]:
    """Greedy answers to prompts from all over a text."""
    places = range(0, len(tokens) - PROMPT, (len(tokens) - PROMPT) // (ANSWERS - 1))
    prompts = [tokens[at : at + PROMPT] for at in places][:ANSWERS]
    return model.generate(prompts, max_new_tokens=ANSWER, return_ids=True)  # type: ignore[return-value]


def agreeing(one: list[list[int]], other: list[list[int]]) -> int:
    """Tokens before the first difference, of all answers."""
    return sum(
        next((at for at, (a, b) in enumerate(zip(x, y)) if a != b), min(len(x), len(y))) for x, y in zip(one, other)
    )


@contextmanager
def with_outliers(name: str, factor: float) -> Iterator[str]:
    """A checkpoint of the same function with outlier channels; the model's own where `factor` is 1."""
    if factor == 1:
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        model: Any = lmstate.load(name, weights="float32", trainable=True)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for norm, products in (("input_layernorm", ("q", "k", "v")), ("post_attention_layernorm", ("gate", "up"))):
                for label, weight in parameters.items():
                    if not label.endswith(f"{norm}.weight"):
                        continue
                    layer = label.removesuffix(f"{norm}.weight")
                    part = "self_attn" if products == ("q", "k", "v") else "mlp"
                    at = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))[:CHANNELS]
                    weight[at] *= factor
                    for product in products:
                        parameters[f"{layer}{part}.{product}_proj.weight"][:, at] /= factor
                    if part == "mlp":
                        parameters[f"{layer}mlp.up_proj.weight"][at] *= factor
                        parameters[f"{layer}mlp.down_proj.weight"][:, at] /= factor
        model.save_pretrained(folder)
        yield folder


def compare(name: str, weights: str, tokens: list[int]) -> None:
    """Print what 8 bits change beside 16."""
    models = {bits: lmstate.load(name, weights=weights, activations=bits) for bits in BITS}
    lost = dict.fromkeys(BITS, 0.0)
    changed = largest = 0.0
    count = same = 0
    for (one, following), (other, _) in zip(*(logits_of(models[bits], tokens) for bits in BITS)):
        for bits, logits in zip(BITS, (one, other)):
            lost[bits] += float(torch.nn.functional.cross_entropy(logits, following, reduction="sum"))
        change = (one - other).abs()
        changed, largest = changed + float(change.mean()) * len(one), max(largest, float(change.max()))
        count, same = count + len(one), same + int((one.argmax(-1) == other.argmax(-1)).sum())
    perplexity = {bits: math.exp(lost[bits] / count) for bits in BITS}
    first, second = (answers(models[bits], tokens) for bits in BITS)
    print(
        f"{weights}: perplexity of {count} tokens {perplexity[16]:.4f} with 16 bits, {perplexity[8]:.4f} with 8 "
        f"({perplexity[8] / perplexity[16] - 1:+.3%}); logits change by {changed / count:.3f}, at most {largest:.2f}; "
        f"the likeliest token is the same at {same / count:.2%}; {agreeing(first, second)} of {sum(map(len, first))} "
        f"tokens of {len(first)} greedy answers come before a difference",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--outliers", type=float, default=1.0, metavar="FACTOR")
    arguments = parser.parse_args()
    tokens = lmstate.load(arguments.model).tokenizer.encode(text())[: arguments.tokens + 1]
    warnings.simplefilter("ignore", UserWarning)
    with with_outliers(arguments.model, arguments.outliers) as name:
        for weights in ("int4", "int8"):
            compare(name, weights, tokens)


if __name__ == "__main__":
    main()
