"""Output of the program: answers and tables to stdout, everything about them to stderr."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from lmstate.generation import Report


DEBUG = "LMSTATE_DEBUG"  # set to anything: errors show their traceback
COLLECTED = gc.get_threshold()
CLEAR = "\r\033[K"  # of a terminal's line: a progress that was cut short may be there


def import_library() -> None:
    """Import torch and what loads models. From here on Ctrl-C raises KeyboardInterrupt, where it ended the program
    (`cli.main`), and garbage is collected, of what is made from here on."""
    import lmstate.loading  # noqa: F401

    if gc.get_threshold() != COLLECTED:  # once: garbage of a later moment is not to last
        gc.freeze()
        gc.set_threshold(*COLLECTED)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupt:
    """While entered, Ctrl-C asks instead of striking: `asked` turns true, and the loop stops after its step.

    A second Ctrl-C raises KeyboardInterrupt where the program stands, and `check` does where a long prompt, which is
    one step, may stop: that step then never happened.
    """

    entered: ClassVar[Interrupt | None] = None

    @classmethod
    def check(cls) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if cls.entered is not None and cls.entered.asked:
            raise KeyboardInterrupt

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        Interrupt.entered = self
        return self

    def __exit__(self, *exception: object) -> None:
        Interrupt.entered = None
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def write_pieces(pieces: Iterator[str], stop: Callable[[], None] | None = None) -> bool:
    """Write text to stdout as it comes, and end the line. Returns whether Ctrl-C stopped it.

    `stop`: ends the pieces, those that there are by then are written; None: the rest is not read.
    """
    last = "\n"
    with Interrupt() as interrupt:
        try:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
                last = piece
                if interrupt.asked:
                    if stop is None:
                        break
                    stop()
        finally:
            if not last.endswith("\n"):
                sys.stdout.write("\n")
                sys.stdout.flush()
    return interrupt.asked


def collect(pieces: Iterator[str]) -> bool:
    """Let text come without writing it. Returns whether Ctrl-C stopped it."""
    with Interrupt() as interrupt:
        for _ in pieces:
            if interrupt.asked:
                break
    return interrupt.asked


def note(text: str) -> None:
    """A line about the answer, not of it: to stderr, dim on a terminal."""
    if sys.stderr.isatty():
        text = f"{CLEAR}\033[2m{text}\033[0m"
    print(text, file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """An error as a line for a reader of the program; one of a file begins with the file."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}"
    return text or f"{type(error).__name__} (set {DEBUG}=1 for the traceback)"


def describe(report: Report) -> str:
    """Tokens fed, reused and generated, and how fast, in one line."""
    parts = [f"{report.fed} tokens fed", f"{report.reused} reused", f"{report.generated} generated"]
    if report.prefill_seconds:
        parts.append(f"first after {report.prefill_seconds:.2f} s")
    if report.tokens_per_second:
        parts.append(f"then {report.tokens_per_second:.1f} tokens/s")
    if report.draft.drafted:
        parts.append(f"{report.draft.accepted} of {report.draft.drafted} drafted tokens held")
    if report.finished[0] == "length":
        parts.append("stopped at --max-tokens")
    return "[" + " · ".join(parts) + "]"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table: drawn on a terminal, columns of plain text with two spaces between them elsewhere."""
    cells = [list(row) for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        drawn = Table(title=title, title_justify="left", show_header=any(columns))
        for index, column in enumerate(columns):
            drawn.add_column(column, style="bold" if index == 0 else "", overflow="fold")
        for row in cells:
            drawn.add_row(*map(escape, row))
        Console().print(drawn)
        return
    print(title)
    shown = ([list(columns)] if any(columns) else []) + cells
    widths = [max((len(row[index]) for row in shown), default=0) for index in range(len(columns))]
    for row in shown:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def size(count: float) -> str:
    """Bytes for a reader: 512 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
