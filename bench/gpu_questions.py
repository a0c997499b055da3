"""What only a card can answer about the GPU kernels: equal bits on matrix units, costs of launches, bandwidth reached.

`python -m bench.gpu_questions [--only bits products ...]` prints a line of JSON for each answer, cheapest first, with
the card in the first line. `tests/interpreted/test_questions.py` asks those about bits without a card.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lmstate.ops.cuda import attention as kernels
from lmstate.ops.cuda import configs, dense, recurrent
from lmstate.ops.cuda.attention import attend
from lmstate.ops.types.block_table import BLOCK_TOKENS, RowBlocks
from lmstate.ops.types.params import AttentionParams, CausalMask, Norm
from lmstate.ops.types.recurrences import DeltaOperands
from lmstate.ops.types.slab_table import SlabRows, SlabTable
from lmstate.ops.types.slabs import BufferShape, Slabs
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
            tiles = [configs.product(n, 128, 2).rows for n in rows]
            yield {"inputs": inputs, "kind": kind, "tiles": tiles, "rows that differ": apart}


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


def attention_blocks(tokens: int, rows: int, heads: int, dim: int, device: str) -> tuple[SlabTable, SlabTable]:
    """Keys and values of bfloat16 in blocks that lie in no order."""
    slabs = Slabs([BufferShape((heads,), dim, torch.bfloat16)] * 2, torch.device(device))
    count = -(-tokens // BLOCK_TOKENS)
    blocks = slabs.take(rows * count, zeroed=True)
    order = torch.randperm(len(blocks)).tolist()
    for block in blocks:
        for part in block.tensors:
            part.normal_()
    held = [RowBlocks(tuple(blocks[i] for i in order[row * count : (row + 1) * count])) for row in range(rows)]
    places, pointers = SlabRows(held), np.zeros((rows, count), dtype=np.int64)
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    k, v = (SlabTable(places, buffer, pointers, heads, dim, like) for buffer in range(2))
    return k, v


def attention(device: str, small: bool) -> Iterator[Answer]:
    """Bytes of keys and values read per second in a decode step, for each length of parts; and whether parts that are
    merged, and tiles of a prompt, have the bits of one query. Prompts beside torch's attention."""
    heads, dim, params, mask = (1, 16, AttentionParams(0.25), CausalMask()) if small else _LARGE
    for tokens in (150,) if small else (4096, 32768):
        for rows in (1,) if small else (1, 8, 32):
            k, v = attention_blocks(tokens, rows, heads, dim, device)
            starts, one = torch.full((rows,), tokens - 1), torch.ones(rows, dtype=torch.int64)
            q = torch.randn(rows, 1, 4 * heads, dim, device=device)
            answer: Answer = {"tokens": tokens, "rows": rows}
            if device != "cpu":
                read = 2 * rows * tokens * heads * dim * 2
                for part in (256, 512, 1024):
                    with _parts_of(part):
                        took = seconds(lambda q=q, k=k, v=v, s=starts, n=one: attend(q, k, v, s, n, params, mask))  # type: ignore[misc]
                    answer[f"GB/s, parts of {part}"] = read / took / 1e9
            yield answer
        width = 20 if small else 512
        starts, counts = torch.tensor([tokens - width]), torch.tensor([width])
        q = torch.randn(1, width, 4 * heads, dim, device=device)
        k, v = attention_blocks(tokens, 1, heads, dim, device)
        whole = attend(q, k, v, starts, counts, params, mask)
        apart = [
            at
            for at in range(0, width, max(1, width // 7))
            if not torch.equal(
                attend(q[:, at : at + 1], k, v, starts + at, counts * 0 + 1, params, mask), whole[:, at : at + 1]
            )
        ]
        yield {"tokens": tokens, "queries that differ alone": apart}
    if device != "cpu":
        for tokens in (4096, 16384):
            k, v = attention_blocks(tokens, 1, heads, dim, device)
            q = torch.randn(1, tokens, 4 * heads, dim, device=device)
            starts, counts = torch.tensor([0]), torch.tensor([tokens])
            operations = 2 * tokens**2 * 4 * heads * dim  # of a causal mask
            took = seconds(lambda: attend(q, k, v, starts, counts, params, mask), 5)  # noqa: B023
            keys, values = (x.dense().contiguous() for x in (k, v))
            other = q.transpose(1, 2).bfloat16()
            causal = {"is_causal": True, "enable_gqa": True}
            theirs = seconds(lambda: scaled_dot_product_attention(other, keys, values, **causal), 5)  # noqa: B023
            yield {"prompt": tokens, "TFLOP/s": operations / took / 1e12, "torch's": operations / theirs / 1e12}


_LARGE = (8, 128, AttentionParams(128**-0.5), CausalMask())


@contextmanager
def _parts_of(positions: int) -> Iterator[None]:
    """Sum the softmax over parts of so many positions inside."""
    usual, kernels.SPLIT = kernels.SPLIT, positions
    try:
        yield
    finally:
        kernels.SPLIT = usual


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


QUESTIONS = {each.__name__: each for each in (bits, cublas, launches, products, attention, recurrences)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_questions", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--small", action="store_true", help="shapes for the interpreter")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    card = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(json.dumps({"card": card, "torch": torch.__version__}), flush=True)
    for name in options.only:
        for answer in QUESTIONS[name](options.device, options.small):
            print(json.dumps({"question": name, **answer}), flush=True)


if __name__ == "__main__":
    main()
