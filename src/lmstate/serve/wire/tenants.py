"""Owners of names: where a server has several API keys, the names that a key makes are there for that key alone.

A layer in front of the stores: they keep each name with its owner before it, and know of no owners. Who asks is told by
a context variable that the guard sets for every request, so that a path cannot forget to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_address

MARK = "@"  # begins the stored form of a name with an owner; clients can give no session such a name


@dataclass(frozen=True)
class Tenant:
    """The owner of the names of a request: a digest of its API key; empty where all requests share them."""

    owner: str = ""

    @staticmethod
    def of(key: bytes) -> Tenant:
        return Tenant(_digest("owner", key.hex()))

    @property
    def _before(self) -> str:
        return f"{MARK}{self.owner}."

    def stored(self, name: str) -> str:
        """The form in which stores keep a name of this owner."""
        return self._before + name if self.owner or name.startswith(MARK) else name

    def shown(self, stored: str) -> str | None:
        """The name of a stored form; None if it belongs to another owner."""
        if stored.startswith(self._before):
            return stored.removeprefix(self._before)
        return None if self.owner or stored.startswith(MARK) else stored

    def told(self, message: str) -> str:
        """A message with its owner's names as the owner gave them."""
        return message.replace(self._before, "") if self.owner else message

    def salt(self, cache_salt: str | None = None) -> str:
        """The engine's salt for prefixes of this owner, and of one `cache_salt` of it."""
        return _digest("prefixes", self.owner, cache_salt or "") if self.owner or cache_salt else ""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(("lmstate", *parts)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


EVERYBODY = Tenant()
current_tenant: ContextVar[Tenant] = ContextVar("tenant", default=EVERYBODY)
current_sender: ContextVar[str] = ContextVar("sender", default="")
SENDER_BITS = 64  # of an IPv6 address: a host has all addresses that begin with them


def caller() -> Tenant:
    """The owner of what the request that is being answered makes and asks for."""
    return current_tenant.get()


def sender_of(key: bytes | None, address: str) -> str:
    """The sender of a request, for the engine: its API key where there is one, else the address that it comes from."""
    if key is not None:
        return Tenant.of(key).owner
    try:
        ip = ip_address(address)
    except ValueError:  # of a socket that is a file, say
        return address
    return str(IPv6Network((int(ip), SENDER_BITS), strict=False)) if isinstance(ip, IPv6Address) else address


def as_owner(stored: str, act: Callable[[str], object]) -> None:
    """Do something with the name of a stored form as its owner, who need not be the caller."""
    tenant = Tenant(stored.removeprefix(MARK).partition(".")[0]) if stored.startswith(MARK) else EVERYBODY
    if (name := tenant.shown(stored)) is not None:
        context = copy_context()
        context.run(current_tenant.set, tenant)
        context.run(act, name)
