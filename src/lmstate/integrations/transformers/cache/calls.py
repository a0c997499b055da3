"""The calls of a cache's model: what each is fed, what a broken one leaves, and feeding tokens again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from lmstate.errors import StateError, UnsupportedError
from lmstate.integrations.transformers.cache import hooks
from lmstate.integrations.transformers.cache.history import MASK, ForwardCall
from lmstate.integrations.transformers.cache.rewind_log import Anchor, RewindLog

ONE_BY_ONE = frozenset({"falcon_mamba", "jamba", "mamba", "zamba"})
"""Models whose forward, in transformers 5.23, starts several tokens from an empty carry even after others."""
APART = ("output_attentions", "output_router_logits")
"""Outputs of a call that single tokens do not give in the same shape."""


class Calls(hooks.CallObserver):
    """Calls of one model with one cache, of which `log` is; it keeps neither the model nor the cache alive."""

    def __init__(self, model: PreTrainedModel, log: RewindLog) -> None:
        self._model = weakref.ref(model)
        self._log = log
        self.recording = False
        """Whether each call may be gone back before, as `generate` does while it drafts."""
        kind = model.config.get_text_config(decoder=True).model_type
        self.feeds_singly = kind in ONE_BY_ONE and log.feeds
        self.clear()

    def clear(self) -> None:
        self.running: ForwardCall | None = None
        """The call that runs now, or was interrupted: its tokens do not count yet."""
        self._last = 0  # tokens of the last call
        self._origin: Anchor | None = None  # before a call of which a first part was fed on its own
        self._earlier: list[ModelOutput] = []  # outputs of this call's tokens that were fed singly
        self._padding: Tensor | None = None

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise StateError("the model of this cache is gone; a cache keeps no model alive")
        return model

    def check_known(self) -> None:
        """Raise `StateError` where a layer of a recurrent model is fed outside of a call."""
        if self.running is None and self._log.attention is None:
            raise StateError(
                "a part of this recurrent model was called, which does not tell the cache how many tokens come; call "
                "the model that the cache was made for"
            )

    def feed(
        self, cache: hooks.ObservedCache, given: dict[str, Any], output_hidden_states: bool = False
    ) -> ModelOutput:
        """Run the model over some tokens, for what it leaves here; logits of the last only, where it can choose."""
        model = self.model
        wanted: dict[str, Any] = {"output_hidden_states": True} if output_hidden_states else {}
        if "logits_to_keep" in hooks.parameters(type(model)):
            wanted["logits_to_keep"] = 1
        recording, self.recording = self.recording, False
        try:
            with torch.no_grad():
                return model(**given, **wanted, **{hooks.cache_name(model): cache}, use_cache=True)
        finally:
            self.recording = recording

    # ---- hooks.CallObserver

    def is_of(self, model: nn.Module) -> bool:
        return self._model() is model

    def check_related(self, model: nn.Module) -> None:
        own = self._model()
        if own is None or not (_holds(own, model) or _holds(model, own)):
            raise StateError(
                "this cache was made for another model (a copy is another one); make one with StateCache(model), and "
                "take the text over with cache.save and StateCache.load if the weights are the same"
            )

    def admit(self, rows: int, held: int) -> None:
        if self.running is not None:  # interrupted: torch runs no hook after a KeyboardInterrupt
            self._origin = None
            self.end(failed=True)
        if self._log.lost:
            raise StateError("a call failed in the middle of this recurrent model: rewind or reset before the next one")
        if held not in (0, rows):
            raise StateError(
                f"a call with {rows} rows was given a cache that holds {held}; take a cache of its own, or "
                "batch_repeat_interleave, batch_select_indices or fork this one"
            )

    @property
    def padding(self) -> Tensor | None:
        return self._padding

    def with_whole_mask(self, call: ForwardCall) -> ForwardCall:
        mask, held = _mask(call), self._log.history.mask
        if mask is None or not self._log.notes_calls or not call.stop - call.start <= mask.shape[1] < call.stop:
            return call
        before = mask.new_ones(len(mask), call.stop - mask.shape[1])
        if held is not None:
            known = held[:, : before.shape[1]].to(before)
            before[:, : known.shape[1]] = known
        return ForwardCall(call.start, call.stop, {**call.given, MASK: torch.cat([before, mask], dim=1)})

    def fed(self, call: ForwardCall) -> dict[str, Any]:
        mask = _mask(call)
        if mask is None or self._log.attention is not None:
            return call.given
        return {**call.given, MASK: mask[:, call.start - call.stop :]}

    def feeds_apart(self, call: ForwardCall, outputs: dict[str, Any]) -> bool:
        wanted = any(outputs.get(name) for name in ("output_hidden_states", "output_attentions", "labels"))
        plain = call.given.get(MASK) is None or _mask(call) is not None
        return self.recording and self._log.feeds and plain and not wanted

    def begin(self, call: ForwardCall) -> None:
        self.running = call
        mask = _mask(call) if self._log.recurrent else None
        new = None if mask is None else mask[:, call.start - call.stop :]
        self._padding = None if new is None or bool(new.all()) else new
        self._log.thaw()
        if self._log.draft is not None and self._log.draft is self._origin:
            return  # the last token of a call, whose place to go back to is before the first
        turn = max(call.stop - call.start, self._last) > 1
        self._log.before_call(call.start, turn=turn, recording=self.recording)

    def end(self, failed: bool) -> list[ModelOutput]:
        call, self.running, self._padding = self.running, None, None
        earlier, self._earlier = self._earlier, []
        origin, self._origin = self._origin, None
        if failed:
            if origin is not None:
                self._log.undo(origin)
            elif call is not None:
                draft = self._log.draft
                if draft is None or draft.position != call.start:
                    draft = Anchor(call.start, {})
                self._log.undo(draft)
            return []
        if call is not None:
            self._last = call.stop - call.start
            self._log.after_call(call)
        return earlier

    def feed_first(self, cache: hooks.ObservedCache, call: ForwardCall, stop: int) -> ForwardCall:
        with self._feeding(call.start):
            self.feed(cache, call.part(stop))
        return call.rest(stop)

    def feed_one_by_one(self, cache: hooks.ObservedCache, call: ForwardCall, outputs: dict[str, Any]) -> ForwardCall:
        kept, hidden = self._singly(outputs)
        earlier = []
        with self._feeding(call.start) as origin:
            for position in range(call.start, call.stop - 1):
                output = self.feed(cache, call.rest(position).part(position + 1), output_hidden_states=hidden)
                if hidden or not kept or position >= call.stop - kept:
                    earlier.append(output)
        self._log.draft, self._earlier = origin if self.recording else None, earlier
        return call.rest(call.stop - 1)

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
    def _feeding(self, start: int) -> Iterator[Anchor]:
        """Feed first parts of a call that starts here; if they or the rest of it fail, all of it is undone."""
        origin = Anchor(0, {}) if start == 0 else self._log.checkpoint(start)
        try:
            yield origin
        except BaseException:
            self.running = None
            self._log.undo(origin)
            raise
        self._origin = origin


def _mask(call: ForwardCall) -> Tensor | None:
    """The mask `[R, n]` of a call's text, if it was given one of two axes."""
    mask = call.given.get(MASK)
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _holds(module: nn.Module, part: nn.Module) -> bool:
    return any(inner is part for inner in module.modules())


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The model of transformers itself, which `generate` of a wrapper around it calls past the wrapper."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise UnsupportedError(f"StateCache(model) was asked for; a {type(model).__name__} is not a transformers model")
