"""The weights of a model that trains: every tensor of the checkpoint is a leaf, and what a family builds follows it.

A family's `build` asks for tensors by name, stacks some, shifts or transposes others. Here all that is done to leaves
while autograd watches, so that gradients arrive at the checkpoint's own tensors under the checkpoint's own names,
whatever the family made of them. A model is built again for each forward that a gradient is to follow: matrices that
are stacked along their outputs are in one piece of memory whose parts the leaves are, so that this copies little.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.conversion_bar import ConversionBar
from lmstate.checkpoints.loader import Make, WeightLoader
from lmstate.checkpoints.placement import DevicePlacement
from lmstate.checkpoints.renamed import file_name, file_source
from lmstate.checkpoints.source import Source, floats
from lmstate.errors import ModelError
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.grouped import FLOAT_KINDS, FloatWeight

BUFFERS = ("e_score_correction_bias", "balancing_biases", "expert_bias", "layer_scalar", "act_fn.beta", "act_fn.eps")
"""Endings of the names of tensors that are constant, or moved by other rules than gradients: no parameters."""


class Leaves:
    """The tensors of a checkpoint that were asked for, by their names in it; made when they are first asked for."""

    def __init__(self, source: Source, kind: str, device: torch.device) -> None:
        self.source, self.device = file_source(source), device
        self.dtype = FLOAT_KINDS[kind]
        self.tensors: dict[str, Tensor] = {}
        self.stacks: dict[str, Tensor] = {}
        """Tensors that hold several matrices one below the other, by the names of the matrices, which are views."""

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        """The leaf of that name, made in `dtype` if there is none yet."""
        if name not in self.tensors:
            read = floats(self.source.read(name))
            leaf = read.to(self.device, dtype, copy=True).contiguous()
            self.tensors[name] = leaf.requires_grad_(not name.endswith(BUFFERS))
        return self.tensors[name]

    def stack(self, names: Sequence[str]) -> Tensor:
        """Matrices in one, `[sum of N, K]`, of which the leaves are parts; copied where they are parts of another."""
        label = "+".join(names)
        if label not in self.stacks and not any(name in self.tensors for name in names) and len(set(names)) > 1:
            whole = torch.cat([floats(self.source.read(name)).to(self.device, self.dtype) for name in names])
            first = 0
            for name in names:
                last = first + self.source.shape(name)[0]
                self.tensors[name] = whole[first:last].detach().requires_grad_()
                first = last
            self.stacks[label] = whole
        leaves = [self.get(name, self.dtype) for name in names]
        if label in self.stacks:
            self._gather(label, leaves)
            stacked: Tensor = _Stacked.apply(self.stacks[label], *leaves)
            return stacked
        return torch.cat(leaves)

    def _gather(self, label: str, leaves: Sequence[Tensor]) -> None:
        """Bring leaves that were given memory of their own (`p.data = ...`) back into their stack."""
        at = self.stacks[label].data_ptr()
        for leaf in leaves:
            if leaf.data_ptr() != at:
                self.stacks[label] = whole = torch.cat([leaf.detach() for leaf in leaves])
                for part, own in zip(whole.split([len(leaf) for leaf in leaves]), leaves):
                    own.data = part
                return
            at += leaf.nbytes

    def detached(self) -> Leaves:
        """Other leaves with the same numbers, whose gradients are their own."""
        twin = copy.copy(self)
        twin.tensors = {
            name: leaf.detach().requires_grad_(leaf.requires_grad) for name, leaf in self.tensors.items()
        }  # fmt: skip
        return twin

    @property
    def version(self) -> int:
        """A number that changes when a leaf is written into, or given other memory."""
        return hash(tuple((leaf._version, leaf.data_ptr()) for leaf in self.tensors.values()))


class _Stacked(torch.autograd.Function):
    """The memory that leaves are parts of, as what is made of them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *leaves: Tensor) -> Tensor:
        ctx.heights = [len(leaf) for leaf in leaves]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads[0].split(ctx.heights)


class TrainableWeights(WeightLoader):
    """Hands out what is made of leaves. One object is for one build; `leaves` outlive it."""

    def __init__(self, source: Source, leaves: Leaves, dtype: torch.dtype, context_size: int | None) -> None:
        self.source, self.leaves, self.dtype = source, leaves, dtype
        self.config = Config(source.config, f"config of {source.path}")
        self.placement, self.device = DevicePlacement((leaves.device,)), leaves.device
        self._made: dict[str, Weight] = {}
        self._asked: set[str] = set()
        self._unbound: dict[str, tuple[Tensor, ...]] = {}
        self._packed, self._bar, self._errors = None, ConversionBar(False, 0), {}
        self.heads, self.context_size = False, context_size

    def over(self, source: Source) -> TrainableWeights:
        return TrainableWeights(source, self.leaves, self.dtype, self.context_size)

    @overload
    def tensor(self, name: str, shape: tuple[int, ...] | None = None, optional: Literal[False] = False) -> Tensor: ...
    @overload
    def tensor(self, name: str, shape: tuple[int, ...] | None = None, *, optional: Literal[True]) -> Tensor | None: ...
    def tensor(self, name: str, shape: tuple[int, ...] | None = None, optional: bool = False) -> Tensor | None:
        if optional and not self.has(name):
            return None
        self.expect(name, shape)
        self._asked.add(name)
        return self.leaves.get(file_name(self.source, name), torch.float32).float()

    def stacked(self, name: str, index: int, shape: tuple[int, int, int] | None = None) -> Weight:
        label = f"{name}[{index}]"
        if label not in self._made:
            whole = self.shape(name)
            if len(whole) != 3 or not 0 <= index < whole[0]:
                raise ModelError(f"{self.source.path}: tensor {name!r} of shape {list(whole)} has no matrix {index}")
            self.expect(name, shape)
            self._asked.add(name)
            self._made[label] = FloatWeight(self._experts(name)[index])
        return self._made[label]

    def derived(
        self,
        label: str,
        *names: str,
        make: Make,
        shape: tuple[int, int],
        stored: str | None = None,
        of: int | None = None,
    ) -> Weight:
        if label not in self._made:
            for name in names:
                self.shape(name)
            self._asked.update(names)
            made = make(*(self._leaf(name) if of is None else self._experts(name)[of] for name in names))
            assert isinstance(made, Tensor)
            self._expect(label, tuple(made.shape), shape)
            self._made[label] = FloatWeight(made)
        return self._made[label]

    def _stack(self, label: str, names: Sequence[str], order: Callable[[], Tensor] | None) -> Weight:
        self._asked.update(names)
        matrix = self._leaf(names[0]) if len(names) == 1 else self.leaves.stack(self._in_file(names))
        return FloatWeight(matrix if order is None else matrix[order().to(matrix.device)])

    def _experts(self, name: str) -> tuple[Tensor, ...]:
        """Taken apart at once: a gradient for each of many experts would be as large as all of them."""
        if name not in self._unbound:
            self._unbound[name] = self._leaf(name).unbind()
        return self._unbound[name]

    def _leaf(self, name: str) -> Tensor:
        return self.leaves.get(file_name(self.source, name), self.leaves.dtype)

    def _in_file(self, names: Sequence[str]) -> list[str]:
        return [file_name(self.source, name) for name in names]
