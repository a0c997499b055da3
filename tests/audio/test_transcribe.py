"""Transcripts: transformers' own `generate` of Whisper as the oracle, for sounds of any length."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import lmstate
from lmstate.audio.speech import SpeechGrammar, pieces_of
from tests.audio.small import IDS, saved
from tests.audio.test_wav import wav
from tests.zoo import ours

Hearing = tuple[Any, lmstate.Model, Path]


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Hearing:
    folder = tmp_path_factory.mktemp("whisper")
    return saved(folder), lmstate.load(folder, weights="float32"), folder


def noise(seconds: float, seed: int = 0) -> torch.Tensor:
    """Different noises one after the other, at 16,000 samples per second."""
    generator = torch.Generator().manual_seed(seed)
    loud = torch.rand(int(seconds * 10) + 1, generator=generator).repeat_interleave(1_600)
    samples = torch.randn(len(loud), generator=generator) * loud * 0.3
    return samples[: int(seconds * 16_000)].clamp(-1, 1)


def theirs_of(hearing: Hearing, samples: torch.Tensor, **options: Any) -> Any:
    import transformers

    theirs, _, folder = hearing
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    more = {"truncation": False, "padding": "longest"} if len(samples) > 16_000 else {}
    inputs = extractor(samples.numpy(), sampling_rate=16_000, return_tensors="pt", return_attention_mask=True, **more)
    with torch.no_grad():
        return theirs.generate(**inputs, use_cache=False, return_segments=True, **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("task", ["transcribe", "translate"])
@pytest.mark.parametrize("language", [None, "de"])
@pytest.mark.parametrize("times", [False, True])
def test_a_short_transcript_is_that_of_transformers(
    hearing: Hearing, times: bool, language: str | None, task: str, seed: int
) -> None:
    samples = noise(0.9, seed)
    expected = theirs_of(hearing, samples, language=language, task=task, return_timestamps=times)
    made = hearing[1].transcribe(samples, language=language, task=task, times=times)
    check(made, expected)
    assert made.language in ("en", "de", "fr") and (language is None or made.language == language)
    assert made.duration == 0.9


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("seconds", [1.4, 3.33, 6.0])
def test_a_long_transcript_is_that_of_transformers(hearing: Hearing, seconds: float, seed: int) -> None:
    samples = noise(seconds, seed)
    expected = theirs_of(hearing, samples, language="fr", task="transcribe", return_timestamps=True)
    check(hearing[1].transcribe(samples, language="french"), expected)


def check(made: Any, expected: Any) -> None:
    segments = expected["segments"][0]
    assert [words(each.tokens) for each in made.segments] == [words(each["tokens"].tolist()) for each in segments]
    for own, theirs in zip(made.segments, segments, strict=True):
        assert own.start == pytest.approx(float(theirs["start"]), abs=1e-6)
        assert own.end == pytest.approx(float(theirs["end"]), abs=1e-6)
    assert sum(len(each.tokens) for each in made.segments) > 3


def words(tokens: tuple[int, ...] | list[int]) -> list[int]:
    return [token for token in tokens if token < IDS["<|im_end|>"]]


def test_a_prompt_goes_before_every_window(hearing: Hearing) -> None:
    _, model, _ = hearing
    samples, prompt = noise(2.2), "Hello <|en|> there"
    ids = torch.tensor([IDS["<|startofprev|>"], *(model.tokenizer.encode(" Hello", False))])
    expected = theirs_of(hearing, samples, language="en", task="transcribe", return_timestamps=True, prompt_ids=ids)
    plain = model.transcribe(samples, language="en")
    made = model.transcribe(samples, language="en", prompt=" Hello")
    assert made.segments != plain.segments
    check(made, expected)
    assert model.transcribe(samples, language="en", prompt=prompt).text  # a control token in it is text
    assert model.transcribe(samples, language="en", prompt="word " * 100).text


def test_what_a_segment_tells(hearing: Hearing) -> None:
    theirs, model, _ = hearing
    samples = noise(1.0)
    made = model.transcribe(samples, language="en", silence=True)
    (segment,) = made.segments
    source = model.listen(samples)
    with torch.no_grad():
        ids = torch.tensor([[IDS["<|startoftranscript|>"]]])
        logits = theirs(input_features=source.values.T[None], decoder_input_ids=ids).logits[0, -1]
    assert segment.no_speech_prob == pytest.approx(float(logits.softmax(-1)[IDS["<|nospeech|>"]]), rel=1e-3)
    assert segment.avg_logprob < 0 < segment.compression_ratio
    assert made.text == segment.text.strip() == model.tokenizer.decode(segment.tokens).strip()


def test_draws_repeat_with_a_seed_and_differ_without(hearing: Hearing) -> None:
    samples = noise(2.5)
    one, two, other = (
        hearing[1].transcribe(wav(samples), language="en", temperature=1.5, seed=seed).text for seed in (1, 1, 2)
    )
    assert one == two != other


def test_what_cannot_be_transcribed_is_refused(hearing: Hearing) -> None:
    model = hearing[1]
    with pytest.raises(lmstate.UnsupportedError, match="knows de, en, fr"):
        model.transcribe(noise(0.5), language="xx")
    with pytest.raises(lmstate.StateError, match="damaged"):
        model.transcribe(b"x")
    with pytest.raises(lmstate.UnsupportedError, match="reads no sounds"):
        ours("bart").transcribe(noise(0.5))
    with pytest.raises(TypeError):
        model.transcribe(noise(0.5), size=3)


def test_a_grammar_goes_back_as_it_came(hearing: Hearing) -> None:
    speech = hearing[1].listener().speech
    grammar, first = SpeechGrammar(speech, times=True), speech.first_time
    seen = [grammar.allowed()]
    for token in (first + 2, 65, 66, first + 9, first + 9, 67, first + 12):
        assert seen[-1][token], token
        grammar.accept(token)
        seen.append(grammar.allowed())
    other = grammar.copy()
    for allowed in reversed(seen[:-1]):
        grammar.rollback(1)
        assert torch.equal(grammar.allowed(), allowed)
    assert torch.equal(other.allowed(), seen[-1])


def test_answers_are_cut_as_transformers_cuts_them(hearing: Hearing) -> None:
    """Random answers that the grammar allows, whole and cut short."""
    theirs, model, _ = hearing
    speech, luck = model.listener().speech, random.Random(0)
    cut = whole = 0
    for _ in range(300):
        grammar, tokens = SpeechGrammar(speech, times=True), []
        for _ in range(luck.randint(1, 14)):
            allowed = grammar.allowed().nonzero().flatten().tolist()
            times = [token for token in allowed if speech.is_time(token)]
            token = luck.choice(times[:9] if times and luck.random() < 0.5 else allowed)
            if token == speech.end:
                break
            grammar.accept(token)
            tokens.append(token)
        if not tokens:
            continue
        expected, offset = theirs._retrieve_segment(
            torch.tensor(tokens), [None], torch.zeros(1, dtype=torch.float64), speech.first_time, torch.tensor([100]),
            0.02, 0.01, 2, 0, 0, False, torch.zeros(1, 4),
        )  # fmt: skip
        pieces, reached = pieces_of(speech, tokens, 50)
        assert [(piece.start, piece.end) for piece in pieces] == [
            (round(float(each["start"]) / 0.02), round(float(each["end"]) / 0.02)) for each in expected
        ]
        assert [words(piece.tokens) for piece in pieces] == [words(each["tokens"].tolist()) for each in expected]
        assert 2 * reached == int(offset)
        cut, whole = cut + (reached < 50), whole + (len(pieces) > 1)
    assert cut > 20 and whole > 20
