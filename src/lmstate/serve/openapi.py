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
        if one.body is not None:
            schema = {"$ref": REFERENCE.format(name=one.body.__name__)}
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
        "components": {"securitySchemes": keys, "schemas": schemas},
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }
