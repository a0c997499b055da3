"""The OpenAPI document of the routes: what tools that read or fuzz an API want of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lmstate.serve.answer.paths import Path

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
    "ignore_eos": FLAG,
    "include_stop_str_in_output": FLAG,
    "min_tokens": WHOLE,
    "stop_token_ids": IDS,
    "return_token_ids": FLAG,
    "grammar": TEXT,
    "guided_regex": TEXT,
    "guided_json": OBJECT,
    "guided_choice": TEXTS,
    "structured_outputs": {
        "type": "object",
        "properties": {"json": OBJECT, "regex": TEXT, "choice": TEXTS, "grammar": TEXT},
    },
}
ROLE = {"enum": ["system", "developer", "user", "assistant", "tool"]}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": ROLE,
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
    "control_tokens": FLAG,
}
CHAT = {"messages": {"type": "array", "items": MESSAGE, "minItems": 1}, **TOOLS}
PROMPT = {"anyOf": [TEXT, TEXTS, IDS, {"type": "array", "items": IDS}]}


def body(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


METADATA = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 512}, "maxProperties": 16}
PART = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text", "summary_text", "reasoning_text"]}, "text": TEXT},
    "required": ["type", "text"],
}
PARTS = {"anyOf": [TEXT, {"type": "array", "items": PART}]}


def item(kind: str, required: Sequence[str], **properties: Any) -> dict[str, Any]:
    fixed = {"type": {"const": kind}, "id": {"type": "string", "maxLength": 200}}
    return {"type": "object", "properties": {**fixed, **properties}, "required": ["type", *required]}


ITEMS = {
    "type": "array",
    "items": {
        "anyOf": [
            item("message", ("role", "content"), role=ROLE, content=PARTS),
            item("reasoning", ("summary",), summary={"type": "array", "items": PART}),
            item("function_call", ("call_id", "name", "arguments"), call_id=TEXT, name=TEXT, arguments=TEXT),
            item("function_call_output", ("call_id", "output"), call_id=TEXT, output=PARTS),
            item("custom_tool_call", ("call_id", "name", "input"), call_id=TEXT, name=TEXT, input=TEXT),
            item("custom_tool_call_output", ("call_id", "output"), call_id=TEXT, output=PARTS),
            item("compaction", ("encrypted_content",), encrypted_content=TEXT),
            item("item_reference", ("id",)),
        ]
    },
}
RESPONSE = {
    "input": {"anyOf": [TEXT, ITEMS]},
    "instructions": TEXT,
    "previous_response_id": TEXT,
    "max_output_tokens": {"type": "integer", "minimum": 1},
    "text": OBJECT,
    "reasoning": OBJECT,
    "store": FLAG,
    "metadata": METADATA,
    "include": TEXTS,
    "background": FLAG,
    "conversation": {"anyOf": [TEXT, body({"id": TEXT}, "id")]},
    "truncation": {"enum": ["auto", "disabled"]},
    "control_tokens": FLAG,
    **{key: TOOLS[key] for key in ("tools", "tool_choice", "parallel_tool_calls")},
}
ANTHROPIC = {
    "messages": {"type": "array", "items": OBJECT, "minItems": 1},
    "system": {"anyOf": [TEXT, OBJECTS]},
    "tools": OBJECTS,
    "tool_choice": OBJECT,
    "thinking": OBJECT,
    "output_config": OBJECT,
    "control_tokens": FLAG,
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
    "/v1/responses": body({**SAMPLING, **RESPONSE}),
    "/v1/responses/input_tokens": body(RESPONSE),
    "/v1/responses/compact": body(
        {key: RESPONSE[key] for key in ("input", "instructions", "previous_response_id")} | {"model": TEXT}
    ),
    "/v1/conversations": body({"items": ITEMS, "metadata": METADATA}),
    "/v1/conversations/{id}": body({"metadata": METADATA}, "metadata"),
    "/v1/conversations/{id}/items": body({"items": ITEMS}, "items"),
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
    "/tokenize": body(
        {
            "prompt": TEXT,
            "messages": CHAT["messages"],
            "add_special_tokens": FLAG,
            "add_generation_prompt": FLAG,
            "return_token_strs": FLAG,
            "with_pieces": FLAG,
        }
    ),
    "/detokenize": body({"tokens": IDS}, "tokens"),
    "/apply-template": body({**CHAT, "add_generation_prompt": FLAG}, "messages"),
    "/v1/cache/explain": body({"prompt": PROMPT, "messages": CHAT["messages"]}),
    "/v1/sessions": body({"name": TEXT}),
    "/v1/sessions/{name}/send": body(
        {**SAMPLING, "text": TEXT, "tokens": IDS, "messages": CHAT["messages"], "max_tokens": WHOLE}
    ),
    "/v1/sessions/{name}/rewind": body({"to": {"type": "integer", "minimum": 0}}, "to"),
    "/v1/sessions/{name}/fork": body({"name": TEXT}, "name"),
}

PAGE = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": {"enum": ["asc", "desc"]},
    "after": TEXT,
}
QUERIES: dict[str, dict[str, Any]] = {  # of GET
    "/v1/responses/{id}": {"stream": FLAG, "starting_after": WHOLE},
    "/v1/responses/{id}/input_items": PAGE,
    "/v1/conversations/{id}/items": PAGE,
    "/slots": {"fail_on_no_slot": FLAG},
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
                "503": {"description": "The server is shutting down, or has no row for who asked to be told."},
            },
        }
        if parameters := re.findall(r"{(\w+)}", path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in parameters
            ]
        if one.method == "GET" and (query := QUERIES.get(one.path)):
            asked = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
            operation.setdefault("parameters", []).extend(asked)
        if one.method == "POST" and (schema := BODIES.get(one.path)) is not None:
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
