"""`lmstate models`: what can be named, what can be run, what is on the disk already."""

from __future__ import annotations


def models() -> None:
    """List aliases, supported families and the cache.

    \b
    Examples:
      lmstate models
    """
    raise NotImplementedError
