"""`lmstate generate`: one answer, streamed to stdout."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from lmstate.cli import options
from lmstate.cli.chat.input import as_text
from lmstate.cli.output import describe, note, write_pieces

if TYPE_CHECKING:
    from lmstate.models.model import Model


def generate(
    model: options.ModelName,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text; from stdin if `-`, or if absent and piped in.")
    ] = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.Penalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    system: options.System = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="As a question in the model's chat template, or as text to go on with."),
    ] = None,
    weights: options.Weights = options.WeightKind.auto,
    draft: options.Draft = "auto",
    adapter: options.Adapter = None,
    stats: Annotated[
        bool | None, typer.Option("--stats/--no-stats", help="Counts and speed on stderr (if it is a terminal).")
    ] = None,
) -> None:
    """Answer a prompt, or go on with a text.

    The prompt is put in the model's chat template if it has one, as llama.cpp and mlx-lm do; --raw feeds it as it is.
    Only the answer goes to stdout. Of a prompt from stdin, one newline at the end is dropped.

    \b
    Examples:
      lmstate generate smollm2 "Name three rivers."
      lmstate generate smollm2 --raw "Once upon a time" -n 100 -t 0.8 --seed 1
      git diff | lmstate generate smollm2 --system "Summarise this change." > summary.txt
    """
    from lmstate.cli.progress import warn_of_length
    from lmstate.generation import Generation
    from lmstate.generation.stopping import as_stops

    text = as_text(_prompt(prompt), "the prompt")
    system = None if system is None else as_text(system, "--system")
    if chat is False and system is not None:
        raise typer.BadParameter("--system needs the chat template; it does not go with --raw")
    with options.usage():
        stops = as_stops(stop or ())
    sampling = options.Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    loaded = options.load_model(model, weights, adapter)
    ids = _encode(loaded, text, chat, system)
    warn_of_length(loaded, 0, len(ids))
    drafter = options.load_drafter(draft)
    generation = Generation(
        loaded, [ids], sampler=sampling.of(loaded), max_new_tokens=max_tokens, stop=stops, draft=drafter
    )
    stopped = write_pieces(piece.text for piece in generation)
    if sys.stderr.isatty() if stats is None else stats:
        note(describe(generation.report()))
    if stopped:
        raise typer.Exit(130)


def _prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise typer.BadParameter("give a PROMPT, or pipe one in")
    return sys.stdin.read().removesuffix("\n")


def _encode(model: Model, text: str, chat: bool | None, system: str | None) -> list[int]:
    tokenizer = model.tokenizer
    if chat is None:
        chat = tokenizer.has_chat_template
        if not chat and system is not None:
            raise ValueError("--system was given, but the model has no chat template to put it in")
    if not chat:
        return tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return tokenizer.chat([*messages, {"role": "user", "content": text}], add_generation_prompt=True)
