"""The command `lmstate`. Nothing here imports torch before a command needs it: `lmstate --help` answers at once."""

from __future__ import annotations


def main() -> None:
    """The entry point. Exit codes: 0 done, 1 could not be done, 2 wrong usage, 130 stopped with Ctrl-C."""
    from lmstate.cli.app import app

    app(prog_name="lmstate")


__all__ = ["main"]
