"""A model whose numbers lie as torch reads them: what a traced graph, which calls no native body, is to hold."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from lmstate.ops import SqueezedWeight

Thing = TypeVar("Thing")


def plain(thing: Thing) -> Thing:
    """A tree of dataclasses, lists and tuples with every `SqueezedWeight` as a matrix; itself if there is none."""
    done: dict[int, Any] = {}  # what is shared stays shared

    def walk(thing: Any) -> Any:
        if id(thing) not in done:
            done[id(thing)] = made(thing)
        return done[id(thing)]

    def made(thing: Any) -> Any:
        if isinstance(thing, SqueezedWeight):
            return thing.plain()
        if is_dataclass(thing) and not isinstance(thing, type):
            parts = {part.name: getattr(thing, part.name) for part in fields(thing) if part.init}
            changed = {name: new for name, part in parts.items() if (new := walk(part)) is not part}
            return replace(thing, **changed) if changed else thing
        if isinstance(thing, list | tuple):
            walked = [walk(part) for part in thing]
            return thing if all(new is part for new, part in zip(walked, thing)) else type(thing)(walked)
        return thing

    return walk(thing)
