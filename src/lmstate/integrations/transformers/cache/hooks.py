"""Forward hooks, and wrappers around three methods of `generate`, that let a cache observe each call of its model.

All are added to the one model and do nothing for calls with another cache. The wrappers precede methods that
`generate` calls, not before `generate` itself: in `model.generate(..., cache=StateCache(model))` Python has taken
that from the model before the cache is made.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from lmstate.integrations.transformers.cache.history import CACHES, EMBEDS, IDS, MASK, OUTPUTS, ForwardCall

GENERATE = next(
    name for name in CACHES if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
"""The name by which `generate` of the installed transformers knows a cache, whatever the model calls it."""


class CallObserver(ABC):
    """The part of a cache that is told of each call of its model, before and after."""

    feeds_singly: bool
    """Whether tokens that follow others are fed singly, since the model would get them wrong together."""

    @abstractmethod
    def is_of(self, model: nn.Module) -> bool:
        """Whether it was made for this very module: calls of a part of it or of one around it are not the cache's."""

    @abstractmethod
    def check_related(self, model: nn.Module) -> None:
        """Raise `StateError` unless this module is a part of the cache's model or around it."""

    @abstractmethod
    def admit(self, rows: int, held: int) -> None:
        """Raise `StateError` unless a call with `rows` rows can continue a cache of `held` rows (0: empty)."""

    @property
    @abstractmethod
    def padding(self) -> Tensor | None:
        """The mask `[R, T]` of the tokens that are fed now, if some are padding and the model is recurrent."""

    @abstractmethod
    def with_whole_mask(self, call: ForwardCall) -> ForwardCall:
        """The call with a mask of the whole text, where it was given one of its last tokens."""

    @abstractmethod
    def fed(self, call: ForwardCall) -> dict[str, Any]:
        """The part of a call that the model takes: one without attention takes the mask of the new tokens alone."""

    @abstractmethod
    def feeds_apart(self, call: ForwardCall, outputs: dict[str, Any]) -> bool:
        """Whether the part of a call whose logits nothing asked for should be fed before the rest."""

    @abstractmethod
    def begin(self, call: ForwardCall) -> None:
        """A call is about to run."""

    @abstractmethod
    def end(self, failed: bool) -> list[ModelOutput]:
        """End a call that has run, or failed; returns the outputs of its tokens that were fed singly."""

    @abstractmethod
    def feed_first(self, cache: ObservedCache, call: ForwardCall, stop: int) -> ForwardCall:
        """Feed the tokens of a call up to `stop`; the call for the rest."""

    @abstractmethod
    def feed_one_by_one(self, cache: ObservedCache, call: ForwardCall, outputs: dict[str, Any]) -> ForwardCall:
        """Feed all tokens of a call but the last, keeping what they give; the call for that one.

        Raises `UnsupportedError`, having fed nothing, for outputs that cannot be put together from single tokens.
        """


class ObservedCache(ABC):
    """A cache whose model's calls are observed."""

    @property
    @abstractmethod
    def observer(self) -> CallObserver:
        """The observer of its calls."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows of the batch; 0 before the first call."""

    @abstractmethod
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held, left padding included."""

    @abstractmethod
    def attend_across(self) -> None:
        """Become the cache of cross-attention, which sees all of its source whatever windows the decoder has."""


def attach(model: PreTrainedModel) -> None:
    """Install the hooks by which the caches of a model see its calls."""
    if not any(hook is before for hook in model._forward_pre_hooks.values()):
        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after, with_kwargs=True, always_call=True)
        for mixer in model.modules():
            if _mask_name(mixer) is not None and any(isinstance(part, nn.Conv1d) for part in mixer.children()):
                mixer.register_forward_pre_hook(mask_padding, with_kwargs=True)
    if model.config.is_encoder_decoder:
        vars(model)["_prepare_cache_for_generation"] = MethodType(_prepare_pair_for_generation, model)
    elif getattr(model, "_is_stateful", False):
        for wrapper in (_validate_model_kwargs, _validate_generation_mode, _prepare_cache_for_generation):
            vars(model)[wrapper.__name__] = MethodType(wrapper, model)


def parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """The names of what the forward of a class of models takes, in order."""
    return _names(kind.forward)


@lru_cache(maxsize=64)
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def cache_name(model: nn.Module) -> str:
    """The name by which the forward of a model takes its cache."""
    known = parameters(type(model))
    return next((name for name in CACHES if name in known), GENERATE)


def cache_of(given: dict[str, Any]) -> ObservedCache | None:
    """The observing cache that a call was given, if any."""
    return next((cache for name in CACHES if isinstance(cache := given.get(name), ObservedCache)), None)


def _pair_of(given: dict[str, Any]) -> EncoderDecoderCache | None:
    """The pair of caches that a call was given, if any."""
    return next((cache for name in CACHES if isinstance(cache := given.get(name), EncoderDecoderCache)), None)


@torch.compiler.disable
def before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tell the cache what it is about to be fed; it may feed a first part on its own and shorten the rest."""
    given = dict(zip(parameters(type(model)), args)) | kwargs
    cache = cache_of(given)
    pair = _pair_of(given)
    if pair is not None and isinstance(pair.cross_attention_cache, ObservedCache):
        pair.cross_attention_cache.attend_across()
    if cache is None:
        return args, kwargs
    observer = cache.observer
    if not observer.is_of(model):
        observer.check_related(model)
        return args, kwargs
    given = {key: value for key, value in given.items() if key not in CACHES}
    name = cache_name(model)
    fed = given.get(IDS) if given.get(IDS) is not None else given.get(EMBEDS)
    if fed is None:  # an encoder-decoder model, whose cache needs no calls
        return (), {**given, name: cache}
    observer.admit(fed.shape[0], cache.rows)
    inputs = {key: value for key, value in given.items() if key not in OUTPUTS and value is not None}
    call = ForwardCall(cache.get_seq_length(), cache.get_seq_length() + fed.shape[1], inputs)
    call = observer.with_whole_mask(call)
    outputs = {key: value for key, value in given.items() if key in OUTPUTS}
    kept = outputs.get("logits_to_keep")
    if observer.feeds_singly and call.start and fed.shape[1] > 1:
        call = observer.feed_one_by_one(cache, call, outputs)
    elif isinstance(kept, int) and 0 < kept < fed.shape[1] and observer.feeds_apart(call, outputs):
        # A rejected draft would cost the prompt a second time; so the prompt, whose logits are not wanted, goes first.
        call = observer.feed_first(cache, call, call.stop - kept)
    observer.begin(call)
    return (), {**observer.fed(call), **outputs, name: cache}


