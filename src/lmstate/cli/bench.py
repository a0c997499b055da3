"""`lmstate bench`: how fast a model reads prompts and decodes on this machine."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from lmstate.cli import options
from lmstate.cli.output import note, table

if TYPE_CHECKING:
    from torch import Tensor

    from lmstate.models.model import Model

PROMPTS = (16, 48, 96, 200, 512)
HELD = (128, 512)  # tokens that the state holds before a decode is timed


def bench(
    model: options.ModelName = options.DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Tokens of each decode.")] = 32,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="The median of this many is shown.")] = 3,
    weights: options.Weights = options.WeightKind.auto,
    activations: options.Activations = options.ActivationBits.auto,
    threads: options.Threads = None,
    device: options.Device = None,
) -> None:
    """Time a model on this machine: prompts of several lengths, and tokens one by one.

    Every number is the median of the rounds, which go through all lines one after the other.

    \b
    Examples:
      lmstate bench smollm2
      lmstate bench model.gguf --weights int4 --threads 4
    """
    options.refuse_unknown(model, threads)
    import torch

    loaded = options.load_model(model, weights, threads, device=device, activations=activations)
    loaded.on_part = None
    most = loaded.context_size
    prompts = [count for count in PROMPTS if most is None or count <= most]
    held = [count for count in HELD if most is None or count + tokens <= most]
    for line in [f"prefill {count}" for count in PROMPTS if count not in prompts]:
        note(f"{line} is left out: the model takes {most:,} tokens")
    for line in [f"decode near {count}" for count in HELD if count not in held]:
        note(f"{line} is left out: with --tokens {tokens} it needs more than the {most:,} tokens that the model takes")
    _prefill(loaded, PROMPTS[0])  # the first call starts threads and touches the weights
    prefills: dict[int, list[float]] = {count: [] for count in prompts}
    decodes: dict[int, list[float]] = {count: [] for count in held}
    for _ in range(rounds):
        for count in prompts:
            prefills[count].append(_prefill(loaded, count))
        for count in held:
            decodes[count].append(_decode(loaded, count, tokens))
    rows = [_row(f"prefill {count}", count, seconds) for count, seconds in prefills.items()]
    rows += [_row(f"decode near {count}", tokens, seconds) for count, seconds in decodes.items()]
    threads_used = torch.get_num_threads()
    table(
        f"{model}, weights {weights.value}, {threads_used} thread{'s' * (threads_used > 1)}",
        ("", "tokens/s", "milliseconds", "a token"),
        rows,
    )


def _row(name: str, tokens: int, seconds: list[float]) -> tuple[str, str, str, str]:
    from statistics import median

    middle = median(seconds)
    return name, f"{tokens / middle:,.1f}", f"{1000 * middle:,.1f}", f"{1000 * middle / tokens:,.3f}"


def _prefill(model: Model, count: int) -> float:
    """Seconds to read a prompt into an empty state."""
    state, ids = model.new_state(rows=1), _ids(model, count)
    begin = perf_counter()
    _seen(model([ids], state))
    return perf_counter() - begin


def _decode(model: Model, held: int, tokens: int) -> float:
    """Seconds for tokens one by one, around the length `held`."""
    state = model.new_state(rows=1)
    model([_ids(model, max(1, held - tokens // 2))], state, logits="none")
    ids = _ids(model, tokens)
    model([ids[:1]], state)  # the first step plans
    begin = perf_counter()
    for token in ids:
        _seen(model([[token]], state))
    return perf_counter() - begin


def _seen(logits: Tensor | None) -> None:
    """Wait for the logits, where they lie on another device, as who picks a token from them does."""
    if logits is not None and not logits.is_cpu:
        logits.argmax().item()


def _ids(model: Model, count: int) -> list[int]:
    """Tokens from all over the vocabulary, the same at each call."""
    return [7919 * (index + 1) % model.config.vocab_size for index in range(count)]
