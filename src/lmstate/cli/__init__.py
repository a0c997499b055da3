"""The command `lmstate`. Nothing here imports torch before a command needs it: `lmstate --help` answers at once."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys

UNCOLLECTED = 10**6  # objects that importing torch makes at most


def main() -> None:
    """The entry point. Exit codes: 0 done, 1 could not be done, 2 wrong usage, 130 stopped with Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until a model is loaded there is nothing to undo, and of the modules that are imported some show a
        # KeyboardInterrupt as a traceback, and some lose it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lmstate.cli.output import DEBUG  # first: it notes the usual threshold

    # Imported objects last. Searching them for garbage, again and again as they grow and once more at the end, takes a
    # third of a second. `output.import_library` goes back to the usual threshold.
    gc.set_threshold(UNCOLLECTED)
    atexit.register(gc.freeze)
    from lmstate.cli.app import app

    _open_streams()
    try:
        app(prog_name="lmstate")
    except OSError as error:  # of a page of help: those of commands are told where they run
        if os.environ.get(DEBUG):
            raise
        sys.exit(f"lmstate: {error.strerror or error}")


def _open_streams() -> None:
    """Put something in the place of standard streams that the caller closed, which Python gives as None.

    Bytes of the input that are not text are kept apart, whatever the locale: `reading.as_text` tells of them.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the program runs
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.exit("lmstate: standard output is closed, and the answer goes there; to drop it, use >/dev/null")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


__all__ = ["main"]
