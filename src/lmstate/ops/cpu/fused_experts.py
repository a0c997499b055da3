"""A mixture of experts as a half of a block: its arguments to the call of `fused`, checked as there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmstate.ops import cpu
from lmstate.ops.cpu.arguments import WEIGHT_KINDS, factor, function, norm_fields, optional_pointer
from lmstate.ops.cpu.fused import HALF

if TYPE_CHECKING:
    from lmstate.ops.expert_halves import Expert, ExpertsHalf, RouterParts

_EXPERTS = Struct("q7P14q5d")
_TABLE = Struct("4P3q")
_CHOOSE = Struct("5Pq")


def experts(half: ExpertsHalf, gate: int) -> tuple[bytes, Tensor]:
    """The arguments of a mixture with a gate of `Library.GATES`; and the table of its experts, to which they point."""
    router, shared, shared_gate = half.router, half.shared, half.shared_gate
    inputs, outputs, count, hidden = half.inputs, half.outputs, len(half.experts), half.experts[0].down.in_features
    if router.weight.shape != (count, inputs) or not 0 < router.top_k <= router.kept_groups * (count // router.groups):
        raise ValueError(f"{router.weight} does not fit a choice of {router.top_k} of {count} experts")
    if any(each.down.in_features != hidden for each in half.experts):
        raise ValueError("experts of different widths")
    if shared_gate is not None and (shared is None or shared_gate.shape != (1, inputs)):
        raise ValueError(f"{shared_gate} is no gate of a shared expert of {inputs} features")
    each = [_expert(expert, inputs, outputs) for expert in (*half.experts, *([] if shared is None else [shared]))]
    table = torch.frombuffer(bytearray(b"".join(each)), dtype=torch.uint8)
    norm, eps = norm_fields(half.norm, inputs)
    after, after_eps = norm_fields(half.after, outputs)
    arguments = _EXPERTS.pack(
        4, norm, router.weight.storage.data_ptr(), optional_pointer(router.bias, "the router's bias", (count,)),
        optional_pointer(router.correction, "the correction", (count,)), table.data_ptr(),
        0 if shared_gate is None else shared_gate.storage.data_ptr(), after, inputs, outputs,
        WEIGHT_KINDS[router.weight.kind], 0 if shared_gate is None else WEIGHT_KINDS[shared_gate.kind], count,
        router.top_k, shared is not None, gate, router.scoring == "sigmoid", router.normalise, router.groups,
        router.kept_groups, router.group_score == "two best", half.weigh_input,
        eps, after_eps, factor(half.scale), router.scale, router.floor,
    )  # fmt: skip
    return arguments.ljust(HALF, b"\0"), table


def choose(variant: str, logits: Tensor, router: RouterParts) -> tuple[Tensor, Tensor]:
    """`choose_experts`: logits float32 `[M, N]` -> weights and numbers `[M, top_k]`."""
    tokens, count = logits.shape
    top_k = router.top_k
    if count != router.weight.out_features or not 0 < top_k <= router.kept_groups * (count // router.groups):
        raise ValueError(f"logits {list(logits.shape)} do not fit a choice of {top_k} of {router.weight.out_features}")
    half = _EXPERTS.pack(
        4, 0, 0, 0, optional_pointer(router.correction, "the correction", (count,)), 0, 0, 0, 0, 0, 0, 0, count,
        top_k, 0, 0, router.scoring == "sigmoid", router.normalise, router.groups,
        router.kept_groups, router.group_score == "two best", 0, 0.0, 0.0, 0.0, router.scale, router.floor,
    ).ljust(HALF, b"\0")  # fmt: skip
    scores = logits.clone(memory_format=torch.contiguous_format)  # they become the scores
    weights, chosen = torch.empty(tokens, top_k), torch.empty(tokens, top_k, dtype=torch.int32)
    room = torch.empty(2 * count)
    held = ctypes.create_string_buffer(half, len(half))
    pointers = ctypes.addressof(held), scores.data_ptr(), weights.data_ptr(), chosen.data_ptr()
    _choose(variant)(_CHOOSE.pack(*pointers, room.data_ptr(), tokens))
    return weights, chosen.long()


@lru_cache
def _choose(variant: str) -> Callable[[bytes], int]:
    return function(ctypes.CDLL(str(cpu.path_of(variant))), "lmstate_choose")


def _expert(expert: Expert, inputs: int, outputs: int) -> bytes:
    up, down = expert.up, expert.down
    hidden = down.in_features
    if up.shape != (2 * hidden, inputs) or down.out_features != outputs:
        raise ValueError(f"{up} and {down} do not fit {inputs} features and {outputs}")
    return _TABLE.pack(
        up.storage.data_ptr(), down.storage.data_ptr(),
        optional_pointer(expert.up_bias, "the bias of up", (2 * hidden,)),
        optional_pointer(expert.down_bias, "the bias of down", (outputs,)),
        hidden, WEIGHT_KINDS[up.kind], WEIGHT_KINDS[down.kind],
    )  # fmt: skip
