"""Routes of the server as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmstate.serve.answer.handlers import Handler


@dataclass(frozen=True)
class Path:
    """A route: also under `/v1`, or without it, where clients look for it there (`both`). `body` is the struct that the
    handler gets its body as, after a service and the request; `form`: it is read from a form with a file, not from
    JSON. A handler of the `whole` server gets the pool of models
    instead of a service. `streams`: a body with `stream` is answered by server-sent events. `watches`: a stream that
    neither loads a model nor keeps it loaded.
    """

    method: str
    path: str
    handler: Handler
    both: bool = True
    summary: str = ""
    body: type[Any] | None = None
    form: bool = False
    whole: bool = False
    streams: bool = False
    watches: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        other = self.path.removeprefix("/v1") if self.path.startswith("/v1/") else "/v1" + self.path
        return (self.path, other) if self.both else (self.path,)
