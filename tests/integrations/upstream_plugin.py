"""Plugin for a pytest of transformers' own tests: `generate` makes a StateCache where it would make a DynamicCache."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin

from lmstate.errors import UnsupportedError
from lmstate.integrations.transformers import StateCache
from lmstate.integrations.transformers.cache.history import CACHES

PLACED = 0
"""Caches put in place since the session began."""
_inherited = GenerationMixin._prepare_cache_for_generation


def _placed(model: Any, cache: Any) -> Any:
    global PLACED
    if isinstance(cache, EncoderDecoderCache):
        halves = (cache.self_attention_cache, cache.cross_attention_cache)
        return EncoderDecoderCache(*(_placed(model, half) for half in halves))
    if type(cache) is not DynamicCache:
        return cache
    try:
        ours = StateCache(model, offloading=cache.offloading)
    except UnsupportedError:
        return cache
    PLACED += 1
    return ours


def _prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    given = {name for name in CACHES if model_kwargs.get(name) is not None}
    _inherited(self, generation_config, model_kwargs, *args, **kwargs)
    for name in set(CACHES) - given:  # a cache of the caller's stays
        if model_kwargs.get(name) is not None:
            model_kwargs[name] = _placed(self, model_kwargs[name])
            if generation_config.is_assistant:
                model_kwargs[name].activate_past_recording()


def pytest_configure(config: pytest.Config) -> None:
    GenerationMixin._prepare_cache_for_generation = _prepare  # type: ignore[method-assign]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{PLACED} StateCaches were put in place")
