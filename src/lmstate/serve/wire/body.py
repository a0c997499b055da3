"""JSON bodies from outside: decoded within limits, then read as the structs of `wire/schema`.

A struct says the type and the range of each field. Fields that no struct has are ignored, as the clients of these
protocols expect, and null is the same as absent. Three leniencies are not msgspec's: 1.0 is a whole number, a body may
begin with a byte order mark, and nesting is bounded well below the interpreter's stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import cache
from threading import Lock
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from lmstate.serve.wire.errors import ApiError
from lmstate.text.nesting import NESTING, is_deeper, values_in

T = TypeVar("T")

MAX_DEPTH = 100  # of nested arrays and objects; a JSON schema of a deep tool goes to about 30
MAX_WHOLE_FLOATS = 64  # fields of one body that say 1.0 for 1
MAX_BRACKETS = 2**20  # that open an array or an object, in texts too: each may become a hundred bytes of memory
SHOWN_LENGTH = 80  # characters of a wrong value in an error
_READING_FORMS = Lock()
STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")
WORDS = {
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "an array",
    "object": "an object",
}


def parse_json(text: bytes, depth: int = MAX_DEPTH) -> Any:
    """Any JSON value in UTF-8: no NaN, no half surrogates, nested at most `depth` deep. Raises `ApiError`."""
    try:
        value = msgspec.json.decode(text.removeprefix(b"\xef\xbb\xbf"))  # which some libraries begin a body with
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: {error.reason} at byte {error.start}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(f"the body is nested more than {depth} deep", code="invalid_json") from None
    except msgspec.MsgspecError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise ApiError(f"the body is not valid JSON: {reason}", code="invalid_json") from None
    if is_deeper(value, depth):
        raise ApiError(f"the body is nested more than {depth} deep", code="invalid_json")
    return value


def parse_body(body: bytes, form: type[T], depth: int = MAX_DEPTH) -> T:
    """The body of a request as a struct. Raises `ApiError`."""
    if len(body) > MAX_BRACKETS and body.count(b"{") + body.count(b"[") > MAX_BRACKETS:
        raise ApiError(
            f"the body has more than {MAX_BRACKETS} of the brackets that open arrays and objects",
            413,
            code="body_too_large",
        )
    try:  # at once, without the values of fields that no struct has
        value: T = _decoder(cast("Any", form)).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return read(parse_json(body, depth), form)
    if is_deeper(value, depth, (*NESTING, Struct), _values_in):
        raise ApiError(f"the body is nested more than {depth} deep", code="invalid_json")
    return value


def read(value: Any, form: type[T], path: str = "", strict: bool = True) -> T:
    """A JSON value as a struct. Raises `ApiError` that names the field at fault, `path` before it.

    `strict=False`: numbers and flags may be written as texts.
    """
    _decoder(cast("Any", form))
    for _ in range(MAX_WHOLE_FLOATS):
        try:
            return msgspec.convert(value, form, strict=strict)
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at `$")
            steps = _steps(place.removesuffix("`"))
            if missing := re.fullmatch("Object missing required field `(.+)`", message):
                steps.append(missing[1])
            if not ("`int" in message and _make_whole(value, steps)):
                raise _refused(value, form, path, steps) from None
    raise ApiError(f"{path or 'the body'} has too many fields that are written as 1.0 in the place of 1")


@cache
def _decoder(form: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of a form. msgspec reads a struct's fields when it first meets it, and two threads that do so at once
    end the process."""
    with _READING_FORMS:
        return msgspec.json.Decoder(form)


def wrong(path: str, expected: str, value: Any) -> ApiError:
    """The error for a field whose value is not what it must be."""
    shown = "missing" if value is None else f"{kind(value)}: {_beginning(value)}"
    return ApiError(f"{path} must be {expected}; it is {shown}", param=path)


def _beginning(value: Any) -> str:
    """The first characters of a value's JSON. The rest of it, which may be long, is not written."""
    if isinstance(value, str):
        value = value[:SHOWN_LENGTH]
    text = ""
    for piece in json.JSONEncoder(check_circular=False).iterencode(value):  # else a cycle keeps the value
        text += piece[:SHOWN_LENGTH]
        if len(text) >= SHOWN_LENGTH:
            break
    return text[:SHOWN_LENGTH]


