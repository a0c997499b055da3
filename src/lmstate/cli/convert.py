"""`lmstate convert`: a model in another storage, written to a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lmstate.cli import options
from lmstate.cli.output import note, size


def convert(
    model: options.ModelName,
    out: Annotated[Path, typer.Argument(metavar="OUT", file_okay=False, help="A folder that is empty, or not there.")],
    weights: Annotated[options.WeightKind, typer.Option("--weights", help="How the matrices are stored.")],
) -> None:
    """Write a model with its matrices in another storage, so that it loads without rounding again.

    OUT loads with the bits that MODEL has with the same --weights. Integers are stored as MLX stores them.

    \b
    Examples:
      lmstate convert organization/model model-int4 --weights int4
      lmstate convert model.gguf folder --weights bfloat16
    """
    options.refuse_unknown(model)
    if out.is_dir() and os.listdir(out):
        raise typer.BadParameter(f"{out} is not empty: name a folder that is empty or not there")
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"{out}: there is no folder {out.absolute().parent}; make it first")
    options.import_library()
    from lmstate.converting import convert as write

    nbytes = write(model, out, weights.value, progress=sys.stderr.isatty())
    parts = ", ".join(f"{kind} {size(count)}" for kind, count in nbytes.most_common())
    note(f"wrote {out}: {size(sum(nbytes.values()))} ({parts})")
