"""A mixture of experts as a half of a block, from the stream and back to it.

It gives bit for bit what its experts give one after the other, with the router's weights as near as rounding allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cpu import fused_experts
from lmstate.ops.halves import Half, simple, tensors_of
from lmstate.ops.norm import Norm
from lmstate.ops.weight import Weight

if TYPE_CHECKING:
    from lmstate.ops.cpu import Library


class RouterParts(Protocol):
    """How experts are chosen and weighed; see `models.moe.Router`."""

    @property
    def weight(self) -> Weight: ...
    @property
    def top_k(self) -> int: ...
    @property
    def scoring(self) -> Literal["softmax", "sigmoid"]: ...
    @property
    def normalise(self) -> bool: ...
    @property
    def scale(self) -> float: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def correction(self) -> Tensor | None: ...
    @property
    def groups(self) -> int: ...
    @property
    def kept_groups(self) -> int: ...
    @property
    def group_score(self) -> Literal["best", "two best"]: ...
    @property
    def floor(self) -> float: ...


def choose_experts(logits: Tensor, router: RouterParts) -> tuple[Tensor, Tensor] | None:
    """Weights float32 and numbers int64 `[M, top_k]` of the experts that logits float32 `[M, N]` choose, best first.

    None where no native body runs. The choice of an `ExpertsHalf`, bit for bit.
    """
    library = dispatch.native(logits, router.correction)
    if library is None or logits.dtype != torch.float32:
        return None
    return fused_experts.choose(library.variant, logits, router)


class Expert(Protocol):
    """`down(act(gate) * up)` with gate | up = `up(x)`."""

    @property
    def up(self) -> Weight: ...
    @property
    def down(self) -> Weight: ...
    @property
    def act(self) -> str: ...
    @property
    def up_bias(self) -> Tensor | None: ...
    @property
    def down_bias(self) -> Tensor | None: ...


@dataclass(eq=False)
class ExpertsHalf(Half[bytes]):
    """`stream + scale * after(sum of weight * expert(norm(x)) + shared(norm(x)))`; see `models.moe`."""

    router: RouterParts
    experts: Sequence[Expert]
    shared: Expert | None = None
    shared_gate: Weight | None = None
    weigh_input: bool = False
    norm: Norm | None = None
    after: Norm | None = None
    scale: float = 1.0
    table: Tensor | None = field(default=None, init=False)
    """What the arguments point to, beside weights."""

    @property
    def _all(self) -> list[Expert]:
        return [*self.experts, *([] if self.shared is None else [self.shared])]

    @cached_property
    def ends(self) -> tuple[Weight, Weight]:
        return self.router.weight, self.experts[0].down

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        gates = [self.router.weight, *([] if self.shared_gate is None else [self.shared_gate])]
        return (*gates, *(weight for expert in self._all for weight in (expert.up, expert.down)))

    @cached_property
    def others(self) -> list[Tensor]:
        biases = [bias for expert in self._all for bias in (expert.up_bias, expert.down_bias)]
        return tensors_of(self.norm, self.after, self.router.bias, self.router.correction, *biases)

    def pack(self, library: Library) -> bytes | None:
        acts = {expert.act for expert in self._all}
        if len(acts) > 1 or not acts <= set(library.GATES) or not simple(self.norm, self.after):
            return None
        arguments, self.table = fused_experts.experts(self, library.GATES[acts.pop()])
        return arguments
