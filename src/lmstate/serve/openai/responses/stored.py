"""`/v1/responses/{id}`: responses that were stored, or are made in the background."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve.answer.handlers import json_response
from lmstate.serve.answer.service import Service
from lmstate.serve.openai.responses import items
from lmstate.serve.openai.responses.background import BackgroundResponse
from lmstate.serve.openai.responses.kept import KeptResponses, kept_responses
from lmstate.serve.openai.responses.store import StoredResponse
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.sse import EventStream, comment


async def _stored(request: Request) -> StoredResponse:
    id = request.path_params["id"]
    stored = await asyncio.to_thread(kept_responses(request).responses.get, id)
    if stored is None:
        raise ApiError(f"the response {id[:100]!r} is not stored here (any more)", 404)
    return stored


def _shown(kept: KeptResponses, stored: StoredResponse) -> dict[str, Any]:
    """A stored response; one that runs in the background as it stands."""
    if (live := kept.background.running(stored.id)) is not None:
        return live.shown()
    if not stored.ended and not kept.made_elsewhere(stored):
        error = {"code": "server_error", "message": "the server was restarted before the response was complete"}
        return {**stored.body, "status": "failed", "error": error}
    return stored.body


def followed(
    service: Service, live: BackgroundResponse, ping: Callable[[], str] = lambda: "ping", after: int = -1
) -> EventStream:
    """The events of a response that goes on when the client leaves."""
    settings = service.settings
    events = live.follow(after)
    return EventStream(events, lambda: comment(ping()), settings.ping_interval, settings.write_timeout, {})


async def get_response(service: Service, request: Request) -> ASGIApp:
    """With `?stream=true` the events from after number `starting_after`, of one that was made in the background."""
    stored, query = await _stored(request), request.query_params
    if query.get("stream") != "true":
        return json_response(_shown(kept_responses(request), stored))
    after = query.get("starting_after", "-1")
    if not re.fullmatch(r"-1|[0-9]{1,9}", after):
        raise ApiError(f"starting_after must be the number of an event; it is {after[:40]!r}", param="starting_after")
    live = kept_responses(request).background.get(stored.id)
    if live is None:
        raise ApiError("only the events of a recent response in the background are followed: ask without stream")
    return followed(service, live, after=int(after))


async def delete_response(service: Service, request: Request) -> ASGIApp:
    stored = await _stored(request)
    if (live := kept_responses(request).background.get(stored.id)) is not None:
        live.cancel()
        await live.ended()  # else it would be stored again
        kept_responses(request).background.drop(stored.id)
    await asyncio.to_thread(kept_responses(request).responses.delete, stored.id)
    return json_response({"id": stored.id, "object": "response", "deleted": True})


async def list_input(service: Service, request: Request) -> ASGIApp:
    return json_response(items.paged((await _stored(request)).input, request.query_params))


async def cancel_response(service: Service, request: Request) -> ASGIApp:
    stored = await _stored(request)
    if not stored.body["background"]:
        raise ApiError("only background responses are cancelled: close the stream of this one instead")
    if (live := kept_responses(request).background.running(stored.id)) is not None:
        live.cancel()
        await live.ended()
        stored = await _stored(request)
    elif kept_responses(request).made_elsewhere(stored):
        raise ApiError(f"the response {stored.id!r} is made by another server of this store: cancel it there", 409)
    return json_response(_shown(kept_responses(request), stored))
