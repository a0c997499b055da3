"""What a model of transformers is given so that its cache sees each call: two forward hooks, and a door in `generate`.

All is added to the one model, once, and does nothing for calls with another cache.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from lmstate.integrations.transformers.history import EMBEDS, IDS, OUTPUTS, Call

if TYPE_CHECKING:
    from lmstate.integrations.transformers.cache import StateCache

CACHE, PARAMS = "past_key_values", "cache_params"  # Mamba's models call it so


def attach(model: nn.Module) -> None:
    """Have the caches of this model see its calls."""
    if any(hook is before for hook in model._forward_pre_hooks.values()):
        return
    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True, always_call=True)
    if getattr(model, "_is_stateful", False):
        model.generate = MethodType(generate, model)


@lru_cache(maxsize=64)
def parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """The names of what the model's forward takes, in order."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def cache_name(model: nn.Module) -> str:
    return PARAMS if PARAMS in parameters(type(model)) else CACHE


def cache_of(given: dict[str, Any]) -> StateCache | None:
    """The cache of ours that a call was given, if any."""
    from lmstate.integrations.transformers.cache import StateCache

    for name in (CACHE, PARAMS):
        if isinstance(cache := given.get(name), StateCache):
            return cache
    return None


def before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tell the cache what it is about to be fed; it may feed a first part on its own and shorten the rest."""
    given = dict(zip(parameters(type(model)), args)) | kwargs
    cache = cache_of(given)
    if cache is None:
        return args, kwargs
    given.pop(CACHE, None)
    given.pop(PARAMS, None)
    name = cache_name(model)
    fed = given.get(IDS) if given.get(IDS) is not None else given.get(EMBEDS)
    if fed is None:  # an encoder-decoder model, whose cache needs no calls
        return (), {**given, name: cache}
    inputs = {key: value for key, value in given.items() if key not in OUTPUTS and value is not None}
    call = Call(cache.get_seq_length(), cache.get_seq_length() + fed.shape[1], inputs)
    outputs = {key: value for key, value in given.items() if key in OUTPUTS}
    kept = outputs.get("logits_to_keep")
    if isinstance(kept, int) and 0 < kept < fed.shape[1] and cache.feeds_apart(call, outputs):
        # A rejected draft would cost the prompt a second time; so the prompt, whose logits nobody wants, goes first.
        split = call.stop - kept
        cache.feed(call.part(split))
        call = Call(split, call.stop, {**call.given, **_tail(call, kept)})
    cache.begin(call)
    return (), {**call.given, **outputs, name: cache}


def _tail(call: Call, count: int) -> dict[str, Any]:
    """What differs in a call for its last `count` tokens only."""
    first = call.part(call.stop - count)
    tail = {}
    for key, value in first.items():
        if key == "attention_mask" or value is call.given[key]:
            continue
        tail[key] = call.given[key][..., -count:] if key != EMBEDS else call.given[key][:, -count:]
    return tail


def after(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Tell the cache that the call is over. `output` is None if it failed."""
    cache = cache_of(kwargs)
    if cache is None:
        return None
    cache.end(failed=output is None)
    if output is not None and cache_name(model) == PARAMS and not isinstance(output, tuple):
        output.past_key_values = cache  # under the name that the rest of transformers asks for
    return None


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own `generate`, which refuses drafts for recurrent models whatever the cache: ours can go back.

    Only for the call, and only if it comes with a cache that can. It takes what that `generate` takes, hence the
    passing through.
    """
    cache = cache_of(kwargs)
    inherited = type(self).generate
    if cache is None:
        return inherited(self, *args, **kwargs)
    if cache_name(self) == PARAMS:
        kwargs[CACHE] = kwargs[PARAMS] = cache
    self._is_stateful = False
    try:
        return inherited(self, *args, **kwargs)
    finally:
        del self._is_stateful
