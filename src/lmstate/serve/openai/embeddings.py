"""`POST /v1/embeddings`: a text's hidden states, after the last norm, pooled and of length 1."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp
from torch import Tensor

from lmstate.models.embeddings import chosen_pooling, unit_vector
from lmstate.serve.answer.handlers import json_response
from lmstate.serve.answer.service import Service
from lmstate.serve.openai.completions import as_list, prompt_ids
from lmstate.serve.wire.body import wrong
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.schema.completions import EmbeddingBody
from lmstate.serve.wire.sse import unless_gone


async def embeddings(service: Service, request: Request, body: EmbeddingBody) -> ASGIApp:
    """`input`: a text, a list of texts, token ids, or a list of these. `pooling`: mean, last or cls; by default that
    of the checkpoint, else mean."""
    inputs = as_list(service, body.input, "input")
    check_dimensions(service, body.dimensions)

    def encode() -> list[list[int]]:
        return counted(service, (prompt_ids(service, one, f"input[{index}]") for index, one in enumerate(inputs)))

    prompts = await asyncio.to_thread(encode)
    vectors = await embedded(service, request, prompts, body.pooling, body.dimensions)
    used = sum(map(len, prompts))
    return json_response(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": written(vector, body.encoding_format == "base64")}
                for index, vector in enumerate(vectors)
            ],
            "model": body.model or service.settings.model_name,
            "usage": {"prompt_tokens": used, "total_tokens": used},
        }
    )


def counted(service: Service, inputs: Iterable[list[int]]) -> list[list[int]]:
    """The inputs, each tokenized only while those before it are few enough for one request. Raises `ApiError`."""
    found: list[list[int]] = []
    total, most = 0, service.settings.max_input_tokens
    for tokens in inputs:
        service.room(len(tokens))
        found.append(tokens)
        total += len(tokens)
        if total > most:
            raise ApiError(
                f"the first {len(found)} inputs have {total} tokens together; one request has at most {most}: send "
                "them in several requests",
                param="input",
                code="too_many_tokens",
            )
    return found


def check_dimensions(service: Service, asked: int | None) -> None:
    widest = service.model.config.hidden_size
    if asked is not None and asked > widest:
        raise wrong("dimensions", f"a whole number from 1 to {widest}", asked)


async def embedded(
    service: Service, request: Request, prompts: list[list[int]], pooling: str | None = None, size: int | None = None
) -> list[Tensor]:
    """The vector of each sequence, in turn. `pooling` None: the checkpoint's own, else mean. Raises `ApiError`."""
    try:
        chosen = chosen_pooling(service.model.defaults, pooling)
    except ValueError as error:
        raise ApiError(str(error), param="pooling") from None
    vectors = []
    for tokens in prompts:
        pooled = await unless_gone(request.receive, asyncio.wrap_future(service.engine.embed(tokens, chosen)))
        vectors.append(unit_vector(pooled, size))
    return vectors


def written(vector: Tensor, packed: bool) -> Any:
    """Numbers, or little-endian float32 in base64."""
    values = vector.tolist()
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode() if packed else values
