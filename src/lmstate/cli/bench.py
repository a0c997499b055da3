"""`lmstate bench`: how fast models read prompts and decode on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmstate.cli import options
from lmstate.cli.output import note, size, table

if TYPE_CHECKING:
    from torch import Tensor

    from lmstate.models.model import Model
    from lmstate.state import State

PROMPTS = "16,48,96,200,512"
HELD = "128,512"  # tokens that the state holds before a decode is timed


@dataclass(frozen=True)
class Timing:
    """A prompt of `tokens` tokens, or as many decoded one by one around the length `near`; seconds of each round."""

    tokens: int
    near: int | None
    seconds: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"prefill {self.tokens}" if self.near is None else f"decode near {self.near}"

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / median(self.seconds)


@dataclass(frozen=True)
class BenchResult:
    """Timings of a model, and its size: bytes of its weights by their storage, and of a state of the longest prompt."""

    model: str
    family: str
    parameters: int
    weights: dict[str, int]
    state_tokens: int
    state_nbytes: int
    threads: int
    device: str
    timings: tuple[Timing, ...]


def bench(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Aliases, directories, .gguf files or Hub ids.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Number of tokens to decode.")] = 32,
    prompts: Annotated[
        str, typer.Option("--prompts", metavar="N,...", help="Lengths of the prompts, in tokens.")
    ] = PROMPTS,
    near: Annotated[
        str, typer.Option("--near", metavar="N,...", help="Context lengths to decode at, in tokens.")
    ] = HELD,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds; the median is shown.")] = 3,
    weights: options.Weights = options.WeightKind.auto,
    activations: options.Activations = options.ActivationBits.auto,
    threads: options.Threads = None,
    device: options.Device = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the seconds of every round.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Print a Markdown table, one line per model, to paste into an issue.")
    ] = False,
) -> None:
    """Measure the speed of prefill and decode on this machine.

    Each number is the median of the rounds. Each round measures every line once.

    \b
    Examples:
      lmstate bench smollm2
      lmstate bench model.gguf --weights int4 --threads 4
      lmstate bench smollm2 model.gguf --prompts 512 --near 128 --report
    """
    names = models or [options.DEFAULT_MODEL]
    if as_json and report:
        raise typer.BadParameter("give --json or --report, not both")
    lengths, held = _lengths("--prompts", prompts), _lengths("--near", near)
    for name in names:
        options.refuse_unknown(name, threads)
    results = []
    for name in names:
        model = options.load_model(name, weights, threads, device=device, activations=activations)
        model.on_part = None
        results.append(_measured(name, model, lengths, held, tokens, rounds))
        if not (as_json or report):
            _show(results[-1], weights.value, first=len(results) == 1)
        del model  # before the next one is loaded
    if as_json:
        print(json.dumps({**machine(), "models": [asdict(result) for result in results]}))
    elif report:
        print("\n".join(report_lines(results, machine())))


def _lengths(option: str, given: str) -> list[int]:
    """Numbers of tokens, from text with commas between them. Raises `typer.BadParameter`."""
    try:
        lengths = [int(number) for number in given.split(",")]
    except ValueError:
        lengths = [0]
    if min(lengths) < 1:
        raise typer.BadParameter(f"{option} takes numbers of tokens, as 16,512; {given!r} was given")
    return lengths


def _measured(
    name: str, model: Model, lengths: Sequence[int], near: Sequence[int], tokens: int, rounds: int
) -> BenchResult:
    """Time what the model has positions for; a line on stderr tells what is left out."""
    import torch

    from lmstate.models.describe import told_devices

    most = model.context_size
    prompts = [count for count in lengths if most is None or count <= most]
    held = [count for count in near if most is None or count + tokens <= most]
    for line in [f"prefill {count}" for count in lengths if count not in prompts]:
        note(f"{line} is left out: the model takes {most:,} tokens")
    for line in [f"decode near {count}" for count in near if count not in held]:
        note(f"{line} is left out: with --tokens {tokens} it needs more than the {most:,} tokens that the model takes")
    _, state = _prefill(model, min((16, *prompts)))  # the first call starts threads and touches the weights
    prefills: dict[int, list[float]] = {count: [] for count in prompts}
    decodes: dict[int, list[float]] = {count: [] for count in held}
    for _ in range(rounds):
        for count in prefills:
            seconds, made = _prefill(model, count)
            prefills[count].append(seconds)
            state = max(state, made, key=lambda each: each.lengths[0])
        for count in decodes:
            decodes[count].append(_decode(model, count, tokens))
    timings = [Timing(count, None, tuple(taken)) for count, taken in prefills.items()]
    timings += [Timing(tokens, count, tuple(taken)) for count, taken in decodes.items()]
    totals = model.weight_totals
    return BenchResult(
        name, model.config.family, totals.parameters, dict(totals.nbytes), state.lengths[0],
        sum(state.memory().values()), torch.get_num_threads(),
        told_devices(model.devices, model.network.offloaded), tuple(timings),
    )  # fmt: skip


def _show(result: BenchResult, weights: str, first: bool) -> None:
    if not first:
        print()
    rows = []
    for timing in result.timings:
        middle, speed = 1000 * median(timing.seconds), timing.tokens_per_second
        rows.append((timing.name, f"{speed:,.1f}", f"{middle:,.1f}", f"{middle / timing.tokens:,.3f}"))
    threads = f"{result.threads} thread{'s' * (result.threads > 1)}"
    table(f"{result.model}, weights {weights}, {threads}", ("", "tokens/s", "milliseconds", "a token"), rows)


def machine() -> dict[str, Any]:
    """Versions, the processor and the operations that ran."""
    import torch

    from lmstate import __version__
    from lmstate.cli.doctor import processor
    from lmstate.ops.dispatch import choice

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "lmstate": __version__, "torch": torch.__version__, "processor": processor(), "operations": choice().name,
        "gpu": gpu,
    }  # fmt: skip


def report_lines(results: Sequence[BenchResult], ran_on: dict[str, Any]) -> Iterator[str]:
    """A table in Markdown, a line for each model, with the machine above it."""
    names = dict.fromkeys(timing.name for result in results for timing in result.timings)
    columns = ["model", "family", "parameters", "weights", "state", "threads", "device", *names]
    gpu = f", {ran_on['gpu']}" if ran_on["gpu"] else ""
    yield (
        f"`lmstate bench` {ran_on['lmstate']}, torch {ran_on['torch']}, {ran_on['processor']}{gpu}, operations "
        f"{ran_on['operations']}; tokens/s:"
    )
    yield ""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for result in results:
        speeds = {timing.name: f"{timing.tokens_per_second:,.1f}" for timing in result.timings}
        weights = ", ".join(f"{kind} {size(count)}" for kind, count in result.weights.items())
        state = f"{size(result.state_nbytes)} at {result.state_tokens:,} tokens"
        cells = [
            result.model.replace("|", "\\|"), result.family, f"{result.parameters:,}", weights, state,
            str(result.threads), result.device, *(speeds.get(name, "-") for name in names),
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _prefill(model: Model, count: int) -> tuple[float, State]:
    """Seconds to read a prompt into an empty state, and that state."""
    state, ids = model.new_state(rows=1), _ids(model, count)
    begin = perf_counter()
    _seen(model([ids], state))
    return perf_counter() - begin, state


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
    """Wait for the logits, where they are on another device, as who picks a token from them does."""
    if logits is not None and not logits.is_cpu:
        logits.argmax().item()


def _ids(model: Model, count: int) -> list[int]:
    """Tokens from all over the vocabulary, the same at each call."""
    return [7919 * (index + 1) % model.config.vocab_size for index in range(count)]
