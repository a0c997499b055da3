"""`/v1/replicas`: the engines behind the server, and draining one of them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.engine.results import ReplicaStatus
from lmstate.serve.answer.handlers import json_response
from lmstate.serve.answer.service import Service
from lmstate.serve.sessions import done
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.schema.sessions import DrainBody
from lmstate.serve.wire.tenants import Tenant, caller


async def list_replicas(service: Service, request: Request) -> ASGIApp:
    """List the replicas. With `session=NAME`, also the rank of the one that the caller's session was last at."""
    told: dict[str, Any] = {"object": "list", "data": await asyncio.to_thread(statuses, service)}
    if (name := request.query_params.get("session")) is not None:
        owner = caller()
        rank = await done(lambda: service.engine.session_rank(owner.stored(name), owner.salt()))
        told["session"] = {"name": name, "rank": rank}
    return json_response(told)


async def drain(service: Service, request: Request, body: DrainBody) -> ASGIApp:
    """Drain the replica of a `rank`: its answers end within `seconds`, or go on elsewhere."""
    refuse_others(service)
    stored = await done(lambda: service.engine.drain_rank(body.rank, body.seconds))
    return json_response({"object": "replica.drained", "rank": body.rank, "stored": stored})


def refuse_others(service: Service) -> None:
    """Raise `ApiError` for a caller that does not run the server: with several API keys the first one does."""
    settings = service.settings
    operator = Tenant.of(settings.api_keys[0].encode()) if settings.has_owners else caller()
    if caller() != operator or (not settings.api_keys and not settings.on_loopback):
        raise ApiError("draining is for the one who runs the server, by the first of its API keys", 403)


def statuses(service: Service) -> list[dict[str, Any]]:
    return [shown(status) for status in service.engine.replica_statuses()]


def shown(status: ReplicaStatus) -> dict[str, Any]:
    told = asdict(status)
    return {"object": "replica", **told.pop("load"), **told}
