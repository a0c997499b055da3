"""Attention over bfloat16 keys and values, with settings of the environment by turns, and torch's flash attention:

`python -m bench.attention [--settings LMSTATE_AMX=0 LMSTATE_AMX=1] [--threads N] [--rounds N] [--only TEXT]`.

Milliseconds, the best of the rounds; of decode those of layers that are 96 MiB together. A prompt goes in parts of 512
tokens, as models feed it; torch attends to all of it at once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter

import torch
from torch.nn import functional as F

from lmstate import ops
from lmstate.ops import AttentionParams
from lmstate.ops.types.block_table import BlockTable
from lmstate.state.blocks import BlockPool, Buffer
from lmstate.state.layers.base import Layout
from lmstate.state.layers.block_store import BlockStore
from lmstate.state.step import Step

SHAPES = ((9, 3, 64), (16, 2, 128), (16, 2, 256), (8, 2, 64), (16, 2, 64))  # query heads, heads of keys, their dim
PROMPTS, DECODES = (512, 4096, 16000), (500, 4000, 16000)
PART, LEAST = 512, 0.1  # seconds that a round takes, at least
RAGGED = 8
DECODED = 96 << 20  # bytes that a step of decode reads

Case = tuple[int, int, int, int, int, int]  # heads, kv heads, dim, rows, new tokens, stored before them
CASES: list[Case] = [
    *((*shape, 1, tokens, 0) for shape in SHAPES[:3] for tokens in PROMPTS),
    *((*shape, 1, 1, stored) for shape in SHAPES for stored in DECODES),
    *((*shape, RAGGED, 1, 500) for shape in SHAPES[:3]),
]


def layers_of(case: Case) -> int:
    """So many that a step of decode does not find its keys in a cache: a model's weights come between."""
    _, kv, dim, rows, tokens, stored = case
    return 1 if tokens > 1 else -(-DECODED // (4 * rows * kv * dim * (stored + 1)))


def in_blocks(case: Case) -> list[tuple[BlockTable, BlockTable]]:
    """Keys and values of each layer, in blocks, as a state holds them."""
    _, kv, dim, rows, tokens, stored = case
    cpu = torch.device("cpu")
    layout = Layout(rows, cpu, torch.bfloat16, None, rewind=0)
    buffers, pool = {name: Buffer((kv,), dim, torch.bfloat16, cpu) for name in "kv"}, BlockPool()
    counts = (stored + tokens,) * rows
    tables = []
    for _ in range(layers_of(case)):
        store = BlockStore(layout, buffers, None, pool)
        store.reserve(Step((0,) * rows, counts, cpu, counts, False, None, True))
        for tensor in store.tensors():
            tensor.copy_(torch.randn(tensor.shape))
        tables.append((store.table("k"), store.table("v")))
    return tables


def ours(case: Case) -> Callable[[], object]:
    heads, _, dim, rows, tokens, stored = case
    held = in_blocks(case)
    q, params = torch.randn(rows, tokens, heads, dim), AttentionParams(dim**-0.5)
    first = torch.tensor([stored - 37 * r for r in range(rows)])

    def run() -> None:
        for k, v in held:
            for at in range(0, tokens, PART):
                part = q[:, at : at + PART]
                ops.attend(part, k, v, first + at, torch.full((rows,), part.shape[1]), params)

    return run


def torchs(case: Case) -> Callable[[], object]:
    heads, kv, dim, rows, tokens, stored = case
    q = torch.randn(rows, heads, tokens, dim).bfloat16()
    shape = (2, rows, kv, stored + tokens, dim)
    held = [torch.randn(shape).bfloat16().unbind() for _ in range(layers_of(case))]

    def run() -> None:
        for k, v in held:
            F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=True)

    return run


def milliseconds(run: Callable[[], object]) -> float:
    """The least of several calls."""
    begin, best = perf_counter(), float("inf")
    while perf_counter() - begin < LEAST:
        before = perf_counter()
        run()
        best = min(best, perf_counter() - before)
    return best * 1e3


def serve(threads: int) -> None:
    """Answer cases on standard input with their times."""
    torch.set_num_threads(threads)
    held: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        if line not in held:
            held = {line: ours(tuple(map(int, line.split())))}  # type: ignore[arg-type]
        print(milliseconds(held[line]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__)
    parser.add_argument("--settings", nargs="+", default=["LMSTATE_AMX=0", "LMSTATE_AMX=1"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose line has this text")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.threads)
    torch.set_num_threads(options.threads)
    command = [sys.executable, "-m", "bench.attention", "--serve", "--threads", str(options.threads)]
    workers = [
        subprocess.Popen(command, env={**os.environ, **dict([setting.split("=")])}, text=True, bufsize=1,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for setting in options.settings
    ]  # fmt: skip
    print(
        "| heads | dim | rows | new | before |",
        " | ".join(options.settings),
        "| torch's | first / last | torch's / last |",
    )
    print("|" + "---|" * (8 + len(workers)))
    for case in CASES:
        heads, kv, dim, rows, tokens, stored = case
        label = f"| {heads} / {kv} | {dim} | {rows} | {tokens} | {stored} |"
        if options.only not in label:
            continue
        times, other = [float("inf")] * len(workers), float("inf")
        theirs = torchs(case)
        for _ in range(options.rounds):
            for i, worker in enumerate(workers):
                assert worker.stdin and worker.stdout
                print(*case, file=worker.stdin, flush=True)
                times[i] = min(times[i], float(worker.stdout.readline()))
            other = min(other, milliseconds(theirs))
        of_ours = " | ".join(f"{time:.3f}" for time in times)
        print(label, of_ours, f"| {other:.3f} | {times[0] / times[-1]:.2f} | {other / times[-1]:.2f} |", flush=True)
    for worker in workers:
        assert worker.stdin
        worker.stdin.close()
        worker.wait()
    return None


if __name__ == "__main__":
    main()
