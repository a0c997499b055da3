"""`lmstate embed`: the embeddings of texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from lmstate.cli import options
from lmstate.cli.chat.input import as_text


def embed(
    model: options.ModelName,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT...", help="Texts; default: the lines of stdin.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", exists=True, dir_okay=False, help="File with one text per line."),
    ] = None,
    pooling: Annotated[
        options.PoolingKind | None, typer.Option("--pooling", help="Default: the checkpoint's own, else mean.")
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option("--dimensions", min=1, metavar="N", help="Keep only the first N numbers of each embedding."),
    ] = None,
    weights: options.Weights = options.WeightKind.auto,
    activations: options.Activations = options.ActivationBits.auto,
    threads: options.Threads = None,
    device: options.Device = None,
) -> None:
    """Print the embeddings of texts, one JSON line per text.

    Embeddings have length 1.

    \b
    Examples:
      lmstate embed smollm2 "a cat" "a kitten"
      lmstate embed smollm2 -f lines.txt --pooling last > vectors.jsonl
    """
    options.refuse_unknown(model, threads)
    if texts and file is not None:
        raise typer.BadParameter("give TEXT or a --file, not both")
    if not texts:
        lines = sys.stdin.read() if file is None else file.read_text(encoding="utf-8", errors="surrogateescape")
        texts = lines.splitlines()
    if not texts or not all(texts):
        raise typer.BadParameter("a text is empty: give texts that are not, or name a --file of them, one in a line")
    checked = [as_text(text, f"text {index}") for index, text in enumerate(texts)]
    loaded = options.load_model(model, weights, threads, None, "none", device, activations)
    for text in checked:
        vector = loaded.embeddings(text, None if pooling is None else pooling.value, dimensions=dimensions)
        print(json.dumps(vector.tolist()), flush=True)
