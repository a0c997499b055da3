"""Recurrent layers of the cache: convolution tails and carries, alone or beside attention.

Why these are not `lmstate.state.RecurrentState`: transformers never shows the cache what a layer folded, only the carry
that came out, and some models change it in place. Nothing here can be folded again; so a layer only hands out copies of
its carry and takes them back, and `StateCache` feeds the model again from there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionLayer

from lmstate.errors import SnapshotError
from lmstate.integrations.transformers.cache.layers.base import (
    RewindableLayer,
    Tensors,
    chosen,
    repeated,
    storage_bytes,
    whole,
)
from lmstate.integrations.transformers.cache.layers.growable import frozen
from lmstate.integrations.transformers.cache.layers.sharing import Sharing


class RecurrentLayer(LinearAttentionLayer, RewindableLayer):
    """Convolution tails `[R, F, C]` and carries `[R, ...]`, by state index. It has no length of its own.

    Going back is the business of `StateCache`, so nothing is recorded here and models take their single-token path.
    """

    kind = "fold"
    conv_kernel_size: dict[int, Any]  # of a state that has none, None
    dtype: Any
    device: Any
    is_croppable = True
    is_compileable = False  # the cache around it counts tokens on the host

    def activate_past_recording(self) -> None:
        """Nothing to do: see the class."""

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        self._sharing = Sharing()

    def thaw(self) -> None:
        """Copy what must not be written: what a fork shares, and what was made in inference mode where that is over."""
        shared = not self._sharing.alone
        for states in (self.conv_states, self.recurrent_states):
            for i, held in states.items():
                if held is not None and (shared or frozen(held)):
                    states[i] = held.clone()
        if shared:
            self._sharing.leave()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError("a recurrent layer goes back with the whole StateCache: call crop on that")

    def reset(self) -> None:
        self.put_carry({})

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select(repeated(self.rows(), repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select(chosen(indices, self.rows() or 0))

    # ---- RewindableLayer

    def reach(self, length: int) -> int:
        return length

    def attention_reach(self, length: int) -> int:
        return 0

    def cut(self, length: int, to: int) -> None:
        """Nothing: a carry has no past, and the cache puts back an earlier one."""

    def select(self, rows: Tensor) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for i, held in states.items():
                if held is not None:
                    states[i] = held.index_select(0, rows.to(held.device))
        self._sharing.leave()

    def rows(self) -> int | None:
        return next((held.shape[0] for held in self._states().values()), None)

    def capture(self) -> Tensors:
        return self.carry()

    def check(self, length: int, tensors: Tensors) -> None:
        known = {f"{part}.{i}" for part in ("conv", "carry") for i in range(self.number_of_states)}
        if not set(tensors) <= known:
            raise SnapshotError(f"a recurrent layer holds {sorted(known)}; the snapshot has {sorted(tensors)}")
        for name, held in self._states().items():
            axes = slice(1, 2 if name.startswith("conv") else None)  # a convolution may hold more inputs than it needs
            if name in tensors and tensors[name].shape[axes] != held.shape[axes]:
                raise SnapshotError(
                    f"the snapshot has a state {list(tensors[name].shape)} for a recurrent layer, and the model's is "
                    f"{list(held.shape)}: the file was changed, or is of another model"
                )

    def put(self, length: int, tensors: Tensors) -> None:
        self.put_carry(tensors)

    # ---- the recurrent part alone

    def carry(self) -> Tensors:
        """Copies of the tensors `conv.{i}` and `carry.{i}`, as far as the model uses them."""
        return {name: whole(held) for name, held in self._states().items()}

    def put_carry(self, tensors: Tensors) -> None:
        """Become what `carry` gave; copies are taken."""
        for i in range(self.number_of_states):
            conv, carry = tensors.get(f"conv.{i}"), tensors.get(f"carry.{i}")
            self.conv_states[i] = None if conv is None else whole(conv)
            self.recurrent_states[i] = None if carry is None else whole(carry)
            self.is_conv_states_initialized[i] = conv is not None
            self.is_recurrent_states_initialized[i] = carry is not None
            self.has_previous_state[i] = conv is not None or carry is not None
            if conv is not None:
                self.conv_kernel_size[i] = conv.shape[-1]
                self.dtype, self.device = conv.dtype, conv.device
        self._sharing.leave()

    def nbytes(self) -> int:
        return storage_bytes(list(self._states().values()))

    def _states(self) -> Tensors:
        held = {f"conv.{i}": self.conv_states[i] for i in range(self.number_of_states)}
        held |= {f"carry.{i}": self.recurrent_states[i] for i in range(self.number_of_states)}
        return {name: tensor for name, tensor in held.items() if tensor is not None}


class ConvLayer(RecurrentLayer):
    """Convolution tails alone. While the past is recorded they keep earlier inputs: going back recomputes nothing."""

    kind = "conv"
    MOST = 256  # inputs kept while recording, if no `crop` ever decides about any

    def activate_past_recording(self) -> None:
        self.record_past = True

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        if conv_kernel_size is None and not self.is_conv_states_initialized[state_idx]:
            self.record_past = False  # how much of these inputs is the tail is not known
        full = super().update_conv_state(conv_states, state_idx, conv_kernel_size=conv_kernel_size, **kwargs)
        kernel = self.conv_kernel_size[state_idx]
        if self.record_past and full.shape[-1] > kernel + max(self.MOST, 2 * conv_states.shape[-1]):
            self.conv_states[state_idx] = full[..., -kernel - self.MOST :]
        return full

    def reach(self, length: int) -> int:
        if any(self.is_recurrent_states_initialized.values()) or not self.record_past:
            return length
        spare = [held.shape[-1] - self.conv_kernel_size[i] for i, held in self.conv_states.items() if held is not None]
        return max(0, length - max(0, min(spare, default=0)))

    def cut(self, length: int, to: int) -> None:
        for i, held in self.conv_states.items():
            if held is not None and to != length:
                self.conv_states[i] = held[..., : held.shape[-1] - (length - to)]

    def trim(self) -> None:
        """Let go of what only a rewind would need."""
        for i, held in self.conv_states.items():
            if held is not None and self.record_past:
                self.conv_states[i] = held[..., -self.conv_kernel_size[i] :]

    def carry(self) -> Tensors:
        tensors = super().carry()
        for i, held in self.conv_states.items():
            if held is not None:  # exactly a tail: no more than that, and zeros where the text was shorter
                kernel = self.conv_kernel_size[i]
                tail = held[..., -kernel:]
                tensors[f"conv.{i}"] = whole(F.pad(tail, (kernel - tail.shape[-1], 0)))
        return tensors


def is_fold(layer: object) -> bool:
    """Whether going back in this layer takes a carry from before."""
    return isinstance(layer, RecurrentLayer) and not isinstance(layer, ConvLayer)
