"""The inference state of a model of transformers, as a cache that transformers takes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)

from lmstate.errors import RewindError, StateError, UnsupportedError
from lmstate.integrations.transformers.cache import hooks
from lmstate.integrations.transformers.cache.calls import Calls, transformers_model
from lmstate.integrations.transformers.cache.copies import computed, shared
from lmstate.integrations.transformers.cache.history import InputHistory
from lmstate.integrations.transformers.cache.layers.base import RewindableLayer, chosen
from lmstate.integrations.transformers.cache.layers.build import new_layers
from lmstate.integrations.transformers.cache.layers.full import FullAttentionLayer
from lmstate.integrations.transformers.cache.layers.recurrent import ConvLayer
from lmstate.integrations.transformers.cache.layers.sliding import WindowLayer
from lmstate.integrations.transformers.cache.rewind_log import RewindLog
from lmstate.integrations.transformers.cache.snapshot import CacheSnapshot, fingerprint_of, load, save
from lmstate.integrations.transformers.cache.transfers import Transfers
from lmstate.state.validate import whole_number

UNFIT = {
    **dict.fromkeys(
        ("minimax", "recurrent_gemma", "reformer", "rwkv", "xlm", "xlnet", "xlstm"),
        "keeps its state in its modules or in a cache of its own, where no other cache can move it",
    ),
    **dict.fromkeys(("cpmant", "prophetnet"), "reads a text that is cut in another way than the whole, with any cache"),
    "openai-gpt": "takes no cache",
}
"""Types of models for which there can be no StateCache, in transformers 5.24, and why."""


class StateCache(DynamicCache, hooks.ObservedCache):
    """The whole inference state of a model of transformers, exact under every way of moving about in it.

    `cache = StateCache(model)`, then `model(**inputs, past_key_values=cache)` or `model.generate(..., past_key_values=
    cache)`; `cache=cache` since transformers 5.24. Keys and values are in memory that doubles, so that no token copies
    those before it. Left padding, masks and positions stay the caller's business, as with `DynamicCache`.

    Going back (`rewind`, `crop`) is free for attention, and in sliding windows up to `rewind` tokens. A recurrent layer
    cannot run backwards: its carry is kept at up to `anchors` earlier places (the turns of a chat, and every 256
    tokens), and before every draft while `generate` drafts. From the last of them that is early enough only the tokens
    after it are fed again through the model; `recomputed` counts them.

    `model`: a model of transformers, or a module around one (PEFT's); the cache belongs to the model of transformers.
    Raises `UnsupportedError` for a model whose state transformers keeps elsewhere, and for a module without one.

    A subclass of `DynamicCache` because transformers' encoder-decoder cache and some models ask for one by that name.
    """

    layers: list[Any]  # RewindableLayer, DummyLayer, or a layer of transformers' own

    def __init__(
        self,
        model: nn.Module,
        *,
        rewind: int = 16,
        anchors: int = 4,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
    ) -> None:
        for name, value in (("rewind", rewind), ("anchors", anchors)):
            if whole_number(value, name) < 0:
                raise StateError(f"StateCache({name}={value}) was asked for; it is 0 or more")
        model = transformers_model(model)
        config = model.config.get_text_config(decoder=True)
        if (why := UNFIT.get(config.model_type)) is not None:
            raise UnsupportedError(f"StateCache(model) was asked for; {type(model).__name__} {why}: run it without one")
        layers: list[Any] = new_layers(config, rewind)
        attention: list[Any] = [layer for layer in layers if isinstance(layer, CacheLayerMixin)]
        sent = [layer for layer in attention if not (offload_only_non_sliding and layer.is_sliding)]
        offloading = offloading and bool(sent)  # transformers looks for one to fetch, and fails where there is none
        Cache.__init__(
            self,
            layers=layers,
            offloading=offloading,
            offload_only_non_sliding=offload_only_non_sliding,
        )
        self._anchors = anchors
        self._observe(model)
        self.recomputed = 0
        """Tokens that going back had to feed again, since the cache was made."""
        hooks.attach(model)

    def _observe(self, model: PreTrainedModel) -> None:
        """Begin a log of the layers, and of the model's calls."""
        encoder = bool(model.config.is_encoder_decoder)
        self._transfers = Transfers(self.layers, self.prefetch_stream if self.offloading else None)
        self._log = RewindLog(self.layers, self._transfers, self._anchors, encoder=encoder)
        self._calls = Calls(model, self._log)

    @property
    def observer(self) -> Calls:
        """The observer of the model's calls."""
        return self._calls

    @property
    def model(self) -> PreTrainedModel:
        """The model of this cache. Raises `StateError` once it is gone."""
        return self._calls.model

    @property
    def feeds_singly(self) -> bool:
        """Whether tokens that follow others are fed singly, since the model would get them wrong together."""
        return self._calls.feeds_singly

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first call."""
        rows = (layer.rows() for layer in self.layers if isinstance(layer, RewindableLayer))
        return next((n for n in rows if n is not None), 0)

    # ---- what transformers asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held, left padding included."""
        if layer_idx >= len(self.layers):
            return 0
        call = self._calls.running
        return self._log.length(layer_idx) if call is None else call.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that `update` returns for `query_length` queries."""
        if layer_idx >= len(self.layers):
            return query_length, 0
        layer = self.layers[layer_idx]
        if not isinstance(layer, CacheLayerMixin):
            layer = self._log.attention
        return (self._log.seen + query_length, 0) if layer is None else layer.get_mask_sizes(query_length)

    @property
    def is_linear(self) -> list[bool]:
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, CacheLayerMixin)
            for layer in self.layers
        ]

    @property
    def is_compileable(self) -> bool:
        return False

    # A graph breaks where something is stored: memory that grows, and is written while views of it are read, is not for
    # torch's compiler.

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values; all that attention is to read."""
        self._transfers.fetch(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable
    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Store new keys of an indexer; all that are stored."""
        self._transfers.fetch(layer_idx)
        return super().update_indexer(indexer_key_states, layer_idx)

    @torch.compiler.disable
    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """A convolution's last inputs, which some models write into."""
        self._transfers.fetch(layer_idx)
        self._log.thaw(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    @torch.compiler.disable
    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """A carry, which some models write into."""
        self._transfers.fetch(layer_idx)
        self._log.thaw(layer_idx)
        return super().get_recurrent_state(layer_idx, *args, **kwargs)

    @torch.compiler.disable
    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Store a convolution's inputs; the other arguments are the layer's business."""
        self._calls.check_known()
        self._transfers.fetch(layer_idx)
        self._log.thaw(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable
    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Store a carry; the other arguments are the layer's business."""
        self._calls.check_known()
        self._transfers.fetch(layer_idx)
        self._log.thaw(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """Expect `crop` after each call: keep what it takes to go back to before the call."""
        self._calls.recording = True
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, exactly, for every kind of layer. 0: they are here to stay."""
        tokens_to_remove = whole_number(tokens_to_remove, "a number of tokens to remove")
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass minus the number of tokens to remove, or use rewind(to=)")
        if not all(isinstance(layer, RewindableLayer | DummyLayer) for layer in self.layers):
            Cache.crop(self, tokens_to_remove)  # as far as transformers' own layers can
            return
        self.rewind(to=max(0, self.get_seq_length() + tokens_to_remove))
        for layer in self.layers:
            if isinstance(layer, WindowLayer):
                layer.crop(0)
            elif isinstance(layer, ConvLayer):
                layer.trim()

    def reset(self) -> None:
        super().reset()
        self._clear()

    def _clear(self) -> None:
        self._log.clear()
        self._calls.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(chosen(beam_idx, self.rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if (repeats := whole_number(repeats, "repeats")) < 1:
            raise StateError(f"every row {repeats} times was asked for; take it at least once")
        self._select(torch.arange(self.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor | Sequence[int] | Sequence[bool]) -> None:
        self._select(chosen(indices, self.rows))

    def attend_across(self) -> None:
        if any(isinstance(layer, WindowLayer) for layer in self.layers) and not self.get_seq_length():
            self.layers = [FullAttentionLayer() for _ in self.layers]
            self._observe(self.model)

    # ---- moving about

    def rewind_cost(self, to: int) -> int:
        """Number of tokens that `rewind(to=to)` would feed again. Raises as it would."""
        length, to = self._checked(to)
        start = self._log.start(length, to)
        if start is None:
            return 0
        if to > start.position:
            self._log.history.since(start.position, to)
        return to - start.position

    def rewind(self, *, to: int) -> int:
        """Go back to the first `to` tokens, exactly; returns how many had to be fed again.

        Raises `RewindError` for a length that is not held, `UnsupportedError` where tokens must be fed again that the
        cache never saw by their ids. Neither changes anything.
        """
        length, to = self._checked(to)
        start = self._log.start(length, to)
        if start is None:
            self._log.cut(length, to)
            return 0
        given = self._log.history.since(start.position, to) if to > start.position else None
        self._log.go_back(length, start)
        if given is not None:
            self._calls.feed(self, given)
            self.recomputed += to - start.position
        return to - start.position

    def _checked(self, to: int) -> tuple[int, int]:
        """(tokens held, a plain `to` of them)."""
        length, to = self.get_seq_length(), whole_number(to, "a position to go back to")
        if self._calls.running is not None:
            raise StateError(
                "the cache cannot be moved while its model runs; if that was interrupted, call the model again or reset"
            )
        if not 0 <= to <= length:
            raise RewindError(f"rewind(to={to}): the cache holds {length} tokens; go to 0 up to that")
        return length, to

    def fork(self, n: int = 1) -> StateCache:
        """A new cache with every row `n` times, in the order of `generate`'s `num_return_sequences`; this one stays.

        One with the same rows (n = 1), and a `copy.deepcopy`, shares all memory until one of the two writes there: the
        first that goes on writes after the common tokens, where there is room, the others copy them then. So treat the
        layers' `keys` and `values` as read-only.
        """
        if (n := whole_number(n, "n")) < 1:
            raise StateError(f"fork({n}) was asked for; every row is there at least once")
        forked = copy.deepcopy(self)
        if n != 1 and self.get_seq_length():
            forked.batch_repeat_interleave(n)
        return forked

    def snapshot(self) -> CacheSnapshot:
        """All of it as an immutable value."""
        self._transfers.settle()
        kept = self._log.kept("a snapshot")
        if self._log.lost:
            raise StateError("a call failed in the middle of this recurrent model: rewind or reset before a snapshot")
        return CacheSnapshot(
            length=self.get_seq_length(),
            layers=tuple((layer.kind, layer.capture()) for layer in kept),
            known=self._log.known,
            history=self._log.history.tensors(),
            fingerprint=fingerprint_of(self.model),
        )

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Become what `snapshot` says. Raises `SnapshotError` if it is of another model; no error changes anything."""
        if self.model.config.is_encoder_decoder and {kind for kind, _ in snapshot.layers} == {FullAttentionLayer.kind}:
            self.attend_across()
        snapshot.check(fingerprint_of(self.model), [layer.kind for layer in self._log.kept("a restore")])
        twin = copy.deepcopy(self)  # which shares all memory until it is written
        pairs = list(zip(twin._log.kept("a restore"), (tensors for _, tensors in snapshot.layers)))
        for layer, tensors in pairs:
            layer.check(snapshot.length, tensors)
        device = self.model.device
        for layer, tensors in pairs:
            layer.put(snapshot.length, {name: tensor.to(device) for name, tensor in tensors.items()})
        twin._clear()
        twin._log.seen = snapshot.length
        twin._log.history = InputHistory.of(
            snapshot.length, snapshot.known, {name: x.to(device, copy=True) for name, x in snapshot.history.items()}
        )
        vars(self).update(vars(twin))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to one safetensors file, whole or not at all."""
        save(self.snapshot(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> StateCache:
        """A cache from a file that `save` wrote for the same weights. Raises `SnapshotError` otherwise.

        Keys and values of other heads or another width, in a file that was changed, end the first call in a
        `StateError`: before it, the cache cannot know those of the model.
        """
        cache = cls(model)
        cache.restore(load(path))
        return cache

    def nbytes(self) -> int:
        """Bytes of memory held by the layers, room to grow and what is shared with forks included."""
        return sum(layer.nbytes() for layer in self.layers if isinstance(layer, RewindableLayer))

    # ---- inside

    def _select(self, rows: Tensor) -> None:
        if rows.tolist() == list(range(self.rows)):
            return
        self._transfers.settle()
        try:
            for layer in self.layers:
                if isinstance(layer, RewindableLayer):
                    layer.select(rows)
                else:
                    layer.reorder_cache(rows)
            self._log.select(rows)
        except BaseException:
            self.reset()  # some layers have the new order and some have not: they do not fit together
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> StateCache:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        if self.offloading:
            self._transfers.settle()
            memo[id(self.prefetch_stream)] = self.prefetch_stream
        memo.update({id(held): held.clone() for held in computed(self.layers)})
        memo.update({id(held): held for held in shared([self.layers, self._log])})
        for name, value in self.__dict__.items():
            twin.__dict__[name] = copy.deepcopy(value, memo)
        return twin

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        raise TypeError("a StateCache belongs to its model and cannot be pickled: use cache.save(path)")
