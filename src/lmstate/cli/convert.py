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
    out: Annotated[
        Path, typer.Argument(metavar="OUT", file_okay=False, help="Output folder; must be empty or absent.")
    ],
    weights: Annotated[options.WeightKind, typer.Option("--weights", help="Storage of the matrices.")],
) -> None:
    """Write a model with its matrices in another storage.

    OUT gives the same bits as MODEL loaded with the same --weights, and loads faster. int4 and int8 are stored as in
    MLX.

    \b
    Examples:
      lmstate convert organization/model model-int4 --weights int4
      lmstate convert model.gguf folder --weights bfloat16
    """
    options.refuse_unknown(model)
    if out.is_dir() and os.listdir(out):
        raise typer.BadParameter(f"{out} is not empty: name an empty or a new folder")
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"{out}: there is no folder {out.absolute().parent}; make it first")
    options.import_library()
    from lmstate.converting import convert as write

    nbytes = write(model, out, weights.value, progress=sys.stderr.isatty())
    parts = ", ".join(f"{kind} {size(count)}" for kind, count in nbytes.most_common())
    note(f"wrote {out}: {size(sum(nbytes.values()))} ({parts})")
