"""Bodies of forms with files (multipart/form-data, RFC 7578), read whole from memory within limits."""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast

import msgspec

from lmstate.serve.wire.body import read
from lmstate.serve.wire.errors import ApiError

T = TypeVar("T")

MOST_PARTS = 64
MOST_HEADERS = 2**13  # bytes of a part's headers
MOST_BOUNDARY = 70  # characters, as RFC 2046 has it
# A parameter of a header, with a value in quotes or without; each character is read once.
PARAMETER = re.compile(r';\s*+([^\s=;"]++)\s*+=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^\s;"]++))\s*+')
Form = dict[str, list[bytes]]


def parse_form(body: bytes, content_type: str) -> Form:
    """The contents of each field by its name, in order. Raises `ApiError` for anything but such a form."""
    boundary = _boundary(content_type)
    mark = b"--" + boundary
    if not body.startswith(mark):
        raise _damaged("it does not begin with its boundary")
    form: Form = {}
    at, count = len(mark), 0
    while not body.startswith(b"--", at):
        if (count := count + 1) > MOST_PARTS:
            raise _damaged(f"it has more than {MOST_PARTS} parts")
        if not body.startswith(b"\r\n", at):
            raise _damaged("a boundary is not at the end of its line")
        content = body.find(b"\r\n\r\n", at, at + MOST_HEADERS)
        end = -1 if content < 0 else body.find(b"\r\n" + mark, content + 2)
        if end < 0:
            raise _damaged("a part has no end, or too many headers")
        form.setdefault(_name(body[at + 2 : content]), []).append(body[content + 4 : end])
        at = end + 2 + len(mark)
    return form


def read_fields(form: Form, into: type[T]) -> T:
    """The fields of a form as a struct: `file` as bytes, `name[]` as a list, others as texts, numbers and flags.

    Those that the struct does not have are left out. Raises `ApiError` that names the field at fault.
    """
    values: dict[str, Any] = {}
    known = {field.name for field in msgspec.structs.fields(cast("Any", into))}
    for name, parts in form.items():
        if name.removesuffix("[]") not in known:
            continue
        if name == "file" and len(parts) == 1:
            values[name] = parts[0]
        elif name.endswith("[]"):
            values[name.removesuffix("[]")] = [_text(name, part) for part in parts]
        elif len(parts) == 1:
            values[name] = _text(name, parts[0])
        else:
            raise ApiError(f"{name[:80]} is given {len(parts)} times", param=name[:80])
    return read(values, into, strict=False)


def _text(name: str, part: bytes) -> str:
    try:
        return part.decode()
    except UnicodeDecodeError:
        raise ApiError(f"{name[:80]} is not UTF-8", param=name[:80]) from None


def _boundary(content_type: str) -> bytes:
    kind, parameters = _parameters(content_type)
    boundary = parameters.get("boundary")
    if kind != "multipart/form-data" or boundary is None:
        raise ApiError(
            f"the body is {content_type[:80]!r}; send a form with a file: multipart/form-data with a boundary", 415
        )
    if not 1 <= len(boundary) <= MOST_BOUNDARY or not boundary.isascii():
        raise _damaged(f"a boundary has 1 to {MOST_BOUNDARY} characters of ASCII")
    return boundary.encode()


def _name(headers: bytes) -> str:
    """The field that the headers of a part name."""
    for line in headers.decode(errors="replace").split("\r\n"):
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            kind, parameters = _parameters(value)
            if kind == "form-data" and (name := parameters.get("name")):
                return name
    raise _damaged("a part has no Content-Disposition: form-data with a name")


def _parameters(value: str) -> tuple[str, dict[str, str]]:
    """The value of a header, in small letters, and its parameters up to one that is damaged.

    Names that RFC 2231 encodes, as `name*`, stay as they are: RFC 7578 forbids them in a form.
    """
    kind = value.partition(";")[0]
    found: dict[str, str] = {}
    at = len(kind)
    while parameter := PARAMETER.match(value, at):
        name, quoted, plain = parameter.groups()
        found.setdefault(name.lower(), plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted))
        at = parameter.end()
    return kind.strip().lower(), found


def _damaged(why: str) -> ApiError:
    return ApiError(f"the form is damaged: {why}", code="invalid_form")
