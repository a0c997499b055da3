"""Inputs of a cache's calls: enough to feed any part of them again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmstate.errors import UnsupportedError
from lmstate.integrations.transformers.cache.layers.growable import frozen
from lmstate.integrations.transformers.cache.layers.sharing import Sharing

IDS, EMBEDS, MASK, POSITIONS = "input_ids", "inputs_embeds", "attention_mask", "position_ids"
# Along the tokens of the call, in models that know them.
BY_TOKEN = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
# Names of the cache: since transformers 5.24, before it, and those of Mamba's models before it.
CACHES = ("cache", "past_key_values", "cache_params")
# Options of a call about its results or the cache: not part of its input.
OUTPUTS = frozenset(
    {"labels", "logits_to_keep", "use_cache", "return_dict", *CACHES,
     "output_hidden_states", "output_attentions", "output_router_logits", "is_first_iteration"}
)  # fmt: skip


@dataclass(frozen=True)
class ForwardCall:
    """One forward: tokens start..stop, with all that it was given."""

    start: int
    stop: int
    given: dict[str, Any]

    def part(self, stop: int) -> dict[str, Any]:
        """Inputs that feed only the tokens start..stop of it."""
        return self._between(self.start, stop)

    def rest(self, start: int) -> ForwardCall:
        """The call for the tokens from `start` on, once those before are fed."""
        return ForwardCall(start, self.stop, self._between(start, self.stop))

    def _between(self, start: int, stop: int) -> dict[str, Any]:
        first, last, given = start - self.start, stop - self.start, dict(self.given)
        for name, value in self.given.items():
            if name in (IDS, EMBEDS) or name in BY_TOKEN:
                given[name] = value[:, first:last]
            elif name == POSITIONS:
                given[name] = value[..., first:last]
            elif name == MASK:
                if not isinstance(value, Tensor) or value.ndim != 2:
                    raise UnsupportedError(
                        "these tokens were fed with an attention mask of four axes, and some of them have to be fed on "
                        "their own: pass a mask [rows, tokens]"
                    )
                given[name] = value[:, : value.shape[1] - (self.stop - stop)]
        return given


class InputHistory:
    """Token ids `[R, n]` and positions of all that was fed, and the last call whole."""

    def __init__(self) -> None:
        self.ids: Tensor | None = None  # int64 [R, n], with room after the last
        self.positions: Tensor | None = None  # int64 [..., R or 1, n]; None: none were given
        self.mask: Tensor | None = None  # [R, n], the widest of two axes that was given
        self.length = 0
        self.known = 0  # ids before this position were never seen (embeddings were fed, or a file had none)
        self.call: ForwardCall | None = None
        self._sharing = Sharing()

    def add(self, call: ForwardCall) -> None:
        """Note a call that follows all before it: in copies, since a caller may use his tensors for the next one."""
        given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in call.given.items()}
        call = ForwardCall(call.start, call.stop, given)
        if not self._sharing.alone:
            self.ids, self.positions = (None if x is None else x.clone() for x in (self.ids, self.positions))
            self._sharing.leave()
        ids, positions, mask = (call.given.get(name) for name in (IDS, POSITIONS, MASK))
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self.mask = mask
        if call.start != self.length:  # a part of the model was fed in between
            self.known = call.start
        extra = set(call.given) - {IDS, POSITIONS, MASK}
        if ids is None or any(isinstance(call.given[name], Tensor) for name in extra):
            self.known = call.stop
        if ids is not None:
            self.ids = self._put(self.ids, ids, call)
        if positions is not None or self.positions is not None:
            self.positions = self._placed(positions, call)
        self.length, self.call = call.stop, call

    def since(self, start: int, stop: int) -> dict[str, Any]:
        """Inputs that feed the tokens start..stop again. Raises `UnsupportedError` if that was not kept."""
        if self.call is not None and self.call.start == start and stop <= self.call.stop:
            return self.call.part(stop)
        if start < self.known or stop > self.length or self.ids is None:
            raise UnsupportedError(
                f"going back to token {stop} has to feed the tokens {start} to {stop} again, and by their ids only "
                f"those from {self.known} to {self.length} are known (the others came as embeddings, with other "
                "inputs, or through a part of the model); keep a snapshot of the places to return to"
            )
        given: dict[str, Any] = {IDS: self.ids[:, start:stop]}
        if self.positions is not None:
            given[POSITIONS] = self.positions[..., start:stop]
        if self.mask is not None:
            mask = self.mask[:, :stop]
            given[MASK] = torch.cat([mask, mask.new_ones(mask.shape[0], stop - mask.shape[1])], dim=1)
        return given

    def cut(self, to: int) -> None:
        """Forget the tokens from `to` on."""
        if self.mask is not None:
            self.mask = self.mask[:, :to]
        if self.call is not None and to < self.call.stop:
            # A mask that no longer fits must not be guessed at: then the ids have to do.
            whole = to > self.call.start and (MASK not in self.call.given or self.call.given[MASK].ndim == 2)
            self.call = ForwardCall(self.call.start, to, self.call.part(to)) if whole else None
        self.length, self.known = to, min(self.known, to)

    def select(self, rows: Tensor) -> None:
        """Row i becomes a copy of row `rows[i]`."""
        before = None if self.ids is None else self.ids.shape[0]
        self.ids = _rows(self.ids, rows, before, 0)
        self.mask = _rows(self.mask, rows, before, 0)
        self.positions = _rows(self.positions, rows, before, -2)
        self.call = None  # it may hold anything

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the inputs that are known by id, for a file or a snapshot."""
        held = {"ids": self.ids, "positions": self.positions, "mask": self.mask}
        return {name: x[..., : self.length].clone() for name, x in held.items() if x is not None}

    @classmethod
    def of(cls, length: int, known: int, tensors: dict[str, Tensor]) -> InputHistory:
        history = cls()
        history.ids, history.positions, history.mask = (tensors.get(name) for name in ("ids", "positions", "mask"))
        history.length, history.known = length, known if history.ids is not None else length
        return history

    def _put(self, held: Tensor | None, new: Tensor, call: ForwardCall) -> Tensor:
        """`held [..., n]` with `new` at the call's place, in doubled memory where it does not fit."""
        if held is None or held.shape[-1] < call.stop or frozen(held) or held.shape[:-1] != new.shape[:-1]:
            slots = max(call.stop, 2 * (0 if held is None else held.shape[-1]), 64)
            grown = new.new_zeros(*new.shape[:-1], slots)
            if held is not None and held.shape[:-1] == new.shape[:-1]:
                grown[..., : call.start] = held[..., : call.start]
            elif call.start:
                self.known = call.stop
            held = grown
        held[..., call.start : call.stop] = new
        return held

    def _placed(self, positions: Tensor | None, call: ForwardCall) -> Tensor:
        held = self.positions
        if positions is None:
            assert held is not None
            counted = torch.arange(call.start, call.stop, device=held.device)
            return self._put(held, counted.expand(*held.shape[:-1], -1), call)
        if held is None and call.start:
            before = torch.arange(call.start, device=positions.device).expand(*positions.shape[:-1], -1)
            held = before.clone()
        return self._put(held, positions, call)


def _rows(held: Tensor | None, rows: Tensor, before: int | None, axis: int) -> Tensor | None:
    """The rows asked for, unless the tensor has one row for all of the batch."""
    if held is None or (held.shape[axis] == 1 and before != 1):
        return held
    return held.index_select(axis % held.ndim, rows.to(held.device))
