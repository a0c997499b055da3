"""`/api/tags`, `/api/ps`, `/api/show` and what else Ollama's clients ask of models; and their embeddings."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime
from time import perf_counter_ns
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.models.describe import bytes_by_kind, parameter_count, stored_weights
from lmstate.serve.answer.handlers import json_response
from lmstate.serve.answer.service import Service
from lmstate.serve.openai.completions import FILL_IN
from lmstate.serve.openai.embeddings import check_dimensions, embedded
from lmstate.serve.openai.models import names
from lmstate.serve.settings import LATEST
from lmstate.serve.wire.body import wrong
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.schema.ollama import OllamaEmbedBody, OllamaEmbeddingsBody, OllamaPullBody, OllamaShowBody

VERSION = "0.12.0"  # of Ollama's API: some clients refuse an older one


def tagged(name: str) -> str:
    """A model's name with a tag."""
    return name if ":" in name else name + LATEST


async def version(service: Service, request: Request) -> ASGIApp:
    return json_response({"version": VERSION})


async def tags(service: Service, request: Request) -> ASGIApp:
    return json_response({"models": [_listed(service, name) for name in names(service)]})


async def ps(service: Service, request: Request) -> ASGIApp:
    never = datetime(9999, 12, 31, tzinfo=UTC).isoformat()
    loaded = {**_listed(service, service.settings.model_name), "expires_at": never}
    return json_response({"models": [{**loaded, "size_vram": 0, "context_length": service.context or 0}]})


async def show(service: Service, request: Request, body: OllamaShowBody) -> ASGIApp:
    service.settings.check_model(_named(body))
    config, family = service.model.config, service.model.config.family
    facts = {
        "general.architecture": family,
        "general.parameter_count": _parameters(service),
        f"{family}.block_count": len(service.model.blocks),
        f"{family}.context_length": service.context or 0,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.vocab_size": config.vocab_size,
    }
    return json_response(
        {
            "modelfile": "",
            "parameters": "",
            "template": service.tokenizer.template_source or "",
            "license": "",
            "modified_at": _modified(service),
            "details": _details(service),
            "model_info": facts,
            "capabilities": _capabilities(service),
        }
    )


async def pull(service: Service, request: Request, body: OllamaPullBody) -> ASGIApp:
    """A model that is served is there; no other is fetched from here."""
    service.settings.check_model(_named(body))
    return json_response({"status": "success"})


async def embed(service: Service, request: Request, body: OllamaEmbedBody) -> ASGIApp:
    service.settings.check_model(body.model)
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
    service.settings.check_model(body.model)
    (vector,) = await embedded(service, request, await asyncio.to_thread(_prompts, service, [body.prompt], True))
    return json_response({"embedding": vector.tolist()})


def _prompts(service: Service, texts: list[str], truncate: bool) -> list[list[int]]:
    found = [service.tokenizer.encode(text) for text in texts]
    for index, tokens in enumerate(found):
        if not tokens:
            raise ApiError(f"input[{index}] has no tokens: there is nothing to read", param="input")
        if truncate and service.context is not None:
            del tokens[service.context - 1 :]
        service.room(len(tokens))
    return found


def _named(body: OllamaShowBody | OllamaPullBody) -> str:
    name = body.model or body.name
    if not name:
        raise wrong("model", "the name of a model", name)
    return name


def _listed(service: Service, name: str) -> dict[str, Any]:
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": _modified(service),
        "size": sum(bytes_by_kind(stored_weights(service.model.parts)).values()),
        "digest": hashlib.sha256(service.model.fingerprint.encode()).hexdigest(),
        "details": _details(service),
    }


def _details(service: Service) -> dict[str, Any]:
    family, count = service.model.config.family, _parameters(service)
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
    (stored, _), *_ = bytes_by_kind(stored_weights(service.model.parts)).most_common(1)
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": size,
        "quantization_level": stored,
    }


def _capabilities(service: Service) -> list[str]:
    can = ["completion"]
    if service.engine.chats:
        can.append("tools")
    if service.renderer.reasoning is not None:
        can.append("thinking")
    if any(all(service.tokenizer.id_of(word) is not None for word in words) for words in FILL_IN):
        can.append("insert")
    return can


def _parameters(service: Service) -> int:
    return sum(map(parameter_count, stored_weights(service.model.parts)))


def _modified(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
