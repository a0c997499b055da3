"""Errors of the protocols: one exception, and the body and status that each protocol has for it."""

from __future__ import annotations

import errno
import sqlite3
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from lmstate.errors import CapacityError, GrammarError, ModelError, RanksError, StateError
from lmstate.serve.wire.tenants import caller

# Status -> the `type` of the error object, in OpenAI's and in Anthropic's words.
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {**OPENAI_TYPES, 413: "request_too_large", 529: "overloaded_error"}

current_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that is being answered; empty outside of one."""


@dataclass
class ApiError(Exception):
    """A request that gets an error for an answer.

    `param` names the field at fault, `code` is a word that programs look for (`context_length_exceeded`),
    `retry_after` is in seconds, `details` is for Anthropic's clients, `generation` that of a session that
    another process changed.
    """

    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    details: dict[str, Any] | None = None
    generation: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def told(self) -> str:
        """The message for the client: names in it as the client gave them."""
        return caller().told(self.message)

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def openai(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`"""
        kind = OPENAI_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.told, "type": kind, "param": self.param, "code": self.code}
        return {"error": error if self.generation is None else {**error, "generation": self.generation}}

    def anthropic(self) -> dict[str, Any]:
        """`{"type": "error", "error": {"type", "message", "details"}, "request_id"}`"""
        kind = ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        error = {"type": kind, "message": self.told, "details": self.details}
        return {"type": "error", "error": error, "request_id": current_id.get()}

    def body(self, path: str) -> dict[str, Any]:
        """The JSON body of an error, by the protocol that `path` belongs to."""
        if is_ollama(path):
            return {"error": self.told}
        return self.anthropic() if is_anthropic(path) else self.openai()


def is_anthropic(path: str) -> bool:
    return path.removeprefix("/v1").startswith("/messages")


def is_ollama(path: str) -> bool:
    return path.startswith("/api/")


def as_api_error(error: Exception) -> ApiError:
    """A failure of the engine or the model as the client is told of it; others are a 500 that tells nothing."""
    from lmstate.engine import Drained, EngineClosed, QueueFull, SessionBusy, SessionMoved, StoreUnreachable
    from lmstate.engine.results import NoReplica

    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        message = "as many requests wait as this server holds (--queue): try again in a moment"
        return ApiError(message, 429, code="queue_full", retry_after=1)
    if isinstance(error, NoReplica):
        return ApiError(str(error), 503, code="no_replica", retry_after=5)
    if isinstance(error, RanksError):
        return ApiError("a process of the model has ended: the server ends too", 503, code="model_lost", retry_after=5)
    if isinstance(error, EngineClosed | Drained):
        return ApiError("the server is shutting down", 503, code="shutting_down", retry_after=5)
    if isinstance(error, StoreUnreachable) and not _disk_is_full(error.__cause__):
        return ApiError(str(error), 503, code="store_unreachable", retry_after=2)
    if isinstance(error, SessionMoved):
        return ApiError(str(error), 409, code="session_moved", generation=error.generation)
    if isinstance(error, SessionBusy):
        return ApiError(str(error), 409, code="session_busy")
    if isinstance(error, CapacityError):
        return ApiError(str(error), 400, code="context_length_exceeded")
    if isinstance(error, GrammarError):
        return ApiError(str(error), param=error.param, code="unsupported_grammar")
    if isinstance(error, StateError | ModelError):
        return ApiError(str(error), 400)
    if _disk_is_full(error) or _disk_is_full(error.__cause__):
        return ApiError("the server's disk is full: nothing more can be stored there", 507, code="insufficient_storage")
    if isinstance(error, sqlite3.Error) and _code(error) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        message = "another process holds the server's database; nothing was changed: try again"
        return ApiError(message, 503, code="store_unreachable", retry_after=2)
    return ApiError("the server failed to answer; its log says why", 500, code="internal_error")


def _disk_is_full(error: BaseException | None) -> bool:
    if isinstance(error, sqlite3.Error):
        return _code(error) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _code(error: sqlite3.Error) -> int:
    """SQLite's own code; 0 for an error that is not of SQLite itself."""
    return int(getattr(error, "sqlite_errorcode", 0))
