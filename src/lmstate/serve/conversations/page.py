"""`/` and `/docs`: static files, and the headers that keep the pages from asking or showing what is of others."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from lmstate.serve.answer.paths import Path
from lmstate.serve.answer.pool import ModelPool
from lmstate.serve.wire.errors import ApiError

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types lmstate"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def _read() -> dict[str, tuple[bytes, str]]:
    folder = files("lmstate.serve") / "page"
    return {
        file.name: (file.read_bytes(), TYPES[file.name.rpartition(".")[2]])
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in TYPES
    }


FILES = _read()


async def index(pool: ModelPool, request: Request) -> ASGIApp:
    return _answer("index.html")


async def docs(pool: ModelPool, request: Request) -> ASGIApp:
    return _answer("docs.html")


async def static(pool: ModelPool, request: Request) -> ASGIApp:
    return _answer(request.path_params["file"])


def _answer(name: str) -> Response:
    if name not in FILES:
        raise ApiError(f"the page has no file {name[:100]!r}", 404)
    content, kind = FILES[name]
    return Response(content, headers=HEADERS, media_type=kind)


PATHS = (
    Path("GET", "/", index, both=False, whole=True),
    Path("GET", "/docs", docs, both=False, whole=True),
    Path("GET", "/page/files/{file}", static, both=False, whole=True),
)
OPEN_PATHS = ("/", "/docs", *(f"/page/files/{name}" for name in FILES))  # without a key: they hold nothing of anybody
