"""`lmstate trace`: the first sublayer where two models, or two storages of one, differ."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from lmstate.cli import options


def trace(
    model: options.ModelName,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Model to compare with; can be the same.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text that both models read.")] = "The quick brown fox",
    weights: options.Weights = options.WeightKind.auto,
    other_weights: Annotated[
        options.WeightKind | None,
        typer.Option("--other-weights", help="Storage of OTHER's weights. Default: as --weights."),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", min=0.0, help="Ignore differences below this, relative to the residual stream."),
    ] = 1e-5,
    threads: options.Threads = None,
    device: options.Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Find the first sublayer where two models differ.

    Both must have the same tokenizer.

    \b
    Examples:
      lmstate trace ./before ./after --prompt "Hello"
      lmstate trace smollm2 smollm2 --weights float32 --other-weights int4 --tolerance 0.05
    """
    for name in (model, other):
        options.refuse_unknown(name, threads)
    from lmstate.models.divergence import divergences

    here = options.load_model(model, weights, threads, device=device)
    there = options.load_model(other, other_weights or weights, threads, device=device)
    tokens = here.tokenizer.encode(prompt)
    if not tokens or tokens != there.tokenizer.encode(prompt):
        raise ValueError(f"--prompt {prompt!r} gives no tokens, or others for {other} than for {model}")
    found = divergences(here, there, tokens)
    first = next((each.name for each in found if not each.relative <= tolerance), None)  # NaN differs too
    if as_json:
        print(json.dumps({"first": first, "sublayers": {each.name: each.relative for each in found}}))
        return
    for each in found:
        print(f"{each.name:<24} {each.relative:.2e}{'  <- the first that differs' if each.name == first else ''}")
    if first is None:
        print(f"no sublayer differs by more than {tolerance:g}")
