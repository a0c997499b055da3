"""Sounds as sources: transformers' extractor and model as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lmstate
from lmstate.audio.listener import FILE
from tests.audio.small import saved
from tests.audio.test_wav import tone, wav
from tests.zoo import ours


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, lmstate.Model, Path]:
    folder = tmp_path_factory.mktemp("whisper")
    return saved(folder), lmstate.load(folder, weights="float32"), folder


@pytest.mark.parametrize("seconds", [0.01, 0.5, 1.0])
def test_a_sound_is_heard_as_transformers_hears_it(hearing: tuple[Any, lmstate.Model, Path], seconds: float) -> None:
    import transformers

    theirs, model, folder = hearing
    samples = tone(700, 16_000, seconds)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    inputs = extractor(samples.numpy(), sampling_rate=16_000, return_tensors="pt")
    source = model.listen(samples)
    assert torch.equal(source.values, inputs.input_features[0].T)
    assert model.listen(wav(samples, width=4)).values.sub(source.values).abs().max() < 1e-2
    ids = torch.tensor([[theirs.config.decoder_start_token_id, 5, 7, 9]])
    state = model.new_state()
    state.condition(0, source)
    with torch.no_grad():
        expected = theirs(**inputs, decoder_input_ids=ids).logits
    torch.testing.assert_close(model(ids, state, logits="all"), expected, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_heard_is_refused(hearing: tuple[Any, lmstate.Model, Path], tmp_path: Path) -> None:
    _, model, _ = hearing
    for bad in (torch.zeros(0), torch.zeros(16_001), torch.zeros(2, 8), torch.zeros(5, dtype=torch.int64)):
        with pytest.raises(lmstate.StateError, match="sound"):
            model.listen(bad)
    with pytest.raises(lmstate.StateError, match=r"1\.5 seconds"):
        model.listen(wav(tone(440, 8_000, 1.5), 8_000))
    with pytest.raises(lmstate.UnsupportedError, match="reads no sounds"):
        ours("llama").listen(wav(tone(440, 8_000)))
    with pytest.raises(lmstate.UnsupportedError, match="checkpoint folders"):
        ours("whisper").listen(wav(tone(440, 8_000)))
    saved(tmp_path)
    for content in ("", "[]", '{"sampling_rate": -5}', '{"chunk_length": 1e9}', '{"feature_size": "x"}'):
        (tmp_path / FILE).write_text(content)
        with pytest.raises(lmstate.ModelError, match=FILE):
            lmstate.load(tmp_path, weights="float32").listen(tone(440, 16_000))