@torch.compiler.disable
def mask_padding(
    mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Have a recurrent mixer see the padding among its tokens, also of one token, whose mask its model leaves out."""
    given = dict(zip(parameters(type(mixer)), args)) | kwargs
    cache, name = cache_of(given), _mask_name(mixer)
    if cache is None or cache.observer.padding is None or name is None:
        return None
    return (), {**given, name: cache.observer.padding}


def _mask_name(mixer: nn.Module) -> str | None:
    """The name by which a recurrent mixer takes the mask of its tokens."""
    return next((name for name in (MASK, "conv_mask") if name in parameters(type(mixer))), None)


@torch.compiler.disable
def after(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Tell the cache that the call is over. `output` is None if it failed."""
    cache = cache_of(kwargs)
    if cache is None or not cache.observer.is_of(model):
        return None
    earlier = cache.observer.end(failed=output is None)
    if output is None or isinstance(output, tuple):
        return None
    if earlier:
        _join(earlier, output, kwargs.get("logits_to_keep"))
    if cache_name(model) != GENERATE:
        output[GENERATE] = cache  # under the name that the rest of transformers asks for
    return None


def per_token(output: ModelOutput) -> str:
    """The name of what a model gives for each token: its logits, or the last hidden state of one without a head."""
    return "logits" if "logits" in output else "last_hidden_state"


def _join(earlier: list[ModelOutput], output: ModelOutput, kept: int | None) -> None:
    """Put what single tokens gave before what the last one gave; `kept`: logits that were asked for, if not all."""
    name, parts = per_token(output), [*earlier, output]
    given = torch.cat([part[name] for part in parts], dim=1)
    output[name] = given[:, -kept:] if kept and name == "logits" else given
    if output.get("hidden_states") is not None:
        layers = zip(*(part["hidden_states"] for part in parts))
        output["hidden_states"] = tuple(torch.cat(layer, dim=1) for layer in layers)


# ---- wrappers: under the names of the methods that they wrap, with the same parameters


def _validate_model_kwargs(self: Any, model_kwargs: dict[str, Any]) -> None:
    """A model may know the cache by another name; `_prepare_cache_for_generation` sees to that."""
    unknown = {GENERATE} if cache_of(model_kwargs) is not None and cache_name(self) != GENERATE else set()
    type(self)._validate_model_kwargs(self, {key: value for key, value in model_kwargs.items() if key not in unknown})


def _validate_generation_mode(self: Any, *args: Any, **kwargs: Any) -> None:
    """Check the generation mode, but let drafts for recurrent models pass: `generate` looks at the cache later."""
    self._is_stateful = False
    try:
        type(self)._validate_generation_mode(self, *args, **kwargs)
    finally:
        self.__dict__.pop("_is_stateful", None)


def _prepare_cache_for_generation(
    self: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
) -> None:
    """Ours can go back, so drafts are refused without it only; they ask for it by the one name, whatever the model."""
    cache, inherited = cache_of(model_kwargs), type(self)
    if cache is None:
        inherited._validate_generation_mode(self, generation_mode, generation_config, {})
    else:
        model_kwargs[cache_name(self)] = model_kwargs.pop(GENERATE, cache)
    inherited._prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *args, **kwargs)
    if cache is not None:
        model_kwargs[GENERATE] = model_kwargs.pop(cache_name(self))


def _prepare_pair_for_generation(
    self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Keep the caller's cache of cross-attention, where a model (T5Gemma) makes another one of its class."""
    pair, inherited = _pair_of(model_kwargs), type(self)
    if pair is None or not isinstance(pair.cross_attention_cache, ObservedCache):
        inherited._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)
        return
    cache, pair.cross_attention_cache = pair.cross_attention_cache, DynamicCache()
    try:
        inherited._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)
    finally:
        pair.cross_attention_cache = cache
