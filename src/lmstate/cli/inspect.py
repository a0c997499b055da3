"""`lmstate inspect`: what a model is made of, and what its state costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmstate.cli import options
from lmstate.cli.output import table


def inspect(
    model: options.ModelName,
    weights: options.Weights = options.WeightKind.auto,
    activations: options.Activations = options.ActivationBits.auto,
    device: options.Device = None,
    mmproj: options.Mmproj = None,
    parallel: Annotated[
        int,
        typer.Option(
            "--parallel", metavar="N", min=1,
            help="Also show what each of N processes would hold, without reading weights.",
        ),
    ] = 1,
) -> None:  # fmt: skip
    """Show a model's layers, sizes and state, or a saved state.

    \b
    Examples:
      lmstate inspect smollm2
      lmstate inspect path/to/model.gguf --weights int8
      lmstate inspect smollm2 --device cuda:0=20,cpu=10
      lmstate inspect smollm2 --parallel 2
      lmstate inspect monday.lmstate
    """
    if model.endswith(".lmstate") or (Path(model).is_file() and not model.endswith(".gguf")):
        from lmstate.cli.inspect_snapshot import layer_rows, snapshot_rows
        from lmstate.state import Snapshot

        snapshot = Snapshot.load(model)
        table(model, ("", ""), snapshot_rows(snapshot))
        print()
        table("layers", ("layers", "tensors", "bytes"), layer_rows(snapshot))
        return
    if parallel > 1 and (device is not None or mmproj is not None):
        why = "--device: processes are on the CPU" if mmproj is None else "--mmproj: processes read no pictures"
        raise typer.BadParameter(f"--parallel {parallel} was asked for with {why}")
    options.refuse_unknown(model)
    from lmstate.cli.inspect_model import model_rows, read_rows, state_rows, weight_rows

    where = "meta" if parallel > 1 else device
    loaded = options.load_model(model, weights, device=where, activations=activations, mmproj=mmproj)
    table(model, ("", ""), model_rows(loaded))
    print()
    table(
        "weights",
        ("matrix", "stored as", "bits a number", "activations", "shape", "how many", "bytes"),
        weight_rows(loaded),
    )
    print()
    table("state of one row", ("layers", "kind", "bytes per token", "bytes whatever the length"), state_rows(loaded))
    print()
    head = ("tokens", "weights", "attended to", "index", "whatever the length", "together", "of all stored")
    table("read by a decode step of one row", head, read_rows(loaded))
    if parallel > 1:
        from lmstate.cli.inspect_ranks import held_rows, split_rows

        print()
        table(
            f"held by each of {parallel} processes",
            ("process", "weights", "state per token", "state whatever the length"),
            held_rows(loaded, parallel),
        )
        print()
        table("their state", ("layers", "kind", "state"), split_rows(loaded, parallel))
