"""`lmstate serve --replicas`: one model on several engines of Ray Serve."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from lmstate.cli import options

if TYPE_CHECKING:
    from lmstate.cli.served import EngineOptions
    from lmstate.cluster import Cluster


def check_replicas(replicas: int, store: str | None, one: bool) -> None:
    """Raises `typer.BadParameter` for several models, and for several replicas without a store that they share."""
    if not one:
        raise typer.BadParameter("--replicas and --cluster go with one model, without --lora")
    if replicas > 1 and store is None:
        raise typer.BadParameter(
            f"--replicas {replicas} was asked for without --store: sessions would be lost with their replica. Give the "
            "URL of a store that all share, or --store none for no sessions"
        )


@contextmanager
def leaves_on_sigterm() -> Iterator[None]:
    """Have SIGTERM leave the block as an error does, so that folders and processes end with it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def replicated(model: str, replicas: int, address: str | None, how: EngineOptions) -> Cluster:
    """A cluster of engines with these options. Raises `typer.BadParameter` for options that replicas do not have."""
    from lmstate.cluster import deploy
    from lmstate.threads import available

    asked = how.threads
    with options.usage():
        return deploy(
            model,
            replicas,
            None if how.store == "none" else how.store,
            address=address,
            weights=how.weights.value,
            activations=how.activations.bits,
            adapter=None if how.adapter is None else str(how.adapter),
            mmproj=how.mmproj,
            context_size=how.context_size,
            device=how.device,
            parallel=how.parallel,
            parallel_mode=how.parallel_mode.value,
            draft=how.draft,
            kv_bits=None if how.kv is None else how.kv.bits,
            carries=how.carries,
            rows=how.rows,
            queue=how.queue,
            memory=how.memory,
            max_itl=how.max_itl,
            stall=how.stall,
            threads=max(1, available() // replicas) if asked in (None, "auto") else int(asked or 1),
        )
