"""Compiles grammars of clients in helper processes first, which end where one takes too much time or memory."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

HELPER = Path(__file__).with_name("compile_helper.py")
HELPERS = 2  # at a time: more requests wait
MEMORY, SECONDS = 2**29, 3  # of one grammar
PATIENCE = 30.0  # seconds of wall time, on a busy machine
KNOWN = 4096  # grammars that are known to be harmless
# Harmless without a trial: grammars of our own around schemas without keywords that multiply.
PLAIN_LENGTH = 2**15
MULTIPLIES = re.compile(
    r"%lark|%regex|\"(pattern|patternProperties|allOf|oneOf|not|if|\$ref|(min|max)(Items|Length|Properties))\"\s*:"
)


class TooCostly(Exception):
    """Raised for a grammar that takes more than a helper may."""


class CompileCheck:
    """Tries grammars. For one event loop."""

    def __init__(self, tokenizer: Callable[[], dict[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._idle: list[asyncio.subprocess.Process] = []
        self._slots = asyncio.Semaphore(HELPERS)
        self._harmless: dict[bytes, None] = {}

    async def check(self, lark: str, own: bool) -> None:
        """Raise `TooCostly` for a grammar that must not be compiled here. Cancelling it ends the trial.

        `own`: nothing of it is written by the client but JSON schemas.
        """
        if own and len(lark) <= PLAIN_LENGTH and not MULTIPLIES.search(lark):
            return
        key = sha256(lark.encode()).digest()
        if key in self._harmless:
            return
        async with self._slots:
            helper = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._tried(helper, lark)
            except (TimeoutError, OSError) as error:
                await self._end(helper)
                raise TooCostly from error
            except BaseException:
                await self._end(helper)
                raise
            self._idle.append(helper)
        self._harmless[key] = None
        if len(self._harmless) > KNOWN:
            del self._harmless[next(iter(self._harmless))]

    async def _start(self) -> asyncio.subprocess.Process:
        helper = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(HELPER),
            str(MEMORY),
            str(SECONDS),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await self._write(helper, await asyncio.to_thread(self._tokenizer))
        return helper

    async def _write(self, helper: asyncio.subprocess.Process, value: Any) -> None:
        assert helper.stdin is not None
        helper.stdin.write(json.dumps(value).encode() + b"\n")
        await helper.stdin.drain()

    async def _tried(self, helper: asyncio.subprocess.Process, lark: str) -> None:
        """Wait for a helper's answer. An error in a grammar does not count as cost: its compilation finds it again."""
        assert helper.stdout is not None
        await self._write(helper, lark)
        if not await helper.stdout.readline():
            raise OSError("the helper ended")

    async def _end(self, helper: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            helper.kill()
        await helper.wait()

    async def close(self) -> None:
        for helper in self._idle:
            await self._end(helper)
        self._idle.clear()
