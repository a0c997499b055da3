"""JSON bodies from outside: read within limits, then field by field, each with its type and range.

Fields that nobody asks for are ignored, as the clients of these protocols expect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lmstate.serve.wire.errors import ApiError
from lmstate.text.nesting import is_deeper

DEPTH = 100  # of nested arrays and objects; a JSON schema of a deep tool goes to about 30


def parse_body(body: bytes, depth: int = DEPTH) -> Fields:
    """The JSON object of a request body. Raises `ApiError` for anything else, before memory or the stack is spent."""
    return Fields(_object(parse_json(body, depth), ""))


def parse_json(text: bytes, depth: int = DEPTH) -> Any:
    """Any JSON value in UTF-8: no NaN, no half surrogates, nested at most `depth` deep."""
    try:
        decoded = text.decode("utf-8-sig")  # which some libraries begin a body with
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: {error.reason} at byte {error.start}", code="invalid_json") from None
    try:
        value = json.loads(decoded, parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError(f"the body is nested more than {depth} deep", code="invalid_json") from None
    except ValueError as error:  # bad JSON, or a number of thousands of digits
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if is_deeper(value, depth):
        raise ApiError(f"the body is nested more than {depth} deep", code="invalid_json")
    if "\\ud" in decoded or "\\uD" in decoded:  # only escapes can make half a surrogate pair out of valid UTF-8
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ApiError("the body has half a surrogate pair in a string", code="invalid_json") from None
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(f"{name or 'the body'} must be a JSON object, not {kind(value)}", param=name or None)
    return value


def kind(value: Any) -> str:
    """The JSON type of a value, for messages."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class Fields:
    """The fields of a JSON object. Every reader raises `ApiError` naming the field; null is the same as absent."""

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def wrong(self, key: str, what: str) -> ApiError:
        value = self.values.get(key)
        shown = "missing" if value is None else f"{kind(value)}: {json.dumps(value)[:80]}"
        return ApiError(f"{self.name(key)} must be {what}; it is {shown}", param=self.name(key))

    def refuse(self, key: str, instead: str) -> None:
        """Raise `ApiError` if a field is given that nobody reads, and that would change the answer."""
        if self.has(key):
            raise ApiError(f"{self.name(key)} is not supported here: {instead}", param=self.name(key))

    def text(self, key: str, default: str | None = None, most: int = 2**24) -> str | None:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > most:
            raise self.wrong(key, f"a string of at most {most} characters")
        return value

    def need_text(self, key: str, most: int = 2**24) -> str:
        value = self.text(key, None, most)
        if value is None:
            raise self.wrong(key, "a string")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int | None:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def count(self, key: str, low: int, high: int, default: int) -> int:
        value = self.integer(key, low, high)
        return default if value is None else value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float | None:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        if not low <= value <= high:  # nor is NaN
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str | None:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(key, f"one of {', '.join(choices)}")
        return value

    def texts(self, key: str, most: int) -> list[str]:
        """One string or an array of at most `most` strings; absent is empty."""
        value = self.values.get(key)
        if value is None:
            return []
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or len(values) > most or not all(isinstance(v, str) for v in values):
            raise self.wrong(key, f"a string or an array of at most {most} strings")
        return values

    def inner(self, key: str) -> Fields | None:
        """An object inside, or None."""
        value = self.values.get(key)
        return None if value is None else Fields(_object(value, self.name(key)), self.name(key))

    def choices(self, key: str, most: int) -> list[str]:
        """`texts` to choose from: if the field is there, at least one."""
        found = self.texts(key, most)
        if self.has(key) and not found:
            raise self.wrong(key, "an array of at least one string")
        return found

    def items(self, key: str, most: int = 100_000) -> list[Fields]:
        """An array of objects; absent is empty."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(key, f"an array of at most {most} objects")
        where = self.name(key)
        return [Fields(_object(item, f"{where}[{i}]"), f"{where}[{i}]") for i, item in enumerate(value)]
