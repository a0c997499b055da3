"""What every test shares: one thread, since the models are small and the suite runs in several processes; and a seed,
so that what a test draws does not depend on those before it."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Triton's interpreter is chosen when a kernel is decorated, so before anybody imports Triton. On a GPU kernels are
# compiled; TRITON_INTERPRET=1 runs tests/interpreted there, instead of tests/cuda.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
os.environ["LMSTATE_THREADS"] = "fixed"  # tests of several threads run on several, whatever else runs
torch.set_num_threads(1)

REAL_TIME = ("cli", "docs", "engine", "faults", "serve", "threads")  # sockets, processes, signals, a browser


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--interleavings", type=int, default=200, help="random interleavings of each layer kind")


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws the same examples in every run of the suite, and others in every soak."""
    settings.register_profile("suite", derandomize=config.option.markexpr == "not soak", deadline=None)
    settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector out of the collection, and afterwards out of what it made.

    What stays until the end is a million objects of modules and tests; every full collection would walk through them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(20_000, 10, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run again, at most twice, what fails in real time: the summary names it, for there is a race to be found."""
    for item in items:
        if item.path.relative_to(config.rootpath / "tests").parts[0] in REAL_TIME:
            item.add_marker(pytest.mark.flaky(reruns=2))


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)
    for name in ("lmstate", "uvicorn.error"):  # levels that a command set in the process
        if (logger := logging.getLogger(name)).level != logging.NOTSET:  # setting one empties the caches of all loggers
            logger.setLevel(logging.NOTSET)
