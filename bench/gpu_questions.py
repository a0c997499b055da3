"""What only a card can answer about the GPU kernels: equal bits on matrix units, costs of launches, bandwidth reached.

`python -m bench.gpu_questions [--only bits products ...]` prints a line of JSON for each answer, cheapest first, with
the card in the first line. `tests/interpreted/test_questions.py` asks those about bits without a card.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lmstate.ops.cuda import configs, dense, recurrent
from lmstate.ops.types.params import Norm
from lmstate.ops.types.recurrences import DeltaOperands
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.grouped import FloatWeight, quantize

SHAPES = {"135M": (576, 3072), "1.7B": (2048, 12288), "8B": (4096, 24576)}
"""Inputs and outputs of the widest product of a layer."""
Answer = dict[str, Any]


def seconds(run: Callable[[], object], rounds: int = 20) -> float:
    """Median time of a run on the GPU."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def weight(kind: str, inputs: int, outputs: int, device: str) -> Weight:
    matrix = torch.randn(outputs, inputs) * inputs**-0.5
    return (quantize(matrix, kind) if "int" in kind else FloatWeight(matrix.to(getattr(torch, kind)))).to(device)


def bits(device: str, small: bool) -> Iterator[Answer]:
    """Rows of a product in tiles of 16 and of 64: two kinds of instructions of the matrix unit on Hopper."""
    rows = (1, 16, 33, 64, 70) if small else (1, 16, 33, 64, 128, 2048)
    for inputs in (96,) if small else (576, 4096, 12288):
        for kind in ("bfloat16", "float16", "int4", "int8"):
            own, x = weight(kind, inputs, 128, device), torch.randn(max(rows), inputs, device=device)
            whole = dense.linear(x, own, None, None)
            apart = [n for n in rows if not torch.equal(dense.linear(x[:n], own, None, None), whole[:n])]
            yield {"inputs": inputs, "kind": kind, "tiles": configs.product(max(rows)).rows, "rows that differ": apart}


def cublas(device: str, small: bool) -> Iterator[Answer]:
    """Rows of torch's product that have the bits of ours: whether prompts may use it."""
    for inputs in (96,) if small else (576, 2048, 4096):
        own = weight("bfloat16", inputs, 256, device)
        for rows in (64,) if small else (64, 512, 4096):
            x = torch.randn(rows, inputs, device=device)
            theirs = (x.bfloat16() @ own.storage.T).float()
            ours = dense.linear(x, own, None, None).bfloat16().float()
            yield {"inputs": inputs, "rows": rows, "equal": bool(torch.equal(theirs, ours))}


def launches(device: str, small: bool) -> Iterator[Answer]:
    """Microseconds of a launch, of a graph's node, and of a pinned copy of 64 KiB."""
    if device == "cpu":
        return
    x, norm = torch.randn(1, 576, device=device), Norm(torch.ones(576, device=device), 1e-5)
    yield {"launch": 1e6 * seconds(lambda: dense.norm(x, norm))}
    for nodes in (50, 150, 300):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(nodes):
                dense.norm(x, norm)
        yield {"nodes": nodes, "node": 1e6 * seconds(graph.replay) / nodes}
    host = torch.zeros(1 << 13, dtype=torch.int64, pin_memory=True)
    mirror = host.to(device)
    yield {"copy of 64 KiB": 1e6 * seconds(lambda: mirror.copy_(host, non_blocking=True))}


def products(device: str, small: bool) -> Iterator[Answer]:
    """Share of the copy bandwidth that a product of few rows reads its weight at."""
    if device == "cpu":
        return
    source = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: into.copy_(source))
    yield {"copy GB/s": copied / 1e9}
    for shape, (inputs, outputs) in SHAPES.items():
        for kind in ("bfloat16", "int8", "int4"):
            own = weight(kind, inputs, outputs, device)
            for rows in (1, 8, 32):
                x = torch.randn(rows, inputs, device=device)
                rate = own.nbytes / seconds(lambda x=x, own=own: dense.linear(x, own, None, None))  # type: ignore[misc]
                yield {"shape": shape, "kind": kind, "rows": rows, "GB/s": rate / 1e9, "of copy": rate / copied}


def recurrences(device: str, small: bool) -> Iterator[Answer]:
    """The gated delta rule: equal bits for any cut, and the time of a step and of a prompt."""
    heads, dim, tokens = (2, 16, 20) if small else (16, 128, 4096)
    q, k, v = (torch.randn(1, tokens, heads, dim, device=device) for _ in range(3))
    g, beta = -torch.rand(1, tokens, heads, device=device), torch.rand(1, tokens, heads, device=device)
    carry = torch.zeros(1, heads, dim, dim, device=device)

    def run(first: int, last: int, state: Tensor) -> tuple[Tensor, Tensor]:
        some = (x[:, first:last] for x in (q, k, v, g, beta))
        operands = DeltaOperands(*some, state, torch.tensor([last - first]), dim**-0.5, True)
        return recurrent.gated_delta_rule(operands)

    whole, end = run(0, tokens, carry)
    for cut in (1, 7, 64):
        state, pieces = carry, []
        for first in range(0, min(tokens, 40 * cut), cut):
            piece, state = run(first, min(first + cut, tokens), state)
            pieces.append(piece)
        found = torch.cat(pieces, 1)
        yield {"cut": cut, "equal": bool(torch.equal(found, whole[:, : found.shape[1]]))}
    if device != "cpu":
        yield {
            "step us": 1e6 * seconds(lambda: run(0, 1, end)),
            "prompt ms": 1e3 * seconds(lambda: run(0, tokens, carry)),
        }


QUESTIONS = {each.__name__: each for each in (bits, cublas, launches, products, recurrences)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_questions", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--small", action="store_true", help="shapes for the interpreter")
    options = parser.parse_args()
    torch.manual_seed(0)
    card = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(json.dumps({"card": card, "torch": torch.__version__}), flush=True)
    for name in options.only:
        for answer in QUESTIONS[name](options.device, options.small):
            print(json.dumps({"question": name, **answer}), flush=True)


if __name__ == "__main__":
    main()
