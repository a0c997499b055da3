"""Rewinding of a cache: a record of every call, and feeding again what a recurrent layer cannot undo."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DummyLayer, DynamicCache
from transformers.utils import ModelOutput

from lmstate.errors import RewindError, StateError, UnsupportedError
from lmstate.integrations.transformers.cache import hooks
from lmstate.integrations.transformers.cache.history import Call, InputHistory
from lmstate.integrations.transformers.cache.layers.base import RewindableLayer, Tensors
from lmstate.integrations.transformers.cache.layers.hybrid import HybridWindowLayer
from lmstate.integrations.transformers.cache.layers.recurrent import RecurrentLayer, is_fold
from lmstate.integrations.transformers.cache.layers.sliding import WindowLayer

ONE_BY_ONE = frozenset({"falcon_mamba", "jamba", "mamba", "zamba"})
"""Models whose forward, in transformers 5.23, starts several tokens from an empty carry even after others."""
APART = ("output_attentions", "output_router_logits")
"""Outputs of a call that single tokens do not give in the same shape."""
EVERY = 256
"""Tokens between two places to go back to, while single tokens come."""


@dataclass
class Checkpoint:
    """The carries of every recurrent layer at one position."""

    position: int
    carries: dict[int, Tensors] = field(repr=False)


class Rollback(DynamicCache, hooks.CallObserver):
    """The part of `StateCache` that goes back; `layers` are set before it is initialized."""

    layers: list[Any]  # Kept, DummyLayer, or a layer of transformers' own

    def __init__(self, model: PreTrainedModel, anchors: int) -> None:
        config = model.config.get_text_config(decoder=True)
        layers = self.layers
        self._model = weakref.ref(model)
        self._encoder = bool(model.config.is_encoder_decoder)
        self._folds = [i for i, layer in enumerate(layers) if isinstance(layer, RecurrentLayer)]
        self._feeds = any(is_fold(layer) for layer in layers)  # going back feeds tokens again
        self._attention = next((layer for layer in layers if isinstance(layer, CacheLayerMixin)), None)
        self._forgets = any(isinstance(layer, RecurrentLayer | WindowLayer) for layer in layers)
        self._recording = False
        self.feeds_singly = config.model_type in ONE_BY_ONE and self._feeds
        self.recomputed = 0
        """Tokens that going back had to feed again, since the cache was made."""
        self._anchors: deque[Checkpoint] = deque(maxlen=max(anchors, 0))
        self._clear()

    def _clear(self) -> None:
        self._history = InputHistory()
        self._anchors.clear()
        self._draft: Checkpoint | None = None  # before the last call, while recording
        self._call: Call | None = None  # the call that runs now
        self._seen = 0  # tokens fed, for models without attention
        self._last = 0  # tokens of the last call
        self._lost = False  # a failed call left carries that belong nowhere
        self._origin: Checkpoint | None = None  # before a call of which a first part was fed on its own
        self._earlier: list[ModelOutput] = []  # outputs of this call's tokens that were fed singly

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held, left padding included."""
        if layer_idx >= len(self.layers):
            return 0
        if self._call is not None:  # it runs, or was interrupted: either way its tokens do not count yet
            return self._call.start
        if self._lost:
            return self._seen
        layer = self.layers[layer_idx]
        if not isinstance(layer, CacheLayerMixin):
            layer = self._attention
        return self._seen if layer is None else layer.get_seq_length()

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise StateError("the model of this cache is gone; a cache keeps no model alive")
        return model

    # ---- moving

    def rewind_cost(self, to: int) -> int:
        """Number of tokens that `rewind(to=to)` would feed again. Raises as it would."""
        length = self._checked(to)
        start = self._start(length, to)
        if start is None:
            return 0
        if to > start.position:
            self._history.since(start.position, to)
        return to - start.position

    def rewind(self, *, to: int) -> int:
        """Go back to the first `to` tokens, exactly; returns how many had to be fed again.

        Raises `RewindError` for a length that is not held, `UnsupportedError` where tokens must be fed again that the
        cache never saw by their ids. Neither changes anything.
        """
        length = self._checked(to)
        start = self._start(length, to)
        if start is None:
            for layer in self._kept("rewind"):
                layer.cut(length, to)
            self._trim(to)
            return 0
        given = self._history.since(start.position, to) if to > start.position else None
        self._go(length, start)
        if given is not None:
            self.feed(given)
            self.recomputed += to - start.position
        return to - start.position

    # ---- what the hooks tell (see hooks.py)

    def is_of(self, model: nn.Module) -> bool:
        """Whether it was made for this very module, and not for one around it or in it."""
        return self._model() is model

    def check_related(self, model: nn.Module) -> None:
        """Raise `StateError` unless this module is a part of the cache's model or around it."""
        own = self._model()
        if own is None or not (_holds(own, model) or _holds(model, own)):
            raise StateError(
                "this cache was made for another model (a copy is another one); make one with StateCache(model), and "
                "take the text over with cache.save and StateCache.load if the weights are the same"
            )

    def admit(self, rows: int) -> None:
        """Raise `StateError` unless a call with so many rows may go on from here."""
        if self._call is not None:  # interrupted: torch runs no hook after a KeyboardInterrupt
            self._origin = None
            self.end(failed=True)
        if self._lost:
            raise StateError("a call failed in the middle of this recurrent model: rewind or reset before the next one")
        if self.rows not in (0, rows):
            raise StateError(
                f"a call with {rows} rows was given a cache that holds {self.rows}; take a cache of its own, or "
                "batch_repeat_interleave, batch_select_indices or fork this one"
            )

    def feeds_apart(self, call: Call, outputs: dict[str, Any]) -> bool:
        """Whether the part of a call whose logits nobody asked for should be fed before the rest."""
        wanted = any(outputs.get(name) for name in ("output_hidden_states", "output_attentions", "labels"))
        mask = call.given.get("attention_mask")
        plain = mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)
        return self._recording and self._feeds and plain and not wanted

    def begin(self, call: Call) -> None:
        """A call is about to run."""
        self._call = call
        for index in self._folds:
            self.layers[index].thaw()
        if (
            self._draft is not None and self._draft is self._origin
        ):  # the last token of a call, whose place to go back to is before the first
            return
        self._draft = None
        if not self._folds or call.start == 0:
            return
        here = None
        if self._recording:
            here = self._draft = self._anchor(call.start)
        newest = self._anchors[-1].position if self._anchors else 0
        turn = not self._recording and max(call.stop - call.start, self._last) > 1
        if newest < call.start and (turn or call.start - newest >= EVERY):
            self._anchors.append(here or self._anchor(call.start))

    def end(self, failed: bool) -> list[ModelOutput]:
        """It has run, or broken off somewhere; the outputs of those tokens of it that were fed singly."""
        call, self._call = self._call, None
        earlier, self._earlier = self._earlier, []
        origin, self._origin = self._origin, None
        if failed:
            if origin is not None:
                self._undo(origin)
            elif call is not None:
                draft = self._draft
                if draft is None or draft.position != call.start:
                    draft = Checkpoint(call.start, {})
                self._undo(draft)
            return []
        if call is None:
            return earlier
        self._seen, self._last = call.stop, call.stop - call.start
        if self._forgets and not self._encoder:
            self._history.add(call)
        return earlier

    def feed_first(self, call: Call, stop: int) -> Call:
        """Feed the tokens of a call up to `stop`; the call for the rest."""
        with self._feeding(call.start):
            self.feed(call.part(stop))
        return call.rest(stop)

    def feed_one_by_one(self, call: Call, outputs: dict[str, Any]) -> Call:
        """Feed all tokens of a call but the last, keeping what they give; the call for that one.

        Raises `UnsupportedError`, having fed nothing, for outputs that cannot be put together from single tokens.
        """
        kept, hidden = self._singly(outputs)
        earlier = []
        with self._feeding(call.start) as origin:
            for position in range(call.start, call.stop - 1):
                output = self.feed(call.rest(position).part(position + 1), output_hidden_states=hidden)
                if hidden or not kept or position >= call.stop - kept:
                    earlier.append(output)
        self._draft, self._earlier = origin if self._recording else None, earlier
        return call.rest(call.stop - 1)

    def feed(self, given: dict[str, Any], output_hidden_states: bool = False) -> ModelOutput:
        """Run the model over some tokens, for what it leaves here; logits of the last only, where it can choose."""
        model = self.model
        wanted: dict[str, Any] = {"output_hidden_states": True} if output_hidden_states else {}
        if "logits_to_keep" in hooks.parameters(type(model)):
            wanted["logits_to_keep"] = 1
        recording, self._recording = self._recording, False
        try:
            with torch.no_grad():
                return model(**given, **wanted, **{hooks.cache_name(model): self}, use_cache=True)
        finally:
            self._recording = recording

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first call."""
        rows = (layer.rows() for layer in self.layers if isinstance(layer, RewindableLayer))
        return next((n for n in rows if n is not None), 0)

    # ---- inside

    def _singly(self, outputs: dict[str, Any]) -> tuple[int, bool]:
        """Number of logits (0: all), and whether hidden states, requested by a call whose tokens are fed one by one."""
        config = self.model.config
        asked = {name: outputs.get(name) for name in ("labels", "output_hidden_states", *APART)}
        asked |= {name: getattr(config, name, None) for name, value in asked.items() if value is None}
        refused = [f"{name}=" for name in ("labels", *APART) if asked[name] is not None and asked[name] is not False]
        if outputs.get("return_dict", config.return_dict) is False:
            refused.append("return_dict=False")
        kept = outputs.get("logits_to_keep") or 0
        if not isinstance(kept, int):
            refused.append("logits_to_keep= as a tensor")
        if refused:
            raise UnsupportedError(
                f"{', '.join(refused)} for several tokens after others: {type(self.model).__name__} starts such a "
                "piece from an empty carry, so they are fed one by one, and give logits and hidden states only; feed "
                "the whole text to an empty cache, or leave that out"
            )
        return kept, bool(asked["output_hidden_states"])

    @contextmanager
    def _feeding(self, start: int) -> Iterator[Checkpoint]:
        """Feed first parts of a call that starts here; if they or the rest of it fail, all of it is undone."""
        origin = Checkpoint(0, {}) if start == 0 else self._anchor(start)
        try:
            yield origin
        except BaseException:
            self._call = None
            self._undo(origin)
            raise
        self._origin = origin

    def _expect_call(self) -> None:
        if self._call is None and self._attention is None:
            raise StateError(
                "a part of this recurrent model was called: nobody told the cache how many tokens come; call the model "
                "that the cache was made for"
            )

    def _kept(self, what: str) -> list[RewindableLayer]:
        """The layers that hold something, all of them ours."""
        layers = [layer for layer in self.layers if not isinstance(layer, DummyLayer)]
        foreign = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, RewindableLayer)})
        if foreign:
            raise UnsupportedError(f"{what} is not possible for a model with layers of the kind {', '.join(foreign)}")
        return layers

    def _checked(self, to: int) -> int:
        length = self.get_seq_length()
        if self._call is not None:
            raise StateError(
                "the cache cannot be moved while its model runs; if that was interrupted, call the model again or reset"
            )
        if not 0 <= to <= length:
            raise RewindError(f"rewind(to={to}): the cache holds {length} tokens; go to 0 up to that")
        return length

    def _start(self, length: int, to: int) -> Checkpoint | None:
        """Checkpoint from which tokens have to be fed to reach `to`; None if none have to be."""
        kept = self._kept("going back")
        if not self._lost and (to == length or all(layer.reach(length) <= to for layer in kept)):
            return None
        if self._encoder:
            raise UnsupportedError("going back farther than the sliding window keeps needs the encoder's output again")
        candidates = [*self._anchors, *([self._draft] if self._draft is not None else [])]
        best = Checkpoint(0, {})
        for anchor in candidates:
            others = (layer for i, layer in enumerate(self.layers) if i not in anchor.carries)
            reached = all(
                isinstance(layer, DummyLayer) or layer.reach(length) <= anchor.position for layer in others
            ) and all(self._window_reach(i, length) <= anchor.position for i in anchor.carries)
            if reached and best.position < anchor.position <= to:
                best = anchor
        return best

    def _window_reach(self, index: int, length: int) -> int:
        layer = self.layers[index]
        return WindowLayer.reach(layer, length) if isinstance(layer, HybridWindowLayer) else 0

    def _go(self, length: int, anchor: Checkpoint) -> None:
        """Back to an anchor, feeding nothing."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DummyLayer):
                continue
            if anchor.position == 0:
                layer.reset()
                continue
            layer.cut(length, anchor.position)
            if index in anchor.carries:
                layer.put_carry(anchor.carries[index])
        self._lost = False
        self._trim(anchor.position)

    def _trim(self, to: int) -> None:
        self._seen = to
        self._history.cut(to)
        while self._anchors and self._anchors[-1].position > to:
            self._anchors.pop()
        if self._draft is not None and self._draft.position > to:
            self._draft = None

    def _anchor(self, position: int) -> Checkpoint:
        return Checkpoint(position, {i: self.layers[i].carry() for i in self._folds})

    def _undo(self, start: Checkpoint) -> None:
        """A call that began at `start` broke off: some layers have its tokens and some have not."""
        to = start.position
        self._lost = bool(to and self._folds and not start.carries)
        for layer in self.layers:
            if isinstance(layer, CacheLayerMixin) and isinstance(layer, RewindableLayer):
                length = layer.get_seq_length()
                if to and isinstance(layer, WindowLayer) and WindowLayer.reach(layer, length) > to:
                    self._lost = True  # the call pushed out what comes before it
                    self._anchors.clear()
                elif to and length > to:
                    layer.cut(length, to)
            if to == 0 and isinstance(layer, RewindableLayer):
                layer.reset()  # type: ignore[attr-defined]  # of transformers' classes
        for index, carry in start.carries.items():
            self.layers[index].put_carry(carry)
        self._seen = to
        if to < self._history.length:  # a first part of the call was fed on its own
            self._trim(to)


def _holds(module: nn.Module, part: nn.Module) -> bool:
    return any(inner is part for inner in module.modules())
