"""`lmstate finetune`: train an adapter, or the whole model, on a file of documents."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmstate.cli import options
from lmstate.cli.adapter_kinds import AdapterKind, adapter_config, refuse_options
from lmstate.cli.output import Interrupt, import_library, note

if TYPE_CHECKING:
    from lmstate.training.finetune import FineTuning, TrainingReport


def finetune(
    model: options.ModelName,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA.jsonl", help="Training data: JSON lines, or a .txt or .md file.", exists=True, dir_okay=False
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Folder for the adapter or model and its checkpoints.",
            file_okay=False,
        ),
    ],
    full: Annotated[bool, typer.Option("--full", help="Train every weight instead of an adapter.")] = False,
    adapter: Annotated[
        AdapterKind | None, typer.Option("--adapter", help="Kind of adapter. Default: lora.", show_default=False)
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=1, help="Rank of lora, loha and lokr. Default: 8.")] = None,
    alpha: Annotated[
        float | None, typer.Option("--alpha", help="The update is multiplied by alpha / rank. Default: 16.")
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            "--targets",
            help="Modules to adapt, separated by commas, or all-linear. Default: all-linear, for ia3 its own.",
        ),
    ] = None,
    positions: Annotated[
        int | None,
        typer.Option(
            "--positions", min=1, help="Learned positions. Default: 20 for prompt and prefix, 10 for adaption-prompt."
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", min=1, help="Give an adaption-prompt to this many last layers. Default: all."),
    ] = None,
    rslora: Annotated[bool, typer.Option("--rslora", help="Multiply by alpha / sqrt(rank) instead.")] = False,
    dora: Annotated[bool, typer.Option("--dora", help="Train magnitude and direction separately (DoRA).")] = False,
    epochs: Annotated[float, typer.Option("--epochs", help="Passes over the documents; --steps overrides it.")] = 1.0,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Number of optimizer steps.")] = None,
    rate: Annotated[float, typer.Option("--lr", min=0.0, help="Peak learning rate.")] = 2e-4,
    warmup: Annotated[
        float, typer.Option("--warmup", min=0.0, max=1.0, help="Share of the steps over which the learning rate rises.")
    ] = 0.03,
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0.0, help="Weight decay of AdamW.")] = 0.0,
    clip: Annotated[
        float, typer.Option("--clip", min=0.0, help="Clip the norm of the gradients to this; 0: no clipping.")
    ] = 1.0,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=1, help="Tokens per batch, with padding.")] = 4096,
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="Batches per optimizer step.")] = 1,
    chunk: Annotated[int, typer.Option("--chunk", min=1, help="Tokens of a row that are computed at once.")] = 512,
    checkpoint_layers: Annotated[
        bool,
        typer.Option(
            "--checkpoint-layers", help="Compute each layer again in the backward pass: less memory, more time."
        ),
    ] = False,
    evaluate: Annotated[
        float, typer.Option("--eval-split", min=0.0, max=0.9, help="Share of the documents to evaluate on.")
    ] = 0.0,
    evaluate_every: Annotated[
        int, typer.Option("--eval-every", min=0, help="Steps between evaluations; 0: only at the end.")
    ] = 0,
    save_every: Annotated[
        int, typer.Option("--save-every", min=0, help="Steps between checkpoints; 0: only at the end.")
    ] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Seed for the order of the documents and a new adapter.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the checkpoint in FOLDER, with the same bits.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Write into FOLDER even if it has other files.")] = False,
    weights: options.Weights = options.WeightKind.auto,
    threads: Annotated[
        str | None, typer.Option("--threads", metavar="N|auto", help="Number of threads. Default: torch's.")
    ] = None,
    device: options.Device = None,
) -> None:
    """Train a LoRA or other adapter, or the whole model.

    lora, loha, lokr and ia3 change matrices. prompt and prefix learn positions before every text. adaption-prompt is
    LLaMA-Adapter.

    A line of DATA.jsonl is {"messages": [...]} (and "tools"), {"prompt": ..., "completion": ...}, {"text": ...}, or a
    line of ShareGPT or Alpaca. Of messages, the assistant's answers are learned. A .txt file is one document. Long
    documents are computed in chunks, with the same gradients. Ctrl-C writes a checkpoint, and --resume continues from
    it. The adapter in FOLDER is that of the newest checkpoint.

    \b
    Examples:
      lmstate finetune smollm2 notes.jsonl -o notes --epochs 3
      lmstate finetune smollm2 notes.jsonl -o prompt --adapter prompt --positions 30 --lr 0.03
      lmstate generate smollm2 "What did I note?" --adapter notes
    """
    # All that can be refused without the model is refused before it, and torch, are loaded for nothing.
    options.refuse_unknown(model, threads)
    if steps is None and not 0 < epochs < math.inf:
        raise typer.BadParameter(f"--epochs {epochs:g} was asked for; give a number above 0, or --steps")
    options_of = {
        "rank": rank, "alpha": alpha, "targets": targets, "rslora": rslora or None, "dora": dora or None,
        "positions": positions, "layers": layers,
    }  # fmt: skip
    given = {name: value for name, value in options_of.items() if value is not None}
    refuse_options(adapter, full, given)
    if evaluate_every and not evaluate:
        raise typer.BadParameter("--eval-every needs documents to evaluate on; give --eval-split too")
    import torch

    import lmstate
    from lmstate.training import ParameterModel
    from lmstate.training.documents import batches, read_entries, split, tokenize
    from lmstate.training.finetune import FinetuneSettings, FineTuning, locked, refuse_begun, refuse_used

    import_library()
    refuse_begun(out, resume)
    if not (resume or force):
        refuse_used(out)
    if threads is not None:  # not measured else: to go on from a checkpoint to the bit takes as many as before
        options.set_threads(threads)
    entries = read_entries(data)
    torch.manual_seed(seed)
    trained_part = True if full else adapter_config(adapter, given)
    loaded = lmstate.load(model, weights=weights.value, device=device, trainable=trained_part)
    assert isinstance(loaded, ParameterModel)
    empty: list[str] = []
    documents = tokenize(entries, loaded.tokenizer, min(loaded.eos_ids, default=None), empty.append)
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        note(f"left out, since there is no answer in it to learn: {empty[0]}{more}")
    trained, evaluated = split(documents, evaluate, seed)
    if steps is None:
        passes = sum(1 for _ in batches(trained, batch_tokens, None))
        steps = math.ceil(epochs * passes / accumulate)
    settings = FinetuneSettings(
        steps=steps, rate=rate, warmup=round(warmup * steps), weight_decay=weight_decay, clip=clip,
        batch_tokens=batch_tokens, accumulate=accumulate, chunk=chunk, checkpoint_layers=checkpoint_layers, seed=seed,
    )  # fmt: skip
    with locked(out):
        training = FineTuning(loaded, trained, settings, out, evaluated, resume)
        if resume and not training.step:
            note(f"{out} holds no checkpoint: training from the start")
        finished = _told(training, save_every, evaluate_every)
    if not finished:
        note(f"stopped after step {training.step}; --resume continues from there")
        raise typer.Exit(130)
    note(f"saved in {out}")


def _told(training: FineTuning, save_every: int, evaluate_every: int) -> bool:
    """Run a training, telling what it trains, and draw its losses. Returns whether all steps were made."""
    from lmstate.training.finetune import LOG, plot

    trained, evaluated, steps = training.documents, training.evaluated, training.settings.steps
    count = sum(leaf.numel() for leaf in training.parameters.values())
    note(
        f"{count:,} parameters, {len(trained)} documents of {sum(len(each.tokens) for each in trained):,} tokens "
        f"({len(evaluated)} to evaluate on), {steps - training.step} of {steps} steps to make"
    )
    finished = _run(training, save_every, evaluate_every)
    try:
        plot(training.folder / LOG, training.folder / "loss.png")
    except ImportError:
        note("no loss.png was drawn: that needs matplotlib (pip install lmstate[train])")
    return finished


def _run(training: FineTuning, save_every: int, evaluate_every: int) -> bool:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[seen]}")
    console = Console(stderr=True)
    with Interrupt() as interrupt, Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=training.settings.steps, completed=training.step, seen="")
        began = time.perf_counter()

        def show(report: TrainingReport) -> None:
            nonlocal began
            now = time.perf_counter()
            seen = f"loss {report.loss:.4f}, {report.tokens / (now - began):,.0f} tokens/s"
            began = now
            progress.update(task, completed=report.step, seen=seen)
            if report.evaluated is not None or not sys.stderr.isatty():
                held = "" if report.evaluated is None else f", evaluation {report.evaluated:.4f}"
                progress.console.print(f"step {report.step}: {seen}{held}")

        return training.run(show, save_every, evaluate_every, lambda: interrupt.asked)
