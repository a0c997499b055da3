"""Steps that a compiled graph can hold: on tensors alone, with addresses that never change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lmstate.errors import StateError, UnsupportedError
from lmstate.models.fingerprint import weights_in
from lmstate.models.layers.rope import Rope
from lmstate.models.mapped import mapped
from lmstate.ops import Bfloat12Weight, Weight
from lmstate.state import State
from lmstate.state.kv.policies.per_layer import Policies
from lmstate.state.step import Step

STATIC_CHUNK = 128
"""Tokens of a row that one forward of a static state takes. Its rings hold as many beside their window."""


def check_static(
    capacity: int | None,
    kv: torch.dtype | Policies | None = None,
    carries: int = 32,
    *,
    devices: Sequence[torch.device],
    offloads: bool = False,
    max_positions: int | None,
    dynamic_ropes: Iterable[Rope],
) -> None:
    """Raise `StateError` or `UnsupportedError` if a model has no static state of this capacity and storage.

    devices: of the blocks. offloads: whether weights of some are in host memory. max_positions: how many the model has
    learned. dynamic_ropes: those whose frequencies depend on a text's length.
    """
    if kv is not None and not isinstance(kv, torch.dtype):
        raise UnsupportedError(
            f"a static state was asked for with kv={kv}; it stores all keys and values as floats: give a dtype or "
            "nothing, or make a state that is not static"
        )
    if carries != 32:
        raise UnsupportedError(
            f"a static state was asked for with carries={carries}; it stores them in 32 bits: leave carries out, "
            "or make a state that is not static"
        )
    if len(set(devices)) > 1:
        told = ", ".join(map(str, dict.fromkeys(devices)))
        raise UnsupportedError(
            f"a static state was asked for, and the model lies on {told}; one graph runs on one device: load the model "
            "on one, or make a state that is not static"
        )
    if offloads:
        raise UnsupportedError(
            "a static state was asked for, and the model has weights in host memory, which one graph cannot bring to "
            "the device: load it without offload, or make a state that is not static"
        )
    if capacity is None:
        raise StateError("new_state(static=True) was asked for without a capacity; say how many tokens a row may hold")
    if max_positions is not None and capacity > max_positions:
        raise UnsupportedError(
            f"a static state of {capacity} tokens was asked for, but this model has learned {max_positions} positions: "
            f"use capacity={max_positions} or less"
        )
    for rope in dynamic_ropes:
        if rope.original_max_positions is not None and capacity > rope.original_max_positions:
            raise UnsupportedError(
                f"a static state of {capacity} tokens was asked for, but this model's rotary frequencies change at "
                f"{rope.original_max_positions} tokens, which one graph cannot follow: use "
                f"capacity={rope.original_max_positions} or less, or a state that is not static"
            )


def mark_static(weights: Any, state: State) -> None:
    """Tell torch's compiler that neither the weights of a tree nor the state ever move.

    Otherwise a CUDA graph copies them to a place of its own before every step, and refuses to change them in place. The
    addresses are not guards: for another state of the same size the graph is recorded again, and not compiled again.
    """
    held = [part.tensors().values() if isinstance(part, Weight) else [part] for _, part in weights_in(weights)]
    for tensor in itertools.chain(*held, state.static_tensors()):
        torch._dynamo.mark_static_address(tensor, guard=False)


def device_logits(
    hidden: Tensor, head: Callable[[Tensor], Tensor], step: Step, room: Tensor, logits: Literal["last", "all"]
) -> Tensor:
    """The logits of a `DeviceStep`: hidden `[R, T, E]` -> float32 `[R, V]` or `[R, T, V]`; NaN for rows without room.

    head: hidden states `[..., E]` -> float32 logits `[..., V]`.
    """
    counts = step.counts_t
    if logits == "all":
        out = head(hidden)
        real = torch.arange(hidden.shape[1], device=out.device) < counts[:, None]
        return out.masked_fill(~real[..., None], 0.0).masked_fill(~room[:, None, None], float("nan"))
    index = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
    out = head(hidden.gather(1, index)[:, 0])
    return out.masked_fill((counts == 0)[:, None], float("nan"))


Thing = TypeVar("Thing")


def traceable(thing: Thing) -> Thing:
    """A tree of dataclasses, lists and tuples with every `Bfloat12Weight` as a matrix; itself if there is none."""
    return mapped(thing, lambda part: part.plain() if isinstance(part, Bfloat12Weight) else part)
