"""`lmstate perplexity`: how well a model predicts a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lmstate.cli import options
from lmstate.cli.chat.input import as_text

WINDOW = 2048  # tokens, where the model takes as many


def perplexity(
    model: options.ModelName,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A text file in UTF-8."),
    ],
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            min=2,
            metavar="N",
            help="Tokens per window. Default: 2048, or the context length if it is shorter.",
        ),
    ] = None,
    weights: options.Weights = options.WeightKind.auto,
    activations: options.Activations = options.ActivationBits.auto,
    ctx_size: options.ContextSize = None,
    threads: options.Threads = None,
    device: options.Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Measure the perplexity of a text. Lower is better.

    Each window begins from an empty state.

    \b
    Examples:
      lmstate perplexity smollm2 README.md
      lmstate perplexity smollm2 book.txt --weights int4 --window 512
    """
    options.refuse_unknown(model, threads)
    if window is not None and ctx_size is not None and window > ctx_size:
        raise typer.BadParameter(f"--window {window} is more than --ctx-size {ctx_size}")
    text = as_text(file.read_text(encoding="utf-8", errors="surrogateescape"), str(file))
    from lmstate.generation.perplexity import score_text

    loaded = options.load_model(model, weights, threads, None, "none", device, activations, ctx_size)
    size = window or min(WINDOW, loaded.context_size or WINDOW)
    if loaded.context_size is not None and size > loaded.context_size:
        raise ValueError(f"--window {size} was asked for, and {model} reads {loaded.context_size} tokens at most")
    score = score_text(loaded, loaded.tokenizer.encode(text), size)
    if as_json:
        told = {"perplexity": score.perplexity, "nats": score.nats, "tokens": score.predicted, "windows": score.windows}
        print(json.dumps(told))
    else:
        windows = f"{score.windows} window{'s' * (score.windows != 1)} of {size}"
        print(f"perplexity {score.perplexity:.4f} of {score.predicted} tokens in {windows}")
