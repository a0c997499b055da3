"""Access control: API keys, CORS origins, and the Host header of requests to a local server."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmstate.serve.answer.handlers import error_response
from lmstate.serve.settings import Settings, is_loopback
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.request_id import ANTHROPIC, OPENAI
from lmstate.serve.wire.tenants import EVERYBODY, Tenant, current_sender, current_tenant, sender_of

OPEN = frozenset({"/health", "/v1/health"})  # asked by what watches a server, without a key


class Guard:
    """ASGI middleware that lets through what may ask, and adds the headers that browsers want."""

    def __init__(self, app: ASGIApp, settings: Settings, open_paths: Sequence[str] = ()) -> None:
        self._app = app
        self._settings = settings
        keys = [key.encode() for key in settings.api_keys]
        self._keys = {key: Tenant.of(key) if settings.has_owners else EVERYBODY for key in keys}
        self._open = OPEN | frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        cross = self._allowed_origin(origin)

        async def put(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                added["x-content-type-options"] = "nosniff"
                if cross is not None:
                    added["access-control-allow-origin"] = cross
                    added["access-control-expose-headers"] = f"{OPENAI}, {ANTHROPIC}"
                    added.append("vary", "origin")
            await send(message)

        try:
            key = self._check(scope, headers, origin, cross)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, put)
            return
        current_tenant.set(EVERYBODY if key is None else self._keys[key])
        current_sender.set(sender_of(key, (scope.get("client") or ("",))[0]))
        if scope["method"] == "OPTIONS" and origin is not None:
            await self._preflight(put)
            return
        await self._app(scope, receive, put)

    def _check(self, scope: Scope, headers: Headers, origin: str | None, cross: str | None) -> bytes | None:
        """The key that a request has; None where it needs none. Raises `ApiError` for one that may not ask."""
        host = headers.get("host", "")
        if origin is not None and cross is None and not _is_same(origin, scope["scheme"], host):
            raise ApiError(f"pages of {origin[:200]} may not ask here; --cors-origin allows them", 403)
        if not self._keys:
            # A page can make a name of its own mean 127.0.0.1; its requests then carry that name.
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            if self._settings.on_loopback and not is_loopback(name):
                where = f"this server is asked as localhost, not as {host[:200]!r}"
                raise ApiError(f"{where}; with --api-key-file it answers to any name", 403)
            return None
        if scope["path"] in self._open or scope["method"] == "OPTIONS":
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        found = [self._known(key.encode("utf-8", "surrogateescape")) for key in given]
        if (key := found[0] or found[1]) is None:
            message = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            raise ApiError(message, 401, code="invalid_api_key")
        return key

    def _known(self, given: bytes) -> bytes | None:
        """The key, if it is one. It is compared with every key, each in constant time."""
        found = None
        for key in self._keys:
            if hmac.compare_digest(key, given):
                found = key
        return found

    def _allowed_origin(self, origin: str | None) -> str | None:
        allowed = self._settings.cors_origins
        return origin if origin is not None and ("*" in allowed or origin in allowed) else None

    async def _preflight(self, send: Send) -> None:
        headers = [
            (b"access-control-allow-methods", b"GET, POST, PUT, DELETE, OPTIONS"),
            (b"access-control-allow-headers", b"*, authorization, content-type, x-api-key"),
            (b"access-control-max-age", b"86400"),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def _is_same(origin: str, scheme: str, host: str) -> bool:
    """Whether a page of this origin asks the server that it came from, perhaps behind a proxy that speaks TLS."""
    page_scheme, _, page_host = origin.partition("://")
    return page_host == host and page_scheme in (scheme, "https")
