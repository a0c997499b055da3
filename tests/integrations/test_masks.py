"""Attention masks of padded batches under recurrent models: a text in pieces is as the whole text with its mask."""

from __future__ import annotations

import itertools

import pytest
import torch

from lmstate.integrations.transformers import StateCache
from lmstate.integrations.transformers.cache.hooks import cache_name, parameters
from tests.integrations.models import decoder, text

MAMBAS = (
    "mamba", "falcon_mamba", "mamba2", "bamba", "granitemoehybrid", "jamba", "nemotron_h", "falcon_h1", "zamba",
    "zamba2",
)  # fmt: skip
OTHERS = ("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "olmo_hybrid")
LENGTH = 18
PADDING = {"none": (0, 0), "left": (0, 3), "left over a cut": (0, 12), "inside": (11, 14), "right": (15, 18)}


@pytest.mark.parametrize("name", (*MAMBAS, *OTHERS))
@pytest.mark.parametrize("padding", PADDING)
def test_pieces_with_masks_are_as_the_whole_text(name: str, padding: str) -> None:
    """Each call is given the mask of the text so far, of its own tokens and two before them, or of its own tokens."""
    model, ids = decoder(name), text(LENGTH, rows=2)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, slice(*PADDING[padding])] = 0
    places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if "position_ids" in parameters(type(model)) else {}
    with torch.no_grad():
        right = model(ids, attention_mask=mask, use_cache=False, **places).logits
        for cuts, before in itertools.product(([0, 10, 18], [0, 4, 10, 11, 18]), (100, 2, 0)):
            cache, given = StateCache(model), []
            for start, stop in itertools.pairwise(cuts):
                own = {key: value[:, start:stop] for key, value in places.items()}
                own["attention_mask"] = mask[:, max(0, start - before) : stop]
                given.append(model(ids[:, start:stop], **{cache_name(model): cache}, use_cache=True, **own).logits)
            seen = mask.bool()
            torch.testing.assert_close(torch.cat(given, dim=1)[seen], right[seen], atol=1e-4, rtol=1e-4)
