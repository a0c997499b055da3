"""Trees of dataclasses, lists and tuples, as models are, with some of their parts replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lmstate.models.layers.rope import Rope
from lmstate.ops import Weight

Thing = TypeVar("Thing")
Change = Callable[[Any], Any]
"""Replacement of a part of a tree; the part itself where it, or parts of it, are to stay."""


def mapped(thing: Thing, change: Change, done: dict[int, Any] | None = None) -> Thing:
    """The tree with its parts changed; itself if none is. Shared parts stay shared.

    done: the parts seen so far by their ids, to share them among trees whose parts all live meanwhile.
    """
    done = {} if done is None else done
    if id(thing) not in done:
        done[id(thing)] = _mapped(thing, change, done)
    found: Thing = done[id(thing)]
    return found


def _mapped(thing: Any, change: Change, done: dict[int, Any]) -> Any:
    if (changed := change(thing)) is not thing:
        return changed
    if is_dataclass(thing) and not isinstance(thing, type):
        parts = {part.name: getattr(thing, part.name) for part in fields(thing) if part.init}
        new = {name: made for name, part in parts.items() if (made := mapped(part, change, done)) is not part}
        return replace(thing, **new) if new else thing
    if isinstance(thing, list | tuple):
        walked = [mapped(part, change, done) for part in thing]
        return thing if all(made is part for made, part in zip(walked, thing)) else type(thing)(walked)
    return thing


def moved(thing: Thing, device: torch.device, done: dict[int, Any] | None = None) -> Thing:
    """The tree with all of its tensors and weights on a device; itself if they are there."""
    return mapped(thing, partial(_on, device), done)


def _on(device: torch.device, part: Any) -> Any:
    if isinstance(part, Weight | Rope):
        return part if part.device == device else part.to(device)
    return part.to(device) if isinstance(part, Tensor) else part