def _values_in(value: Any) -> Collection[Any]:
    return [getattr(value, name) for name in value.__struct_fields__] if isinstance(value, Struct) else values_in(value)


def kind(value: Any) -> str:
    """The JSON type of a value, for messages."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def joined(path: str, step: str | int) -> str:
    """The path of a field, or of an element, below `path`."""
    if isinstance(step, int):
        return f"{path}[{step}]"
    return f"{path}.{step}" if path else step


def _steps(place: str) -> list[str | int]:
    """The steps of a path of msgspec, up to the value of a free name, which it does not tell."""
    steps: list[str | int] = []
    for found in STEP.finditer(place):
        if found[0] == "[...]":
            break
        steps.append(found[1] if found[2] is None else int(found[2]))
    return steps


def _value_at(value: Any, steps: Sequence[str | int]) -> Any:
    for step in steps:
        value = value.get(step) if isinstance(value, dict) else value[step]
    return value


def _make_whole(value: Any, steps: Sequence[str | int]) -> bool:
    """Replace a float by the whole number that it is."""
    if not steps:
        return False
    holder, number = _value_at(value, steps[:-1]), _value_at(value, steps)
    if not (isinstance(number, float) and number.is_integer()):
        return False
    holder[steps[-1]] = int(number)
    return True


def _refused(value: Any, form: Any, path: str, steps: Sequence[str | int]) -> ApiError:
    schema, definitions = _schema(form)
    for step in steps:
        path = joined(path, step)
        schema = _below(schema, step, definitions)
    found = _value_at(value, steps)
    if schema.get("type") == "null":
        return ApiError(f"{path} is not supported here: {schema.get('description', 'leave it out')}", param=path)
    if not path:
        return ApiError(f"the body must be a JSON object, not {kind(found)}")
    return wrong(path, described(schema, definitions), found)


@cache
def _schema(form: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    (schema,), definitions = msgspec.json.schema_components([form], ref_template="{name}")
    return schema, definitions


def _branches(schema: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a schema but null, references followed."""
    if (name := schema.get("$ref")) is not None:
        return _branches(definitions.get(name, {}), definitions)
    if "anyOf" in schema and "type" not in schema:
        found = [branch for one in schema["anyOf"] for branch in _branches(one, definitions)]
        return [one for one in found if one.get("type") != "null"]
    return [schema]


def _below(schema: dict[str, Any], step: str | int, definitions: dict[str, Any]) -> dict[str, Any]:
    key = "items" if isinstance(step, int) else "properties"
    for branch in _branches(schema, definitions):
        if (inner := branch.get(key)) is not None:
            return inner if isinstance(step, int) else inner.get(step, {})
    return {}


def described(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """The demand of a schema in words: "a whole number from 1 to 128"."""
    words = [_described(one, definitions) for one in _branches(schema, definitions)]
    return " or ".join(dict.fromkeys(words)) or "a value of another kind"


def _described(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    if (choices := schema.get("enum")) is not None:
        return ("one of " if len(choices) > 1 else "") + ", ".join(map(str, choices))
    told = WORDS.get(schema.get("type", ""), "a value of another kind")
    if schema.get("type") == "array":
        items = {_described(one, definitions) for one in _branches(schema.get("items", {}), definitions)}
        low, high = schema.get("minItems"), schema.get("maxItems")
        range = f" of at least {low}" if high is None and low else "" if high is None else f" of {low or 0} to {high}"
        return f"{told}{range}, each {' or '.join(sorted(items))}" if items <= set(WORDS.values()) else told + range
    if "maxLength" in schema:
        return f"{told} of at most {schema['maxLength']} characters"
    if "maxProperties" in schema:
        values = described(schema.get("additionalProperties", {}), definitions)
        return f"{told} of at most {schema['maxProperties']} names, each with {values}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if (above := schema.get("exclusiveMinimum")) is not None:
        return f"{told} above {above:g}" + ("" if high is None else f", at most {high:g}")
    if low is not None and high is not None:
        return f"{told} from {low} to {high}"
    return told if low is None else f"{told} of at least {low}"
