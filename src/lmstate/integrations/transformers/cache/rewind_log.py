"""Positions that a cache can go back to: within its layers' reach, or from earlier carries by the inputs since."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DummyLayer

from lmstate.errors import UnsupportedError
from lmstate.integrations.transformers.cache.history import ForwardCall, InputHistory
from lmstate.integrations.transformers.cache.layers.base import RewindableLayer, Tensors
from lmstate.integrations.transformers.cache.layers.recurrent import RecurrentLayer, is_fold
from lmstate.integrations.transformers.cache.layers.sliding import WindowLayer
from lmstate.integrations.transformers.cache.transfers import Transfers

EVERY = 256
"""Tokens between two places to go back to, while single tokens come."""


@dataclass
class Anchor:
    """The carries of every recurrent layer at one position."""

    position: int
    carries: dict[int, Tensors] = field(repr=False)


class RewindLog:
    """The layers of a cache, with what takes them back. `anchors`: carries to keep, of earlier places."""

    def __init__(self, layers: list[Any], transfers: Transfers, anchors: int, *, encoder: bool) -> None:
        self._transfers = transfers
        self._layers = layers  # RewindableLayer, DummyLayer, or a layer of transformers' own
        self._encoder = encoder
        self._recurrent = [i for i, layer in enumerate(layers) if isinstance(layer, RecurrentLayer)]
        self._forgets = any(isinstance(layer, RecurrentLayer | WindowLayer) for layer in layers)
        self.feeds = any(is_fold(layer) for layer in layers)
        """Whether going back may feed tokens again."""
        self.attention = next((layer for layer in layers if isinstance(layer, CacheLayerMixin)), None)
        self._anchors: deque[Anchor] = deque(maxlen=max(anchors, 0))
        self.clear()

    def clear(self) -> None:
        """Forget all places and inputs; the layers stay as they are."""
        self.history = InputHistory()
        self._anchors.clear()
        self.draft: Anchor | None = None
        """Carries before the last call, while drafts are expected."""
        self.seen = 0
        """Tokens fed, for models without attention."""
        self.lost = False
        """A failed call left carries that belong to no position."""

    @property
    def known(self) -> int:
        """Position from which inputs are known, of a cache that may need them."""
        return self.history.known if self._forgets else 0

    @property
    def recurrent(self) -> bool:
        """Whether a layer is recurrent."""
        return bool(self._recurrent)

    @property
    def notes_calls(self) -> bool:
        """Whether the inputs of calls are kept."""
        return self._forgets and not self._encoder

    def length(self, index: int) -> int:
        """Tokens held by a layer."""
        if self.lost:
            return self.seen
        layer = self._layers[index]
        if not isinstance(layer, CacheLayerMixin):
            layer = self.attention
        return self.seen if layer is None else layer.get_seq_length()

    def kept(self, what: str) -> list[RewindableLayer]:
        """The layers that hold something. Raises `UnsupportedError` for `what` if some are not ours."""
        layers = [layer for layer in self._layers if not isinstance(layer, DummyLayer)]
        foreign = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, RewindableLayer)})
        if foreign:
            raise UnsupportedError(f"{what} is not possible for a model with layers of the kind {', '.join(foreign)}")
        return layers

    # ---- calls

    def before_call(self, start: int, *, turn: bool, recording: bool) -> None:
        """Keep carries where a call begins that may be gone back before: `turn`, of several tokens or after such."""
        self.draft = None
        if not self._recurrent or start == 0:
            return
        here = None
        if recording:
            here = self.draft = self.checkpoint(start)
        newest = self._anchors[-1].position if self._anchors else 0
        if newest < start and ((turn and not recording) or start - newest >= EVERY):
            self._anchors.append(here or self.checkpoint(start))

    def thaw(self, index: int | None = None) -> None:
        """Let a recurrent layer (None: every one) write its carries: into memory of its own."""
        if index is None:
            self._transfers.settle()
        for i in self._recurrent if index is None else [index]:
            if isinstance(layer := self._layers[i], RecurrentLayer):
                layer.thaw()

    def after_call(self, call: ForwardCall) -> None:
        """Note a call that has run."""
        self.seen = call.stop
        if self.notes_calls:
            self.history.add(call)

    def checkpoint(self, position: int) -> Anchor:
        """The present carries, on their device."""
        self._transfers.settle()
        for i in self._recurrent:
            RecurrentLayer.prefetch(self._layers[i])  # not the keys and values beside them
        return Anchor(position, {i: self._layers[i].carry() for i in self._recurrent})

    # ---- going back

    def start(self, length: int, to: int) -> Anchor | None:
        """Anchor from which tokens have to be fed to reach `to`; None if none have to be."""
        kept = self.kept("going back")
        if not self.lost and (to == length or all(layer.reach(length) <= to for layer in kept)):
            return None
        if self._encoder:
            raise UnsupportedError("going back farther than the sliding window keeps needs the encoder's output again")
        candidates = [*self._anchors, *([self.draft] if self.draft is not None else [])]
        best = Anchor(0, {})
        for anchor in candidates:
            others = (layer for i, layer in enumerate(self._layers) if i not in anchor.carries)
            reached = all(
                isinstance(layer, DummyLayer) or layer.reach(length) <= anchor.position for layer in others
            ) and all(self._layers[i].attention_reach(length) <= anchor.position for i in anchor.carries)
            if reached and best.position < anchor.position <= to:
                best = anchor
        return best

    def cut(self, length: int, to: int) -> None:
        """Go back as far as the layers themselves reach."""
        for layer in self.kept("rewind"):
            layer.cut(length, to)
        self._trim(to)

    def go_back(self, length: int, start: Anchor) -> None:
        """Go back to a checkpoint, feeding nothing."""
        for index, layer in enumerate(self._layers):
            if isinstance(layer, DummyLayer):
                continue
            if start.position == 0:
                layer.reset()
                continue
            layer.cut(length, start.position)
            if index in start.carries:
                layer.put_carry(start.carries[index])
        self.lost = False
        self._trim(start.position)

    def undo(self, start: Anchor) -> None:
        """Take back a call that began at `start` and broke off: some layers have its tokens and some have not."""
        self._transfers.settle()
        to = start.position
        self.lost = bool(to and self._recurrent and not start.carries)
        for layer in self._layers:
            if isinstance(layer, CacheLayerMixin) and isinstance(layer, RewindableLayer):
                length = layer.get_seq_length()
                if to and layer.attention_reach(length) > to:
                    self.lost = True  # the call pushed out what comes before it
                    self._anchors.clear()
                elif to and length >= to:
                    layer.cut(length, to)
            if to == 0 and isinstance(layer, RewindableLayer):
                layer.reset()  # type: ignore[attr-defined]  # of transformers' classes
        for index, carry in start.carries.items():
            self._layers[index].put_carry(carry)
        self.seen = to
        if to < self.history.length:  # a first part of the call was fed on its own
            self._trim(to)

    def select(self, rows: Tensor) -> None:
        """Reorder the rows of what is kept, as `RewindableLayer.select` does those of a layer."""
        self.history.select(rows)
        for anchor in {id(a): a for a in (*self._anchors, self.draft) if a is not None}.values():
            anchor.carries = {
                i: {name: held.index_select(0, rows.to(held.device)) for name, held in carry.items()}
                for i, carry in anchor.carries.items()
            }

    def _trim(self, to: int) -> None:
        self.seen = to
        self.history.cut(to)
        while self._anchors and self._anchors[-1].position > to:
            self._anchors.pop()
        if self.draft is not None and self.draft.position > to:
            self.draft = None
