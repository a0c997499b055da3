"""`GET /v1/models`: the models, by each of their names; and what there is to know of them, and of the server."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import lmstate
from lmstate.generation.sampling import Sampler
from lmstate.serve.answer.handlers import json_response
from lmstate.serve.answer.pool import ModelPool, ServedModel
from lmstate.serve.answer.service import Service
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.metrics import together


def model_card(served: ServedModel, name: str) -> dict[str, Any]:
    """A model by one of its names. Fields that only a loaded model knows are null until it is loaded."""
    service = served.service
    context = None if service is None else service.context
    meta = None
    if service is not None:
        config = service.model.config
        meta = {
            "family": config.family,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "layers": len(service.model.blocks),
            "fingerprint": service.model.fingerprint,
        }
    return {
        "id": name,
        "object": "model",
        "type": "model",  # this line and the next six are Anthropic's
        "display_name": name,
        "created_at": datetime.fromtimestamp(served.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
        "capabilities": None,
        "created": served.created,
        "owned_by": "lmstate",
        "root": served.name,
        "max_model_len": context,
        "status": {"value": served.status},  # llama-server's
        "meta": meta,
    }


def names(served: ServedModel) -> list[str]:
    return [served.name, *(name for name in served.settings.aliases if name != "*")]


async def list_models(pool: ModelPool, request: Request) -> ASGIApp:
    cards = [model_card(served, name) for served in pool.models for name in names(served)]
    # `models` is where one client (Codex) looks; the two ids are Anthropic's paging.
    paging = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return json_response({"object": "list", "data": cards, "models": [], **paging})


async def get_model(pool: ModelPool, request: Request) -> ASGIApp:
    name = request.path_params["model"]
    return json_response(model_card(pool.find(name), name))


async def props(service: Service, request: Request) -> ASGIApp:
    """Properties of the server, in the shape of llama-server, whose clients ask for them first."""
    tokenizer, suggested = service.tokenizer, Sampler.suggested(service.model.defaults)

    def text(id: int | None) -> str:
        return "" if id is None else tokenizer.decode([id], skip_special_tokens=False)

    sampling = {
        "temperature": suggested.temperature,
        "top_k": suggested.top_k or 0,
        "top_p": suggested.top_p or 1.0,
        "min_p": suggested.min_p or 0.0,
        "repeat_penalty": suggested.repetition_penalty,
    }
    return json_response(
        {
            "default_generation_settings": {"n_ctx": service.context, "params": sampling},
            "total_slots": service.engine.rows,
            "model_alias": service.settings.model_name,
            "model_path": service.settings.model_name,
            "modalities": {"vision": service.sees, "audio": service.takes_sounds},
            "chat_template": tokenizer.template_source or "",
            "bos_token": text(tokenizer.bos_id),
            "eos_token": text(min(tokenizer.eos_ids, default=None)),
            "build_info": f"lmstate {lmstate.__version__}",
        }
    )


async def slots(service: Service, request: Request) -> ASGIApp:
    """The rows of the engine as llama-server's slots; those in use come first, whatever their place in the batch."""
    at_work = await asyncio.to_thread(service.engine.at_work)
    if request.query_params.get("fail_on_no_slot") and len(at_work) == service.engine.rows:
        raise ApiError("no slot is free", 503, code="unavailable")
    shown: list[dict[str, Any]] = [
        {"id": id, "n_ctx": service.context, "is_processing": id < len(at_work)} for id in range(service.engine.rows)
    ]
    for slot, task in zip(shown, at_work):
        slot["id_task"] = task
    return json_response(shown)


async def health(pool: ModelPool, request: Request) -> ASGIApp:
    if pool.draining:
        return json_response({"status": "shutting down"}, 503)
    if any(service.engine.failure for service in pool.loaded):
        return json_response({"status": "a process of the model has ended"}, 503)
    unstored = sum(service.engine.unstored for service in pool.loaded)
    return json_response(
        {"status": "ok", "stored": False, "sessions_unstored": unstored} if unstored else {"status": "ok"}
    )


async def metrics(pool: ModelPool, request: Request) -> ASGIApp:
    told = [service.metrics for service in pool.loaded]
    text = await asyncio.to_thread(together, told)  # it asks the engines between two steps
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
