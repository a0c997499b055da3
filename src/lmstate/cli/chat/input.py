"""Input of a chat: lines, and messages of several lines.

A line that ends in a backslash goes on in the next one. Lines between two times three double quotes are one message,
taken as they are: also where they look like a command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from lmstate.cli.output import note

PROMPT, MORE = "> ", "... "
QUOTES = '"""'


class Typed(NamedTuple):
    """A message, or a command with its argument."""

    text: str
    command: bool


Complete = Callable[[str], list[str]]
"""The beginning of a line -> the lines that it can become."""


def read(complete: Complete = lambda begun: []) -> Typed | None:
    """The next message; None at the end. Ctrl-C forgets what was begun and begins anew, twice in a row leaves."""
    if not sys.stdin.isatty():
        return _message()
    _edit_lines(complete)
    try:
        return _message()
    except KeyboardInterrupt:
        print()
        note("(Ctrl-C again or Ctrl-D leaves)")
    return _message()


def as_text(given: str, what: str) -> str:
    """`given` itself. Raises ValueError if Python had to keep bytes in it that are no text."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is not UTF-8: after {error.start} characters comes a byte that is no text; convert it with iconv"
        ) from None
    return given


def _message() -> Typed | None:
    line = _line(PROMPT)
    if line is None:
        return None
    line = line.strip()
    if line.startswith(QUOTES):
        return Typed(_block(line.removeprefix(QUOTES)), command=False)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        more = _line(MORE)
        if more is None:
            break
        lines.append(more.rstrip())
    text = "\n".join(lines).strip()
    return Typed(text, command=text.startswith("/"))


def _block(line: str) -> str:
    """Text after the opening quotes, up to the closing ones (or the end of the input)."""
    lines = [line]
    while not lines[-1].rstrip().endswith(QUOTES):
        more = _line(MORE)
        if more is None:
            break
        lines.append(more)
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


def _line(prompt: str) -> str | None:
    """A line without its end; None at the end of the input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


def _edit_lines(complete: Complete) -> None:
    """Arrow keys, history and Tab in `input`, where the platform has them."""
    with suppress(ImportError):
        import readline

        readline.set_completer_delims("")  # a whole line is completed, not its last word
        readline.set_completer(lambda begun, index: dict(enumerate(complete(begun))).get(index))
        # macOS has libedit in the place of GNU readline, with other words for the same.
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
