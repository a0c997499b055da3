"""The OpenAPI document of the routes: what tools that read or fuzz an API want of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lmstate.serve.paths import Path

TEXT, FLAG, WHOLE, NUMBER = ({"type": kind} for kind in ("string", "boolean", "integer", "number"))
OBJECT: dict[str, Any] = {"type": "object"}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
TEXTS = {"type": "array", "items": TEXT}
OBJECTS = {"type": "array", "items": OBJECT}

SAMPLING = {
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "top_k": WHOLE,
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "logit_bias": OBJECT,
    "seed": WHOLE,
    "stop": {"anyOf": [TEXT, TEXTS]},
    "stream": FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "model": TEXT,
}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [TEXT, OBJECTS, {"type": "null"}]},
        "tool_calls": OBJECTS,
        "tool_call_id": TEXT,
        "reasoning_content": TEXT,
    },
    "required": ["role"],
}
TOOLS = {
    "tools": OBJECTS,
    "tool_choice": {"anyOf": [TEXT, OBJECT]},
    "parallel_tool_calls": FLAG,
    "reasoning_effort": TEXT,
    "chat_template_kwargs": OBJECT,
}
CHAT = {"messages": {"type": "array", "items": MESSAGE, "minItems": 1}, **TOOLS}
PROMPT = {"anyOf": [TEXT, TEXTS, IDS, {"type": "array", "items": IDS}]}


def body(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


RESPONSE = {
    "input": {"anyOf": [TEXT, OBJECTS]},
    "instructions": TEXT,
    "previous_response_id": TEXT,
    "max_output_tokens": {"type": "integer", "minimum": 1},
    "text": OBJECT,
    "reasoning": OBJECT,
    "store": FLAG,
    "metadata": OBJECT,
    "include": TEXTS,
    **{key: TOOLS[key] for key in ("tools", "tool_choice", "parallel_tool_calls")},
}
ANTHROPIC = {
    "messages": {"type": "array", "items": OBJECT, "minItems": 1},
    "system": {"anyOf": [TEXT, OBJECTS]},
    "tools": OBJECTS,
    "tool_choice": OBJECT,
    "thinking": OBJECT,
    "model": TEXT,
}

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": body(
        {
            **CHAT,
            **SAMPLING,
            "max_tokens": WHOLE,
            "max_completion_tokens": WHOLE,
            "logprobs": FLAG,
            "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
            "response_format": OBJECT,
        },
        "messages",
    ),
    "/v1/chat/completions/input_tokens": body(CHAT, "messages"),
    "/v1/completions": body(
        {
            **SAMPLING,
            "prompt": PROMPT,
            "suffix": TEXT,
            "echo": FLAG,
            "best_of": WHOLE,
            "max_tokens": WHOLE,
            "logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        },
        "prompt",
    ),
    "/v1/responses": body({**SAMPLING, **RESPONSE}, "input"),
    "/v1/responses/input_tokens": body(RESPONSE, "input"),
    "/v1/messages": body(
        {
            **ANTHROPIC,
            "max_tokens": {"type": "integer", "minimum": 1},
            "temperature": NUMBER,
            "top_p": NUMBER,
            "top_k": WHOLE,
            "stop_sequences": TEXTS,
            "stream": FLAG,
        },
        "model",
        "max_tokens",
        "messages",
    ),
    "/v1/messages/count_tokens": body(ANTHROPIC, "messages"),
    "/v1/embeddings": body(
        {
            "input": PROMPT,
            "model": TEXT,
            "encoding_format": {"enum": ["float", "base64"]},
            "dimensions": {"type": "integer", "minimum": 1},
            "pooling": {"enum": ["mean", "last", "cls"]},
        },
        "input",
    ),
    "/tokenize": body({"prompt": TEXT, "messages": CHAT["messages"], "add_special_tokens": FLAG}),
    "/detokenize": body({"tokens": IDS}, "tokens"),
    "/apply-template": body(CHAT, "messages"),
    "/v1/cache/explain": body({"prompt": PROMPT, "messages": CHAT["messages"]}),
    "/v1/sessions": body({"name": TEXT}),
    "/v1/sessions/{name}/send": body(
        {**SAMPLING, "text": TEXT, "tokens": IDS, "messages": CHAT["messages"], "max_tokens": WHOLE}
    ),
    "/v1/sessions/{name}/rewind": body({"to": {"type": "integer", "minimum": 0}}, "to"),
    "/v1/sessions/{name}/fork": body({"name": TEXT}, "name"),
}


def document(paths: Sequence[Path]) -> dict[str, Any]:
    """OpenAPI 3.1 of these routes."""
    from lmstate import __version__

    described: dict[str, dict[str, Any]] = {}
    for one in paths:
        path = one.path.replace(":path", "")
        operation: dict[str, Any] = {
            "summary": one.summary,
            "operationId": f"{one.method.lower()}{re.sub(r'[^a-z]+', '_', path.lower())}".rstrip("_"),
            "responses": {
                "200": {"description": "The answer; events if a stream was asked for."},
                "4XX": {"description": "What was wrong with the request, in the protocol's own error object."},
                "503": {"description": "The server is shutting down."},
            },
        }
        if parameters := re.findall(r"{(\w+)}", path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in parameters
            ]
        if (schema := BODIES.get(one.path)) is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        described.setdefault(path, {})[one.method.lower()] = operation
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "lmstate", "version": __version__},
        "paths": described,
        "components": {"securitySchemes": keys},
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }
