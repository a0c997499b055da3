"""`StateCache` under transformers' models on the GPU, where layers also travel on streams of their own."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from lmstate.integrations.transformers import StateCache
from tests.cuda import needs_gpu
from tests.integrations.models import DECODERS, call, decoder, text

pytestmark = needs_gpu
CUTS = (0, 30, 31, 32, 37, 50, 51, 60)


def there(name: str) -> Any:
    return copy.deepcopy(decoder(name)).cuda()


def whole(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_cut_rewound_forked_and_saved_it_gives_what_the_whole_text_gives(name: str, tmp_path: Path) -> None:
    model, ids = there(name), text(60, rows=2).cuda()
    cache, expected = StateCache(model), whole(model, ids)
    for a, b in itertools.pairwise(CUTS):
        close(call(model, ids[:, a:b], cache, a), expected[:, a:b])
    cache.rewind(to=41)
    close(call(model, ids[:, 41:45], cache, 41), expected[:, 41:45])
    cache.rewind(to=12)
    close(call(model, ids[:, 12:30], cache, 12), expected[:, 12:30])
    forked, snapshot = cache.fork(2), cache.snapshot()
    close(call(model, ids[:, 30:34].repeat_interleave(2, 0), forked, 30), expected[:, 30:34].repeat_interleave(2, 0))
    cache.save(tmp_path / "cache")
    loaded = StateCache.load(tmp_path / "cache", model)
    for other in (cache, loaded):
        close(call(model, ids[:, 30:60], other, 30), expected[:, 30:60])
    cache.restore(snapshot)
    close(call(model, ids[:, 30:31], cache, 30), expected[:, 30:31])


@pytest.mark.parametrize("name", [name for name in DECODERS if "mamba" not in name])
@pytest.mark.parametrize("only_non_sliding", [False, True])
def test_an_offloading_cache_gives_what_the_whole_text_gives(name: str, only_non_sliding: bool) -> None:
    """Not beside a `DynamicCache` that offloads, which reads what is still on its way, in transformers 5.24."""
    model, ids = there(name), text(60, rows=2).cuda()
    cache = StateCache(model, offloading=True, offload_only_non_sliding=only_non_sliding)
    expected = whole(model, ids)
    for a, b in itertools.pairwise(CUTS):
        close(call(model, ids[:, a:b], cache, a), expected[:, a:b])
    for to in (51, 20):
        cache.rewind(to=to)
        close(call(model, ids[:, to : to + 9], cache, to), expected[:, to : to + 9])
    forked, snapshot = cache.fork(), cache.snapshot()
    for other in (forked, cache):
        close(call(model, ids[:, 29:40], other, 29), expected[:, 29:40])
    cache.restore(snapshot)
    cache.batch_select_indices(torch.tensor([1]))
    close(call(model, ids[1:, 29:40], cache, 29), expected[1:, 29:40])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "falcon_h1"])
def test_generating_gives_the_text_of_transformers(name: str) -> None:
    model, ids = there(name), text(20, rows=2).cuda()
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **options)
    assert model.generate(ids, past_key_values=StateCache(model), **options).tolist() == expected.tolist()
