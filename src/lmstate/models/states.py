"""The states of a model: what one may be, and whether a state is of this model."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from lmstate.checkpoints.hub import served_name
from lmstate.errors import StateError, UnsupportedError
from lmstate.models.block import new_layers
from lmstate.models.compiled import STATIC_CHUNK, check_static, mark_static, traceable
from lmstate.models.parts import ModelParts
from lmstate.state import Layout, State
from lmstate.state.blocks import BlockPool
from lmstate.state.inference_mode import ordinary_tensors
from lmstate.state.kv.policies.per_layer import Policies, guarded, policies_of
from lmstate.state.snapshot import differences
from lmstate.state.validate import flag, whole_number

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ROWS = 2**20  # of a state: more are a slip, and would fill the memory before anything is said
DEVICE_CHUNK = 2048  # tokens of a row that one forward takes where each operation is a launch; `Layout.chunk` elsewhere


@dataclass(eq=False, repr=False)
class ModelStates(ModelParts):
    """A model as far as its states go."""

    state_type: ClassVar[type[State]] = State
    """Class of its states."""

    def new_state(
        self,
        rows: int = 1,
        capacity: int | None = None,
        rewind: int = 16,
        kv: torch.dtype | Policies | None = None,
        static: bool = False,
        pool: BlockPool | None = None,
        carries: int = 32,
    ) -> State:
        """An empty state of `rows` sequences.

        `capacity`: the most tokens that a row may hold (None: any number); more than the model was made for warn.
        `rewind`: how many tokens back a rewind recomputes nothing. `kv`: how keys and values are stored and which are
        forgotten: a policy of `lmstate.kv`, one for each layer (`kv.PerLayer`, or a function of the layer's number), or
        a dtype; by default all, in the model's. `static`: everything is made at once and stays where it is, for
        `decode_step` in a compiled graph; it needs a `capacity`, keeps its number of rows, and takes no policies.
        `pool`: counts the blocks in which keys, values and latents are, together with those of other states, and may
        limit their bytes; by default one of its own. `carries`: bits of what recurrences sum over tokens, 32, 16 or 8.
        With 16 or 8 it is rounded at every multiple of 64 positions, where marks and snapshots then store that many.
        """
        rows, rewind = whole_number(rows, "rows"), whole_number(rewind, "rewind")
        capacity = None if capacity is None else whole_number(capacity, "capacity")
        for name, value, least in (("rows", rows, 1), ("capacity", capacity, 1), ("rewind", rewind, 0)):
            if value is not None and value < least:
                raise StateError(f"new_state({name}={value}) was asked for; {name} is at least {least}")
        made_for = max(self.context_size or 0, self.config.max_positions or 0)
        if capacity is not None and 0 < made_for < capacity and not self.network.dynamic_ropes:
            warnings.warn(
                f"new_state(capacity={capacity}) was asked for, and the model was made for {made_for} tokens: "
                "answers to longer texts may be nonsense; lmstate.load(..., context_size=...) stretches its positions",
                UserWarning,
                stacklevel=2,
            )
        if rows > MOST_ROWS:
            raise StateError(f"new_state(rows={rows}) was asked for; a state has at most {MOST_ROWS} rows")
        if isinstance(kv, torch.dtype) and kv not in KV_DTYPES:
            known = ", ".join(map(str, KV_DTYPES))
            raise StateError(f"new_state(kv={kv}) was asked for; keys and values are stored in {known}")
        if not isinstance(pool, BlockPool | None):
            raise StateError(f"new_state(pool={pool!r:.80}) was asked for; give a lmstate.BlockPool")
        if whole_number(carries, "carries") not in (32, 16, 8):
            raise StateError(f"new_state(carries={carries}) was asked for; carries are stored in 32, 16 or 8 bits")
        if flag(static, "static"):
            check_static(
                capacity,
                kv,
                carries,
                devices=self.devices,
                offloads=bool(self.network.offloaded),
                max_positions=self.max_positions,
                dynamic_ropes=self.network.dynamic_ropes,
            )
        dtype = kv if isinstance(kv, torch.dtype) else self.dtype
        on_processor = any(device.type == "cpu" for device in self.devices)
        chunk = STATIC_CHUNK if static else Layout.chunk if on_processor else DEVICE_CHUNK
        if static and self.opening_length:
            raise UnsupportedError(
                "static=True was asked for, and this model has learned positions in front of each row, which a static "
                "state does not compute: leave static out"
            )
        capacity = None if capacity is None else self.opening_length + capacity
        layout = Layout(
            rows, self.device, dtype, capacity, rewind, chunk, max_positions=self.max_positions, static=static,
            pool=pool or BlockPool(), carries=carries,
        )  # fmt: skip
        state = self._new_state(layout, None if isinstance(kv, torch.dtype) else kv, heads=not static)
        if static:
            if self._traced is None or self._traced[0] is not self.network:
                self._traced = self.network, traceable(self.network)
            mark_static(self._traced[1], state)
        return state

    @ordinary_tensors
    def _new_state(self, layout: Layout, kv: Policies | None = None, heads: bool = False) -> State:
        """heads: with layers of the heads, to draft. Nothing is drafted where a policy evicts after each step."""
        count, ahead = len(self.blocks), self.opening_length
        policies = [layout.kv] * count if kv is None else [guarded(each, ahead) for each in policies_of(kv, count)]
        layouts = [replace(layout, kv=policy) for policy in policies]
        state = self.state_type(
            new_layers(self.blocks, layouts),
            layout,
            vocab_size=self.config.vocab_size,
            marks=self.config.marks,
            fingerprint=lambda: self.fingerprint,
            model_name=served_name(self.name) if self.name else "",
            user=weakref.ref(self),
            encode=None if self.encoder is None else lambda source: self.network.encoded(source),
            frequency_key=lambda length: self.network.frequency_key(length),
            hidden_size=self.config.hidden_size,
            axes=self.network.has_axes,
            whole_pictures=self.network.whole_pictures,
            opening=None if self.network.opening is None else self.network.opening.opening,
        )
        if heads and not state.evicts:
            policy = None if kv is None else policies_of(kv, count)[-1]
            for head in self.heads:
                state.layers.append(head.new_state(replace(layout, kv=policy, device=self.output_device)))
                state.layers[-1].device = self.output_device
        return state

    def _refuse_other(self, state: State) -> None:
        """Refuse the state of another model, whose layers may have the shapes of this one's.

        One with the same fingerprint is no other: a copy, or the same checkpoint loaded again.
        """
        if not isinstance(state, State):
            raise StateError(f"{state!r:.80} is not a state of lmstate; make one with new_state")
        if type(state) is not self.state_type:
            raise StateError("the state is of this model over another number of processes: move its rows by snapshots")
        if state.user() is self:
            return
        if different := differences(state.fingerprint, self.fingerprint):
            raise StateError(
                f"the state is of another model: {different}; use the model that made it, or make a state with "
                "this model's new_state"
            )
        state.user = weakref.ref(self)
