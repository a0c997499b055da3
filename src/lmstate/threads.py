"""The number of threads that the operations run on."""

from __future__ import annotations

import os
from statistics import median
from time import perf_counter
from typing import Literal

import torch

from lmstate import ops
from lmstate.ops import dispatch
from lmstate.ops.fork import forked
from lmstate.state.validate import whole_number

MOST_THREADS = 16  # on few processors; on many, four times their number
SIZE = 1024  # of the measured product: [1, SIZE] x [SIZE, SIZE], a small model's projection in one step of decoding
PRODUCTS, LEAST_ROUNDS, ROUNDS = 8, 3, 9
MEASURING = 0.03  # seconds after which the least rounds are enough: on a busy machine each can take a tenth of a second
GAIN = 0.95  # another thread must save a twentieth of the time: on a busy machine it can cost many times that


def set_threads(count: int | Literal["auto"]) -> int:
    """Run the operations on `count` threads from now on, and return the count.

    "auto" times a short run of the products of a decode step on 1, 2, ... threads, up to as many as this process may
    use processors, and takes the fewest that are about as fast as the best. It measures this moment: what else runs on
    the machine decides with. The numbers that a model computes do not depend on it.

    Raises ValueError for a count below 1 or far above that of the processors, RuntimeError for more than one in a
    forked process, where OpenMP would hang.
    """
    if isinstance(count, str):
        if count != "auto":
            raise ValueError(f'set_threads({count!r}) was asked for; give a number of threads, or "auto"')
        count = 1 if forked() else _fastest(available())
    count = whole_number(count, "the number of threads")
    if count < 1:
        raise ValueError(f"set_threads({count}) was asked for; there is at least 1 thread")
    if count > (most := max(MOST_THREADS, 4 * available())):  # OpenMP would begin them all, or end the process
        raise ValueError(f"set_threads({count}) was asked for; on {available()} processors there are at most {most}")
    if count > 1 and forked():
        raise RuntimeError(
            f"set_threads({count}) was asked for in a forked process, where OpenMP's threads do not run; start it with "
            'multiprocessing.get_context("spawn"), or stay on 1 thread'
        )
    torch.set_num_threads(count)
    return count


def available() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fastest(most: int) -> int:
    """The fewest threads of 1 to `most` that are about as fast as the best of them."""
    before = torch.get_num_threads()
    packed = torch.full((SIZE // 16, SIZE // 32, 544), 60, dtype=torch.uint8)  # bytes of a float16 near 1
    weight = ops.Int8Weight(packed, SIZE, SIZE)
    x = torch.linspace(-1, 1, SIZE)[None]
    counts = _counts(most)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    try:
        start = perf_counter()
        for turn in range(ROUNDS + 1):  # by turns, so that what else runs now meets all of them
            if turn > LEAST_ROUNDS and perf_counter() - start > MEASURING:
                break
            for count in counts:
                torch.set_num_threads(count)
                begin = perf_counter()
                for _ in range(PRODUCTS):
                    ops.linear(x, weight)
                if turn:  # the first one starts the threads
                    seconds[count].append(perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
    best = counts[0]
    for count in counts[1:]:
        if median(seconds[count]) < GAIN * median(seconds[best]):
            best = count
    return best


def _counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and `most`."""
    counts = {min(most, count << shift) for shift in range(1, 10) for count in (2, 3)}
    return sorted({1, min(2, most), min(3, most), *counts, most})


def release_threads() -> None:
    """End the OpenMP workers of the calling thread, before another thread takes over the computing.

    Each Python thread that computes has workers of its own. As long as there are more of them in all than processors,
    libgomp has all of them sleep between two operations instead of waiting awake: a tenth of the time of a decode step
    for a small model. The next call in this thread makes new ones.
    """
    if (library := dispatch.choice().library) is not None:
        library.release_threads()
