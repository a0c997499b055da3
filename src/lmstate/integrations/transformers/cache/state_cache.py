"""The inference state of a model of transformers, as a cache that transformers takes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from lmstate.errors import StateError, UnsupportedError
from lmstate.integrations.transformers.cache import hooks
from lmstate.integrations.transformers.cache.history import Call, InputHistory
from lmstate.integrations.transformers.cache.layers.base import RewindableLayer, chosen
from lmstate.integrations.transformers.cache.layers.full import FullAttentionLayer, IndexedLayer
from lmstate.integrations.transformers.cache.layers.growable import GrowableTensor
from lmstate.integrations.transformers.cache.layers.hybrid import HybridLayer, HybridWindowLayer
from lmstate.integrations.transformers.cache.layers.recurrent import ConvLayer, RecurrentLayer
from lmstate.integrations.transformers.cache.layers.sliding import WindowLayer
from lmstate.integrations.transformers.cache.rollback import Rollback
from lmstate.integrations.transformers.cache.snapshot import CacheSnapshot, fingerprint_of, load, save

OURS: dict[str, type[RewindableLayer]] = {
    "full_attention": FullAttentionLayer,
    "sliding_attention": WindowLayer,
    "chunked_attention": WindowLayer,
    "indexed_attention": IndexedLayer,
    "conv": ConvLayer,
    "linear_attention": RecurrentLayer,
    "hybrid": HybridLayer,
    "hybrid_sliding": HybridWindowLayer,
}
ELSEWHERE = frozenset({"minimax", "recurrent_gemma", "reformer", "rwkv", "xlnet", "xlstm"})
"""Models that keep what they remember in their modules or in a cache of their own, in transformers 5.23."""


class StateCache(Rollback):
    """All that a model of transformers remembers, exact under every way of moving about in it.

    `cache = StateCache(model)`, then `model(**inputs, past_key_values=cache)` or `model.generate(..., past_key_values=
    cache)`. Keys and values lie in memory that doubles, so that no token copies those before it. Left padding, masks
    and positions stay the caller's business, as with `DynamicCache`.

    Going back (`rewind`, `crop`) is free for attention, and in sliding windows up to `rewind` tokens. A recurrent layer
    cannot run backwards: its carry is kept at up to `anchors` earlier places (the turns of a chat, and every 256
    tokens), and before every draft while `generate` drafts; from the last of them that lies early enough the tokens
    are fed again through the model, those and no others, and counted in `recomputed`.

    `model`: a model of transformers, or a module around one (PEFT's); the cache belongs to the model of transformers.
    Raises `UnsupportedError` for a model whose state transformers keeps elsewhere, and for a module without one.

    A subclass of `DynamicCache` because transformers' encoder-decoder cache and some models ask for one by that name.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rewind: int = 16,
        anchors: int = 4,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
    ) -> None:
        model = _unwrapped(model)
        config = model.config.get_text_config(decoder=True)
        if config.model_type in ELSEWHERE:
            raise UnsupportedError(
                f"StateCache(model) was asked for; {type(model).__name__} keeps its state in its modules or in a cache "
                "of its own, where no other cache can move it: run it without one"
            )
        layers = [_layer(kind, arguments, rewind) for kind, arguments in zip(*get_layer_types_and_kwargs(config))]
        Cache.__init__(self, layers=layers, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding)
        Rollback.__init__(self, model, anchors)
        hooks.attach(model)

    # ---- what transformers asks

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that `update` will give back for so many queries."""
        if layer_idx >= len(self.layers):
            return query_length, 0
        layer = self.layers[layer_idx]
        if not isinstance(layer, CacheLayerMixin):
            layer = self._attention
        return (self._seen + query_length, 0) if layer is None else layer.get_mask_sizes(query_length)

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
    update = torch.compiler.disable(Rollback.update)

    @torch.compiler.disable
    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Store a convolution's inputs; the other arguments are the layer's business."""
        self._expect_call()
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable
    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Store a carry; the other arguments are the layer's business."""
        self._expect_call()
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """Expect `crop` after each call: keep what it takes to go back to before the call."""
        self._recording = True
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, exactly, for every kind of layer. 0: they are here to stay."""
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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(torch.arange(self.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor | Sequence[int] | Sequence[bool]) -> None:
        self._select(chosen(indices))

    # ---- moving about

    def fork(self, n: int = 1) -> StateCache:
        """A new cache with every row `n` times, in the order of `generate`'s `num_return_sequences`; this one stays."""
        forked = copy.deepcopy(self)
        if n != 1 and self.get_seq_length():
            forked.batch_repeat_interleave(n)
        return forked

    def snapshot(self) -> CacheSnapshot:
        """All of it as an immutable value."""
        kept = self._kept("a snapshot")
        if self._lost:
            raise StateError("a call failed in the middle of this recurrent model: rewind or reset before a snapshot")
        return CacheSnapshot(
            length=self.get_seq_length(),
            layers=tuple((layer.kind, layer.capture()) for layer in kept),
            known=self._history.known if self._forgets else 0,
            history=self._history.tensors(),
            fingerprint=fingerprint_of(self.model),
        )

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Become what `snapshot` says. Raises `SnapshotError`, having changed nothing, if it is of another model."""
        kept = self._kept("a restore")
        snapshot.check(fingerprint_of(self.model), [layer.kind for layer in kept])
        pairs = list(zip(kept, (tensors for _, tensors in snapshot.layers)))
        for layer, tensors in pairs:
            layer.check(snapshot.length, tensors)
        device = self.model.device
        for layer, tensors in pairs:
            layer.put(snapshot.length, {name: tensor.to(device) for name, tensor in tensors.items()})
        self._clear()
        self._seen = snapshot.length
        self._history = InputHistory.of(
            snapshot.length, snapshot.known, {name: x.to(device) for name, x in snapshot.history.items()}
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to one safetensors file, whole or not at all."""
        save(self.snapshot(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> StateCache:
        """A cache from a file that `save` wrote for the same weights. Raises `SnapshotError` otherwise."""
        cache = cls(model)
        cache.restore(load(path))
        return cache

    def nbytes(self) -> int:
        """Bytes of memory held by the layers, room to grow included."""
        return sum(layer.nbytes() for layer in self.layers if isinstance(layer, RewindableLayer))

    # ---- inside

    def _select(self, rows: Tensor) -> None:
        for layer in self.layers:
            if isinstance(layer, RewindableLayer):
                layer.select(rows)
            else:
                layer.reorder_cache(rows)
        self._history.select(rows)
        for anchor in {id(a): a for a in (*self._anchors, self._draft) if a is not None}.values():
            anchor.carries = {
                i: {name: held.index_select(0, rows.to(held.device)) for name, held in carry.items()}
                for i, carry in anchor.carries.items()
            }

    def __deepcopy__(self, memo: dict[int, Any]) -> StateCache:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo.update({id(held): held.clone() for held in _computed([self.layers, self._history])})
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value if name == "_model" else copy.deepcopy(value, memo)
        return twin

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        raise TypeError("a StateCache belongs to its model and cannot be pickled: use cache.save(path)")


def _computed(value: object) -> Iterator[Tensor]:
    """The tensors in here that a gradient follows, which torch refuses to copy deeply."""
    if isinstance(value, Tensor):
        if not value.is_leaf:
            yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _computed(part)
    elif isinstance(
        value, RewindableLayer | CacheLayerMixin | LinearAttentionCacheLayerMixin | GrowableTensor | InputHistory | Call
    ):
        yield from _computed(vars(value))


def _unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model of transformers itself, which `generate` of a wrapper around it calls past the wrapper."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise UnsupportedError(f"StateCache(model) was asked for; a {type(model).__name__} is no model of transformers")


def _layer(kind: str, arguments: dict[str, Any], rewind: int) -> Any:
    """A layer of ours, or transformers' own where we have none of the kind (it then keeps transformers' limits)."""
    if kind not in OURS:
        return DYNAMIC_LAYER_TYPE_MAPPING[kind](**arguments)
    ours: Any = OURS[kind]
    if issubclass(ours, WindowLayer):
        arguments = {**arguments, "rewind": rewind}
    return ours(**arguments)
