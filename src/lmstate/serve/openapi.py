"""The OpenAPI document of the routes, made of the structs that their bodies are read as."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msgspec.json import schema_components

from lmstate.serve.answer.paths import Path
from lmstate.serve.wire.schema.responses import ITEM_FORMS

REFERENCE = "#/components/schemas/{name}"

TEXT, FLAG, WHOLE = ({"type": kind} for kind in ("string", "boolean", "integer"))
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


TAGS = {  # by how a path begins
    "/v1/sessions": "Sessions and prefixes",
    "/v1/cache": "Sessions and prefixes",
    "/reset_prefix_cache": "Sessions and prefixes",
    "/v1/messages": "Anthropic",
    "/api/": "Ollama",
    "/v1/": "OpenAI",
    "/v2/": "OpenAI",
}
_ASKED = [{"role": "user", "content": "Hello"}]
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _ASKED, "max_tokens": 64},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 32},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 64},
    "/v1/messages": {"model": "smollm2", "messages": _ASKED, "max_tokens": 64},
    "/v1/messages/count_tokens": {"model": "smollm2", "messages": _ASKED},
    "/v1/embeddings": {"input": ["Hello", "Good-bye"]},
    "/v1/rerank": {"query": "Where is Paris?", "documents": ["Paris is in France.", "Cats sleep."]},
    "/v1/cache/explain": {"prompt": "Once upon a time"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": _ASKED},
    "/api/chat": {"model": "smollm2", "messages": _ASKED, "options": {"num_predict": 64}},
    "/api/generate": {"model": "smollm2", "prompt": "Hello", "options": {"num_predict": 64}},
    "/api/embed": {"model": "smollm2", "input": ["Hello", "Good-bye"]},
    "/api/show": {"model": "smollm2"},
}


def document(paths: Sequence[Path]) -> dict[str, Any]:
    """OpenAPI 3.1 of these routes."""
    from lmstate import __version__

    forms = {one.body for one in paths if one.body is not None} | set(ITEM_FORMS.values())
    _, schemas = schema_components(sorted(forms, key=lambda form: form.__name__), ref_template=REFERENCE)
    described: dict[str, dict[str, Any]] = {}
    for one in paths:
        path = one.path.replace(":path", "")
        operation: dict[str, Any] = {
            "summary": one.summary,
            "tags": [next((tag for start, tag in TAGS.items() if path.startswith(start)), "Server")],
            "operationId": f"{one.method.lower()}{re.sub(r'[^a-z0-9]+', '_', path.lower())}".rstrip("_"),
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
        if one.body is not None:
            content: dict[str, Any] = {"schema": {"$ref": REFERENCE.format(name=one.body.__name__)}}
            if path in EXAMPLES:
                content["example"] = EXAMPLES[path]
            kind = "multipart/form-data" if one.form else "application/json"
            operation["requestBody"] = {"required": True, "content": {kind: content}}
        described.setdefault(path, {})[one.method.lower()] = operation
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "lmstate", "version": __version__},
        "paths": described,
        "components": {"securitySchemes": keys, "schemas": schemas},
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }
