"""Keys of requests: names of the state that a request goes on from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from lmstate.engine.prefix.digests import FINE, beginnings, ends


@dataclass(frozen=True)
class RouteKey:
    """The state that a request goes on from. It holds digests only: no text can be read from it."""

    name: str  # SHA-256, in hexadecimal digits
    named: bool  # by a session or the like; else by the beginning of the prompt
    tokens: int  # of the prompt
    beginnings: tuple[tuple[int, str], ...] = ()  # (tokens, digest) of beginnings of the prompt, shorter ones first


def route_key(
    tokens: Sequence[int],
    *,
    session: str | None = None,
    previous: str | None = None,
    source: str | None = None,
    user: str | None = None,
    tenant: str = "",
) -> RouteKey:
    """Return the key of a prompt.

    session   the name of its session
    previous  the response or conversation that it follows
    source    what its tokens read, in a model with an encoder: the encoding is the state that costs most
    user      its `prompt_cache_key`, or its user
    tenant    the owner of names and texts, the engines' `salt`: equal ones of two tenants have other keys

    The first of these that is given names the state; else the first 64 tokens of the prompt do.
    """
    digests = list(beginnings(tokens, tenant))
    found = tuple(zip(ends(len(tokens)), digests))
    for kind, name in (("session", session), ("previous", previous), ("source", source), ("user", user)):
        if name is not None:
            return RouteKey(_digest(tenant, kind, name), True, len(tokens), found)
    name = digests[0] if digests else _digest(tenant, "prompt", *map(int, tokens[:FINE]))
    return RouteKey(name, False, len(tokens), found)


def key_seed(session: str, key: str, tenant: str = "") -> int:
    """Return the seed of a session's turn by its idempotency key: all fronts that it is sent through draw the same."""
    return int(_digest(tenant, "turn", session, key)[:15], 16)


def _digest(*parts: str | int) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
