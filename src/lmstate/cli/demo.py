"""`lmstate demo`: a question, and a second one on the same state. `make demo` runs it."""

from __future__ import annotations

import typer

from lmstate.cli import options
from lmstate.cli.output import describe, note, write_pieces

QUESTIONS = ("Name the capital of France.", "Which river flows through it?")


def demo(
    model: options.ModelName = options.DEFAULT_MODEL,
    max_tokens: options.MaxTokens = 64,
    threads: options.Threads = None,
) -> None:
    """Ask two questions on one state.

    The second continues from the state of the first and computes only what is new.

    \b
    Examples:
      lmstate demo
      lmstate demo path/to/model.gguf
    """
    from contextlib import closing

    options.refuse_unknown(model, threads)
    from lmstate.cli.chat.conversation import ChatConversation

    conversation = ChatConversation(options.load_model(model, threads=threads), max_new_tokens=max_tokens)
    for question in QUESTIONS:
        print(f"> {question}")
        with closing(conversation.ask(question)) as pieces:
            stopped = write_pieces(pieces, conversation.stop)
        if conversation.report is not None:
            note(describe(conversation.report))
        if stopped:
            raise typer.Exit(130)
    print(f"The state holds {conversation.held} tokens: both questions and both answers.")
