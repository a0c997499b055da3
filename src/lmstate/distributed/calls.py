"""The calls of a state that all ranks make: one table, which rank 0 tells from and the others act by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lmstate.state import State

Arguments: TypeAlias = dict[str, Any]
"""Arguments of a method by their names."""


def _all_of(arguments: Arguments) -> Arguments:
    return arguments


def _as_heard(state: State, arguments: Arguments) -> Arguments:
    return arguments


class MirroredCall(NamedTuple):
    """A method of `State` that the others call after rank 0, where it is not refused.

    told: the arguments in JSON values. heard: the arguments of another rank, of those. unless_lost: rank 0 makes the
    call alone once the others are lost.
    """

    method: Callable[..., Any]
    told: Callable[[Arguments], Arguments] = _all_of
    heard: Callable[[State, Arguments], Arguments] = _as_heard
    unless_lost: bool = False


def _shape_of_logits(arguments: Arguments) -> Arguments:
    logits = arguments["logits"]
    return {**arguments, "logits": None if logits is None else logits.ndim}


def _unknown_logits(state: State, arguments: Arguments) -> Arguments:
    """Logits without numbers, of a shape that tells which tokens have some: rank 0 alone computes them."""
    if (dimensions := arguments["logits"]) is None:
        return arguments
    step, kept = state.planned.step, arguments["kept"]
    width = step.width if kept is None else max(kept)
    return {**arguments, "logits": torch.zeros(step.rows, *[width] * (dimensions - 2), 0)}


def _whether_last(arguments: Arguments) -> Arguments:
    return {"last": arguments["last"] is not None}


def _unknown_last(state: State, arguments: Arguments) -> Arguments:
    return {"last": torch.zeros(state.rows, 0) if arguments["last"] else None}


CALLS: Mapping[str, MirroredCall] = {
    call.method.__name__: call
    for call in (
        MirroredCall(State.backlog),
        MirroredCall(State.plan_backlog),
        MirroredCall(State.commit_backlog, _whether_last, _unknown_last),
        MirroredCall(State.plan),
        MirroredCall(State.record_logits, _shape_of_logits, _unknown_logits),
        MirroredCall(State.commit),
        MirroredCall(State.commit_path),
        MirroredCall(State.discard, unless_lost=True),
        MirroredCall(State.queue),
        MirroredCall(State.expect),
        MirroredCall(State.rewind),
        MirroredCall(State.mark),
        MirroredCall(State.select),
        MirroredCall(State.remove),
        MirroredCall(State.drop),
    )
}
"""By the names of the methods."""


def listed(value: Any, depth: int = 2) -> Any:
    """Numbers and lists of numbers as lists, which can be read twice; logits, one number or None as they are."""
    if not isinstance(value, Iterable) or isinstance(value, str):
        return value
    if isinstance(value, Tensor) and (value.ndim == 0 or value.is_floating_point()):
        return value
    return [listed(each, depth - 1) for each in value] if depth > 1 else list(value)
