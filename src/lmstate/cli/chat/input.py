"""Input of a chat: lines, and messages of several lines.

A line that ends in a backslash goes on in the next one. Lines between two times three double quotes are one message,
taken as they are: also where they look like a command. So are lines that are pasted.
"""

from __future__ import annotations

import re
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from lmstate.cli.output import note

PROMPT, MORE = "> ", "... "
QUOTES = '"""'
COMMAND = re.compile("/[a-z]+ ")  # begins a command whose argument has several lines, as no path does
PASTE_SECONDS = 0.02  # between two lines of a paste, at most, where the terminal does not mark it
MARK_PASTES, LEAVE_PASTES = "\033[?2004h", "\033[?2004l"  # "bracketed paste" of terminals


class Typed(NamedTuple):
    """A message, or a command with its argument."""

    text: str
    command: bool


Complete = Callable[[str], list[str]]
"""The beginning of a line -> the lines that it can become."""


def read(complete: Complete = lambda begun: []) -> Typed | None:
    """The next message; None at the end. Ctrl-C forgets what was begun and begins again, twice in a row leaves."""
    if not sys.stdin.isatty():
        return _message()
    marked = _edit_lines(complete)
    try:
        return _typed_message(marked)
    except KeyboardInterrupt:
        print()
        note("(Ctrl-C again or Ctrl-D leaves)")
    return _typed_message(marked)


def forget_typed_ahead() -> None:
    """Drop what was typed or pasted on the terminal and not read yet: Ctrl-C is meant for it too."""
    with suppress(ImportError, OSError, ValueError):  # not every platform has it, not every input is a terminal
        import termios

        with suppress(termios.error):
            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


@contextmanager
def marked_pastes() -> Iterator[None]:
    """While entered, the terminal marks what is pasted: also during an answer, when no line is edited."""
    try:
        yield
    finally:
        if sys.stdin.isatty():
            _tell_terminal(LEAVE_PASTES)


def as_text(given: str, what: str) -> str:
    """`given` itself. Raises ValueError if Python had to keep bytes in it that are not text."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is not UTF-8: invalid byte after {error.start} characters; convert it with iconv"
        ) from None
    return given


def quoted(text: str, prompt: str = PROMPT) -> str:
    """A message as it looks when it was typed: its lines after the prompts."""
    return prompt + text.encode(errors="replace").decode().replace("\n", f"\n{MORE}")


def _typed_message(marked: bool) -> Typed | None:
    try:
        return _message(marked)
    except KeyboardInterrupt:
        forget_typed_ahead()
        raise
    finally:
        if marked:  # again: readline does it for a line that it edits
            _tell_terminal(MARK_PASTES)


def _message(marked: bool = True) -> Typed | None:
    """`marked`: a paste comes as one line; else what follows at once belongs to it."""
    line = _line(PROMPT)
    if line is None:
        return None
    while not marked and select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
        more = _line(MORE)
        if more is None:
            break
        line += f"\n{more}"
    line = line.strip()
    if line.startswith(QUOTES):
        return Typed(_block(line.removeprefix(QUOTES)), command=False)
    if "\n" in line:
        return Typed(line, command=COMMAND.match(line) is not None)
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


def _tell_terminal(sequence: str) -> None:
    if sys.stdout.isatty():
        print(sequence, end="", flush=True)


def _edit_lines(complete: Complete) -> bool:
    """Arrow keys, history and Tab in `input`, where the platform has them. Returns whether it knows marked pastes."""
    with suppress(ImportError):
        import readline

        readline.set_completer_delims("")  # a whole line is completed, not its last word
        readline.set_completer(lambda begun, index: dict(enumerate(complete(begun))).get(index))
        # macOS has libedit in the place of GNU readline, with other words for the same.
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")
        return not libedit
    return False
