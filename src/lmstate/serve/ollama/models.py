"""`/api/tags`, `/api/ps`, `/api/show` and what else Ollama's clients ask of models; and their embeddings."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from time import monotonic, perf_counter_ns
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve.answer.handlers import json_response
from lmstate.serve.answer.pool import ModelPool, ServedModel
from lmstate.serve.answer.service import Service
from lmstate.serve.openai.completions import FILL_IN
from lmstate.serve.openai.embeddings import check_dimensions, counted, embedded
from lmstate.serve.openai.models import names
from lmstate.serve.settings import LATEST
from lmstate.serve.wire.body import wrong
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.schema.ollama import OllamaEmbedBody, OllamaEmbeddingsBody, OllamaPullBody, OllamaShowBody

VERSION = "0.12.0"  # of Ollama's API: some clients refuse an older one


def tagged(name: str) -> str:
    """A model's name with a tag."""
    return name if ":" in name else name + LATEST


async def version(pool: ModelPool, request: Request) -> ASGIApp:
    return json_response({"version": VERSION})


async def tags(pool: ModelPool, request: Request) -> ASGIApp:
    return json_response({"models": [_listed(served, name) for served in pool.models for name in names(served)]})


async def ps(pool: ModelPool, request: Request) -> ASGIApp:
    return json_response({"models": [_running(pool, one) for one in pool.models if one.service is not None]})


async def show(pool: ModelPool, request: Request, body: OllamaShowBody) -> ASGIApp:
    served = pool.find(_named(body))
    facts = _facts(served.service) if served.service is not None else await asyncio.to_thread(_told, served)
    return json_response(
        {
            "modelfile": "",
            "parameters": "",
            "license": "",
            "modified_at": _modified(served),
            "details": _details(served.service),
            **facts,
        }
    )


async def pull(pool: ModelPool, request: Request, body: OllamaPullBody) -> ASGIApp:
    """A model that is served is there; no other is fetched from here."""
    pool.find(_named(body))
    return json_response({"status": "success"})


async def embed(service: Service, request: Request, body: OllamaEmbedBody) -> ASGIApp:
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not 0 < len(texts) <= service.settings.max_inputs:
        raise wrong("input", f"a string or a list of 1 to {service.settings.max_inputs}", None)
    check_dimensions(service, body.dimensions)
    begun = perf_counter_ns()
    prompts = await asyncio.to_thread(_prompts, service, texts, body.truncate is not False)
    vectors = await embedded(service, request, prompts, size=body.dimensions)
    return json_response(
        {
            "model": body.model,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": perf_counter_ns() - begun,
            "load_duration": 0,
            "prompt_eval_count": sum(map(len, prompts)),
        }
    )


async def embeddings(service: Service, request: Request, body: OllamaEmbeddingsBody) -> ASGIApp:
    (vector,) = await embedded(service, request, await asyncio.to_thread(_prompts, service, [body.prompt], True))
    return json_response({"embedding": vector.tolist()})


def _prompts(service: Service, texts: list[str], truncate: bool) -> list[list[int]]:
    def tokens_of(index: int, text: str) -> list[int]:
        if not truncate:
            service.refuse_long(text)
        tokens = service.tokenizer.encode(service.beginning(text))
        if not tokens:
            raise ApiError(f"input[{index}] has no tokens: there is nothing to read", param="input")
        if truncate and service.context is not None:
            del tokens[service.context - 1 :]
        return tokens

    return counted(service, (tokens_of(index, text) for index, text in enumerate(texts)))


def _named(body: OllamaShowBody | OllamaPullBody) -> str:
    name = body.model or body.name
    if not name:
        raise wrong("model", "the name of a model", name)
    return name


def _facts(service: Service) -> dict[str, Any]:
    config, family = service.model.config, service.model.config.family
    return {
        "template": service.tokenizer.template_source or "",
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": service.model.weight_totals.parameters,
            f"{family}.block_count": len(service.model.blocks),
            f"{family}.context_length": service.context or 0,
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.vocab_size": config.vocab_size,
        },
        "capabilities": _capabilities(service),
    }


def _told(served: ServedModel) -> dict[str, Any]:
    """Facts that config.json gives of a model that is not loaded."""
    config = served.source.config()
    family = str(config.get("model_type", ""))
    fields = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "vocab_size": "vocab_size",
    }
    info = {f"{family}.{name}": config[field] for name, field in fields.items() if isinstance(config.get(field), int)}
    return {"template": "", "model_info": {"general.architecture": family, **info}, "capabilities": ["completion"]}


def _listed(served: ServedModel, name: str) -> dict[str, Any]:
    service = served.service
    size = served.source.nbytes
    if service is not None:
        size = sum(service.model.weight_totals.nbytes.values())
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": _modified(served),
        "size": size,
        "digest": hashlib.sha256(served.name.encode()).hexdigest(),
        "details": _details(service),
    }


def _running(pool: ModelPool, served: ServedModel) -> dict[str, Any]:
    assert served.service is not None
    ends = datetime(9999, 12, 31, tzinfo=UTC)
    if pool.unload_after is not None:
        ends = datetime.now(UTC) + timedelta(seconds=max(0.0, served.used + pool.unload_after - monotonic()))
    context = served.service.context or 0
    return {**_listed(served, served.name), "expires_at": ends.isoformat(), "size_vram": 0, "context_length": context}


def _details(service: Service | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }
    if service is None:
        return told
    family, totals = service.model.config.family, service.model.weight_totals
    count, stored = totals.parameters, next(iter(totals.nbytes))
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
    return {**told, "family": family, "families": [family], "parameter_size": size, "quantization_level": stored}


def _capabilities(service: Service) -> list[str]:
    can = ["completion"]
    if service.engine.chats:
        can.append("tools")
    if service.renderer.reasoning is not None:
        can.append("thinking")
    if service.sees:
        can.append("vision")
    if any(all(service.tokenizer.id_of(word) is not None for word in words) for words in FILL_IN):
        can.append("insert")
    return can


def _modified(served: ServedModel) -> str:
    return datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z")
