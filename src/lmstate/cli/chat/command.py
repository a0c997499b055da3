"""`lmstate chat`: a conversation on a session of an engine."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from lmstate.cli import options
from lmstate.cli.chat.input import as_text, forget_typed_ahead, marked_pastes, quoted, read
from lmstate.cli.output import describe, note, one_line, write_pieces

if TYPE_CHECKING:
    from lmstate.cli.chat.conversation import ChatConversation


def chat(
    model: options.ModelName = options.DEFAULT_MODEL,
    system: options.System = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.Penalty = None,
    seed: options.Seed = None,
    weights: options.Weights = options.WeightKind.auto,
    activations: options.Activations = options.ActivationBits.auto,
    ctx_size: options.ContextSize = None,
    threads: options.Threads = None,
    device: options.Device = None,
    parallel: options.Parallel = 1,
    parallel_mode: options.ParallelMode = options.ParallelModes.exact,
    transcript: Annotated[
        bool, typer.Option("--transcript", help="Also write piped questions and commands to stdout, each after `> `.")
    ] = False,
    draft: options.Draft = "auto",
    adapter: options.Adapter = None,
    mmproj: options.Mmproj = None,
    kv_bits: options.KVBits = None,
    carries: options.Carries = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats/--no-stats", help="After each answer, print the tokens computed and reused, and the speed."
        ),
    ] = True,
) -> None:
    """Chat with a model. Its state is kept between turns, so each turn computes only what is new.

    Ctrl-C stops the answer and keeps the conversation; /help lists the commands; Tab completes them; Ctrl-D leaves.
    Questions can be piped in, one per line; the exit code is then 1 if a question or a command failed. A backslash at
    the end of a line continues the message on the next line, and \"\"\" begins and ends a message of several lines.

    \b
    Examples:
      lmstate chat smollm2
      lmstate chat smollm2 --system "You answer in one sentence." -t 0.7
      lmstate chat smollm2 --transcript < questions.txt > talk.txt
    """
    options.refuse_unknown(model, threads, draft)
    system = None if system is None else as_text(system, "--system")
    from lmstate.cli.chat.conversation import ChatConversation

    sampling = options.SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    kv = options.kv_storage(kv_bits)
    loaded = options.load_model(
        model, weights, threads, adapter, draft, device, activations, ctx_size, parallel, parallel_mode,
        mmproj,
    )  # fmt: skip
    if not loaded.tokenizer.has_chat_template:
        raise ValueError(f"{model} has no chat template; use `lmstate generate {model} --raw` to continue a text")
    typed_in = sys.stdin.isatty()
    if typed_in:
        note(f"{model}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    drafter = options.load_drafter(draft, device)
    conversation = ChatConversation(
        loaded,
        system,
        sampler=sampling.of(loaded),
        max_new_tokens=max_tokens,
        draft=drafter,
        kv=kv,
        carries=options.carry_bits(carries),
    )
    with closing(conversation), marked_pastes():
        failed = talk(conversation, stats, transcript and not typed_in)
    if failed and not typed_in:
        note(f"lmstate: {failed} of the questions and commands failed")
        raise typer.Exit(1)


def talk(conversation: ChatConversation, stats: bool, transcript: bool = False) -> int:
    """Read, answer, repeat, until the input ends or /exit. Errors of a turn are told, and the conversation goes on.

    Returns how many turns failed. `transcript`: what is read is written too.
    """
    from lmstate.cli.chat.slash_commands import COMMANDS, AskQuestion, ExitChat, complete, run_command

    failed = 0
    while (typed := read(lambda begun: complete(begun, COMMANDS, conversation))) is not None:
        if not typed.text.strip():
            continue
        if transcript:
            print(quoted(typed.text), flush=True)
        try:
            try:
                if typed.command:
                    print(run_command(typed.text, COMMANDS, conversation))
                else:
                    answer(conversation, typed.text, stats)
            except AskQuestion as edited:
                answer(conversation, edited.question, stats, instead=True)
        except ExitChat:
            break
        except BrokenPipeError:  # the reader has closed the pipe
            raise
        except (ValueError, OSError) as error:
            failed += 1
            note(f"lmstate: {one_line(error)}")
    return failed


def answer(conversation: ChatConversation, question: str, stats: bool, instead: bool = False) -> None:
    """One turn: the answer to stdout as it comes, then what it took. `instead`: of the last turn."""
    ask = conversation.edit if instead else conversation.ask
    try:
        with closing(ask(as_text(question, "the question"))) as pieces:
            stopped = write_pieces(pieces, conversation.stop)
    except KeyboardInterrupt:  # the model was in the middle of a step, which then never happened: nor do its numbers
        stopped, stats = True, False
    if stopped:
        forget_typed_ahead()
        note("(stopped)")
    if stats and conversation.report is not None:
        note(describe(conversation.report))
