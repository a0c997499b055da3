"""The progress of a conversion, on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class ConversionBar:
    """Shows on a terminal that tensors are being converted; a start from the cache shows none."""

    def __init__(self, wanted: bool, total: int, doing: str = "converting weights") -> None:
        self._doing = doing
        self._wanted = wanted and sys.stderr.isatty()
        self._total = total
        self._progress: Progress | None = None

    def advance(self, tensors: int) -> None:
        if not self._wanted:
            return
        if self._progress is None:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.start()
            self._progress.add_task(self._doing, total=self._total)
        self._progress.advance(self._progress.task_ids[0], tensors)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
