"""Arguments of a mixture of experts to the fused call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmstate.ops.cpu import abi
from lmstate.ops.cpu.abi import GATES, SUBLAYER_BYTES, SublayerKind, product_kind
from lmstate.ops.cpu.arguments import factor, norm_fields, optional_pointer, simple

if TYPE_CHECKING:
    from lmstate.ops.types.sublayers import Expert, MoESublayer, RouterParams


class MoEArguments(bytes):
    """The arguments of a mixture, which hold the table of its experts that they point to.

    Who keeps the arguments, a captured graph say, keeps the table: the packed sublayer may be packed again meanwhile.
    """

    table: Tensor

    def __new__(cls, arguments: bytes, table: Tensor) -> MoEArguments:
        self = super().__new__(cls, arguments)
        self.table = table
        return self


def pack(of: MoESublayer) -> MoEArguments | None:
    """The arguments of a mixture; None where no body runs it."""
    acts = {expert.act for expert in _all(of)}
    if len(acts) > 1 or not acts <= set(GATES) or not simple(of.norm, of.post_norm):
        return None
    router, shared, shared_gate = of.router, of.shared, of.shared_gate
    inputs, outputs = of.in_features, of.out_features
    count, hidden = len(of.experts), of.experts[0].down.in_features
    if router.weight.shape != (count, inputs) or not 0 < router.top_k <= router.topk_groups * (count // router.groups):
        raise ValueError(f"{router.weight} does not fit a choice of {router.top_k} of {count} experts")
    if any(each.down.in_features != hidden for each in of.experts):
        raise ValueError("experts of different widths")
    if shared_gate is not None and (shared is None or shared_gate.shape != (1, inputs)):
        raise ValueError(f"{shared_gate} does not fit a shared expert of {inputs} features")
    each = [_expert(expert, inputs, outputs) for expert in _all(of)]
    table = torch.frombuffer(bytearray(b"".join(each)), dtype=torch.uint8)
    norm, eps = norm_fields(of.norm, inputs)
    after, after_eps = norm_fields(of.post_norm, outputs)
    arguments = abi.MOE.pack(
        norm=norm, router=router.weight.storage.data_ptr(),
        bias=optional_pointer(router.bias, "the router's bias", (count,)),
        experts=table.data_ptr(), shared_gate=0 if shared_gate is None else shared_gate.storage.data_ptr(),
        after=after, inputs=inputs, outputs=outputs, router_kind=product_kind(router.weight),
        shared_gate_kind=0 if shared_gate is None else product_kind(shared_gate), shared=shared is not None,
        gate=GATES[acts.pop()], scale_input=of.scale_input, norm_eps=eps, after_eps=after_eps,
        residual_scale=factor(of.scale), **_choice_fields(router, count),
    )  # fmt: skip
    return MoEArguments(abi.sublayer(SublayerKind.MOE, arguments).ljust(SUBLAYER_BYTES, b"\0"), table)


def choose_experts(body: Callable[[bytes], int], logits: Tensor, router: RouterParams) -> tuple[Tensor, Tensor]:
    """`ops.choose_experts`: logits float32 `[M, N]` -> weights and ids `[M, top_k]`."""
    tokens, count = logits.shape
    top_k = router.top_k
    if count != router.weight.out_features or not 0 < top_k <= router.topk_groups * (count // router.groups):
        raise ValueError(f"logits {list(logits.shape)} do not fit a choice of {top_k} of {router.weight.out_features}")
    fields = abi.MOE.pack_some(**_choice_fields(router, count))
    of = ctypes.create_string_buffer(fields, len(fields))
    scores = logits.clone(memory_format=torch.contiguous_format)  # they become the scores
    weights, chosen = (torch.empty(tokens, top_k, dtype=dtype) for dtype in (torch.float32, torch.int32))
    room = torch.empty(2 * count, dtype=torch.float32)
    arguments = abi.CHOOSE_EXPERTS.pack(
        of=ctypes.addressof(of), scores=scores.data_ptr(), weights=weights.data_ptr(), chosen=chosen.data_ptr(),
        room=room.data_ptr(), tokens=tokens,
    )  # fmt: skip
    body(arguments)
    return weights, chosen.long()


def _choice_fields(router: RouterParams, count: int) -> dict[str, float]:
    """The fields of `abi.MOE` that say which of `count` experts a token chooses."""
    return {
        "correction": optional_pointer(router.e_score_correction_bias, "the correction", (count,)),
        "count": count,
        "top_k": router.top_k,
        "sigmoid": router.scoring == "sigmoid",
        "normalize": router.normalize,
        "groups": router.groups,
        "topk_groups": router.topk_groups,
        "top2": router.group_score == "top2",
        "scale": router.scale,
        "floor": router.floor,
    }


def _all(of: MoESublayer) -> list[Expert]:
    return [*of.experts, *([] if of.shared is None else [of.shared])]


def _expert(expert: Expert, inputs: int, outputs: int) -> bytes:
    up, down = expert.up, expert.down
    hidden = down.in_features
    if up.shape != (2 * hidden, inputs) or down.out_features != outputs:
        raise ValueError(f"{up} and {down} do not fit {inputs} features and {outputs}")
    return abi.EXPERT.pack(
        up=up.storage.data_ptr(), down=down.storage.data_ptr(),
        up_bias=optional_pointer(expert.up_bias, "the bias of up", (2 * hidden,)),
        down_bias=optional_pointer(expert.down_bias, "the bias of down", (outputs,)),
        hidden=hidden, up_kind=product_kind(up), down_kind=product_kind(down),
    )  # fmt: skip
