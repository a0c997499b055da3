"""Layers that are sent away between their turns: a StateCache stays what it is, as transformers' own does.

No second device is needed: what is sent away comes back as a copy, and the streams stand still.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from lmstate.integrations.transformers import StateCache
from tests.integrations.models import DECODERS, call, decoder, text

CUTS = (0, 30, 31, 32, 37, 50, 51, 60)
ATTENTION = ("llama", "mistral", "gemma3", "llama4", "deepseek_v3", "deepseek_v32", "gemma3n")


class Still:
    """A stream of a machine with one device."""

    def wait_stream(self, other: Still) -> None: ...
    def synchronize(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the tensors sent away; each is a copy afterwards, as from another device."""
    away: list[int] = []
    to = torch.Tensor.to

    def moved(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args[:1] == ("cpu",) and kwargs.get("non_blocking"):
            away.append(x.shape[0])
            return x.clone()
        return to(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(torch, "Stream", Still)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Still())
    yield away


@pytest.mark.parametrize("name", [name for name in DECODERS if "mamba" not in name])
@pytest.mark.parametrize("only_non_sliding", [False, True])
def test_an_offloading_cache_gives_the_logits_of_transformers(
    name: str, only_non_sliding: bool, sent: list[int]
) -> None:
    model, ids = decoder(name), text(60, rows=2)
    settings = {"offloading": True, "offload_only_non_sliding": only_non_sliding}
    ours, theirs = StateCache(model, **settings), DynamicCache(config=model.config, **settings)
    if only_non_sliding and all(sliding or linear for sliding, linear in zip(theirs.is_sliding, theirs.is_linear)):
        assert not ours.offloading  # no layer is ever sent away, where transformers fails in the first call
        torch.testing.assert_close(call(model, ids, ours), call(model, ids, StateCache(model)))
        return
    counts = []
    for a, b in itertools.pairwise(CUTS):
        pieces = []
        for cache in (ours, theirs):
            sent.clear()
            pieces.append(call(model, ids[:, a:b], cache, a))
            counts.append(len(sent))
        if not ours.feeds_singly:
            torch.testing.assert_close(*pieces, atol=1e-5, rtol=1e-5)
            assert counts[-2] >= counts[-1] > 0  # theirs forgets the windows of Inkling's layers


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.usefixtures("sent")
def test_what_was_sent_away_can_still_be_rewound_for_nothing(name: str) -> None:
    model, ids = decoder(name), text(60, rows=2)
    cache = StateCache(model, offloading=True)
    for at in (slice(0, 30), slice(30, 40), *(slice(i, i + 1) for i in range(40, 50))):
        call(model, ids[:, at], cache)
    assert cache.rewind_cost(to=41) == 0
    cache.rewind(to=41)
    cache.batch_select_indices(torch.tensor([1]))
    with torch.no_grad():
        expected = model(ids[1:]).logits[:, 41:]
    torch.testing.assert_close(call(model, ids[1:, 41:], cache), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.usefixtures("sent")
def test_layers_offloaded_and_fetched_by_hand_hold_what_they_held(name: str) -> None:
    model, ids = decoder(name), text(60, rows=2)
    cache = StateCache(model)
    for layer in cache.layers:  # nothing is there yet
        layer.offload()
        layer.prefetch()
    call(model, ids[:, :50], cache)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    expected = StateCache(model)
    call(model, ids[:, :50], expected)
    torch.testing.assert_close(
        call(model, ids[:, 50:], cache), call(model, ids[:, 50:], expected), atol=1e-5, rtol=1e-5
    )
    assert cache.get_seq_length() == 60
