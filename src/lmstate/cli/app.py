"""The commands, and what an error becomes: one line on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lmstate.cli import (
    bench,
    cache,
    cluster,
    convert,
    demo,
    doctor,
    embed,
    finetune,
    generate,
    inspect,
    local,
    models,
    perplexity,
    serve,
    trace,
)
from lmstate.cli.chat import command as chat
from lmstate.cli.output import DEBUG, one_line


class Commands(TyperGroup):
    """A group whose commands end in an exit code, never in a traceback, for what can go wrong in a sound program."""

    def invoke(self, ctx: Any) -> Any:
        shown = warnings.showwarning
        warnings.showwarning = _warn
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
            if isinstance(error, typer.Exit | typer.Abort):  # these are how typer itself ends a command
                raise
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                _forget_stdout()  # the reader of our output has left: nothing is wrong
                raise typer.Exit(0) from None
            if os.environ.get(DEBUG):
                raise
            print(f"lmstate: {one_line(error)}", file=sys.stderr)
            raise typer.Exit(1) from None
        finally:
            warnings.showwarning = shown


def _warn(message: Warning | str, *where: Any, **_: Any) -> None:
    """In place of `warnings.showwarning`: a line for a reader of the program, without a place in its source."""
    print(f"lmstate: {' '.join(str(message).split())}", file=sys.stderr)


def _forget_stdout() -> None:
    """Python flushes stdout as it exits; without this it would complain about a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version(wanted: bool) -> None:
    if wanted:
        from lmstate import __version__

        print(f"lmstate {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    name="lmstate",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run language models whose inference state is one value.

    MODEL is an alias (smollm2), a directory with config.json and safetensors, a .gguf file, or a Hugging Face Hub id.

    --install-completion installs shell completion for commands and options.

    \b
    Examples:
      lmstate generate smollm2 "Name three rivers."
      lmstate chat smollm2
      lmstate inspect smollm2
    """


app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("convert")(convert.convert)
app.command("finetune")(finetune.finetune)
app.command("inspect")(inspect.inspect)
app.command("bench")(bench.bench)
app.command("embed")(embed.embed)
app.command("perplexity")(perplexity.perplexity)
app.command("trace")(trace.trace)
app.command("models")(models.models)
app.command("doctor")(doctor.doctor)
app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
app.command("run")(local.run)
app.command("pull")(local.pull)
app.command("list")(local.list_)
app.command("show")(inspect.inspect)
app.command("ps")(local.ps)
app.command("rm")(local.rm)
app.add_typer(cache.cache, name="cache")
app.add_typer(cluster.cluster, name="cluster")
