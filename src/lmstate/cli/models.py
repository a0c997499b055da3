"""`lmstate models`: what can be named, what can be run, what is on the disk already."""

from __future__ import annotations


def models() -> None:
    """Aliases, supported families, and what the cache holds.

    \b
    lmstate models
    """
    raise NotImplementedError
