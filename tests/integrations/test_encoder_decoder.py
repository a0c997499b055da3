"""Encoder-decoder models: one StateCache for each kind of attention, inside transformers' own pair of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EncoderDecoderCache, set_seed

from lmstate.integrations.transformers import StateCache
from tests.integrations.models import ENCODER_DECODERS, encoder_decoder, text


def pair(model: Any) -> EncoderDecoderCache:
    return EncoderDecoderCache(StateCache(model), StateCache(model))


@pytest.mark.parametrize("name", ENCODER_DECODERS)
@pytest.mark.parametrize("beams", (1, 3))
def test_generated_text_is_that_of_the_default_cache(name: str, beams: int) -> None:
    model, ids = encoder_decoder(name), text(15, rows=2)
    settings: dict[str, Any] = {"max_new_tokens": 10, "num_beams": beams, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, **settings, past_key_values=pair(model)))
    set_seed(0)
    sampled = model.generate(ids, max_new_tokens=10, do_sample=True)
    set_seed(0)
    assert torch.equal(sampled, model.generate(ids, max_new_tokens=10, do_sample=True, past_key_values=pair(model)))


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_cross_attention_is_computed_once(name: str) -> None:
    model, ids = encoder_decoder(name), text(15)
    cache, decoded = pair(model), text(6, seed=1)
    with torch.no_grad():
        whole = model(ids, decoder_input_ids=decoded).logits
        encoded = model.get_encoder()(ids)
        pieces = []
        for t in range(6):
            out = model(encoder_outputs=encoded, decoder_input_ids=decoded[:, t : t + 1], past_key_values=cache)
            pieces.append(out.logits)
            if t == 0:
                places = [layer.keys.data_ptr() for layer in cache.cross_attention_cache.layers]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == 6 and cache.cross_attention_cache.get_seq_length() == 15
    assert [layer.keys.data_ptr() for layer in cache.cross_attention_cache.layers] == places


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_drafts_give_the_greedy_text(name: str) -> None:
    model, ids = encoder_decoder(name), text(15)
    alone = model.generate(ids, max_new_tokens=12, do_sample=False)
    drafted = model.generate(
        ids, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3, past_key_values=pair(model)
    )
    assert torch.equal(drafted, alone)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_both_halves_go_on_from_a_file(name: str, tmp_path: Path) -> None:
    model, ids = encoder_decoder(name), text(15)
    cache, decoded = pair(model), text(6, seed=1)
    with torch.no_grad():
        encoded = model.get_encoder()(ids)
        whole = model(encoder_outputs=encoded, decoder_input_ids=decoded).logits
        model(encoder_outputs=encoded, decoder_input_ids=decoded[:, :4], past_key_values=cache)
        cache.self_attention_cache.save(tmp_path / "self")
        cache.cross_attention_cache.save(tmp_path / "cross")
        loaded = EncoderDecoderCache(*(StateCache.load(tmp_path / half, model) for half in ("self", "cross")))
        rest = model(encoder_outputs=encoded, decoder_input_ids=decoded[:, 4:], past_key_values=loaded).logits
    torch.testing.assert_close(rest, whole[:, 4:], atol=1e-4, rtol=1e-4)
