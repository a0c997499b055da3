"""Transcripts: transformers' own `generate` of Whisper as the oracle, for sounds of any length."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lmstate
from lmstate.audio.speech import SpeechGrammar, pieces_of
from lmstate.audio.words import _path, token_ends, words_of
from lmstate.generation.transcript import FALLBACK, SoundAnswer, TranscriptOptions, compression_ratio
from lmstate.generation.transcription import LEAST, SHORT, transcription
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
        return theirs.generate(**inputs, return_segments=True, **{"use_cache": False, **options})


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


@pytest.mark.parametrize("prompt", [None, "Hello"])
@pytest.mark.parametrize("seed", range(3))
def test_a_window_goes_on_with_the_text_before_it(hearing: Hearing, seed: int, prompt: str | None) -> None:
    _, model, _ = hearing
    samples = noise(3.3, seed)
    begin = [IDS["<|startofprev|>"], *model.tokenizer.encode(" Hello", False)]
    expected = theirs_of(
        hearing, samples, language="en", task="transcribe", return_timestamps=True, condition_on_prev_tokens=True,
        **({} if prompt is None else {"prompt_ids": torch.tensor(begin)}),
    )  # fmt: skip
    asked: dict[str, Any] = {"language": "en", "prompt": prompt}
    made = model.transcribe(samples, condition_on_previous_text=True, **asked)
    check(made, expected)
    assert made != model.transcribe(samples, **asked)


@pytest.mark.parametrize("times", [False, True])
def test_bad_answers_are_those_of_transformers(hearing: Hearing, times: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds in the middle of what sounds give: which answers are tried again, and which are left out."""
    theirs, model, _ = hearing
    asked: dict[str, Any] = {"language": "en", "task": "transcribe"}
    free = {"logprob_threshold": None, "compression_ratio_threshold": None, "no_speech_threshold": None}
    sounds = [noise(0.9, seed) for seed in range(8)]
    plain = [model.transcribe(each, times=times, temperature=0.0, silence=True, **free, **asked) for each in sounds]
    parts = [made.segments[0] for made in plain]

    def middle(numbers: list[float]) -> float:
        one, other = sorted(numbers)[3:5]
        return (one + other) / 2

    likely, quiet = middle([part.avg_logprob for part in parts]), middle([part.no_speech_prob for part in parts])
    decode = model.tokenizer.decode
    ratios = [
        compression_ratio(decode(words([token for part in made.segments for token in part.tokens]))) for made in plain
    ]
    limits = {"logprob_threshold": likely, "compression_ratio_threshold": middle(ratios), "no_speech_threshold": quiet}
    monkeypatch.setattr(
        type(theirs), "_retrieve_compression_ratio",
        staticmethod(lambda tokens, _: compression_ratio(decode(words(tokens.tolist())))),
    )  # fmt: skip
    found: list[tuple[bool, bool]] = []
    judged = type(theirs)._need_fallback

    def judge(*given: Any) -> Any:
        found.append(judged(*given))
        return found[-1]

    monkeypatch.setattr(type(theirs), "_need_fallback", judge)
    tried = left_out = 0
    for sound in sounds:
        found.clear()
        theirs_of(hearing, sound, return_timestamps=times, temperature=(0.0, 1e-3), **limits, **asked)
        made = model.transcribe(sound, times=times, temperature=(0.0, 1e-3), **limits, **asked)
        assert (found[0][1] or found[-1][1]) == (not made.segments)
        if made.segments:
            assert found[0][0] == (made.segments[0].temperature == 1e-3)
        tried, left_out = tried + found[0][0], left_out + (not made.segments)
    assert 0 < tried < 8 and 0 < left_out < 8


def test_a_threshold_that_is_left_out_decides_nothing(hearing: Hearing) -> None:
    _, model, _ = hearing
    asked: dict[str, Any] = {"language": "en", "no_speech_threshold": None}
    once = model.transcribe(noise(0.9), logprob_threshold=None, compression_ratio_threshold=None, **asked)
    assert once == model.transcribe(noise(0.9), temperature=0.0, **asked)
    asked |= {"logprob_threshold": 0.0, "temperature": FALLBACK}
    hot = model.transcribe(noise(0.9), **asked)
    assert hot.segments[0].temperature == 1.0
    assert hot == model.transcribe(noise(0.9), **asked), "draws of a fallback have one seed"
    silent = model.transcribe(noise(2.5), language="en", logprob_threshold=None, no_speech_threshold=0.0)
    assert silent.segments == () and silent.text == ""
    with pytest.raises(ValueError, match="temperature"):
        model.transcribe(noise(0.9), temperature=())


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


def test_answers_that_are_always_short_make_no_window_for_each_step(hearing: Hearing) -> None:
    model = hearing[1]
    listener = model.listener()
    times, width = listener.speech.first_time, listener.width
    options = TranscriptOptions(language="de", no_speech_threshold=None, logprob_threshold=None)
    work = transcription(model, torch.zeros(20 * listener.window), options)
    windows = 0
    while work.ask() is not None:
        windows += 1
        work.take(SoundAnswer([times, 65, times + 1, times + 1, 66], [0.0] * 5))
    assert work.segments[SHORT - 1].seek == 2 * (SHORT - 1), "a few may be short"
    assert windows <= 20 * width // (width // LEAST) + SHORT + 1 < 20 * width // 2


HEADS = [[0, 1], [1, 0], [1, 3]]


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Hearing:
    folder = tmp_path_factory.mktemp("aligned")
    theirs = saved(folder, max_target_positions=200)
    theirs.generation_config.alignment_heads = HEADS
    theirs.generation_config.save_pretrained(folder)
    return theirs, lmstate.load(folder, weights="float32"), folder


@pytest.mark.parametrize("seconds", [0.55, 0.9, 2.4])
def test_tokens_end_where_transformers_says(aligned: Hearing, seconds: float) -> None:
    _, model, _ = aligned
    samples = noise(seconds)
    asked: dict[str, Any] = {"language": "en", "task": "transcribe", "return_timestamps": True}
    expected = theirs_of(aligned, samples, return_token_timestamps=True, use_cache=True, **asked)["segments"][0]
    listener, begin = model.listener(), 3  # the tokens of the prompt
    frames = listener.frames(samples)
    for each in {id(one["result"]): one for one in expected}.values():
        seek = round(100 * (float(each["start"]) - 0.02 * (int(each["tokens"][0]) - IDS["<|0.00|>"])))
        made = each["result"]
        positions = (round(100 * seconds) - seek) // 2
        if positions < 1:
            continue  # transformers makes no path there
        read = made["sequences"].tolist()[:-1]  # transformers does not read the last token
        state = model.new_state()
        state.condition(0, listener.source_at(frames, seek))
        weights = model.cross_weights(read, state, [(layer, head) for layer, head in HEADS])
        assert weights.shape == (3, len(read), 50) and torch.allclose(weights.sum(-1), torch.ones(3, len(read)))
        ends = token_ends(weights[:, begin:, :positions], 7)
        assert [0.02 * end for end in ends] == pytest.approx(made["token_timestamps"][begin:-1].tolist(), abs=1e-4)
        assert len(ends) > 20


def test_words_are_in_their_segments(aligned: Hearing) -> None:
    _, model, _ = aligned
    asked: dict[str, Any] = {"language": "en"}
    made = model.transcribe(noise(2.4), words=True, **asked)
    plain = model.transcribe(noise(2.4), **asked)
    assert [replace(each, words=()) for each in made.segments] == [*plain.segments]
    for segment in made.segments:
        assert "".join("".join(word.text for word in segment.words).split()) == "".join(segment.text.split())
        times = [time for word in segment.words for time in (word.start, word.end)]
        assert times == sorted(times) and times[0] >= segment.seek * 0.01 - 1e-9
    assert sum(len(each.words) for each in made.segments) > 5
    heads = tuple(map(tuple, HEADS))
    assert model.listener().speech.alignment == heads


def test_words_are_those_of_transformers(aligned: Hearing) -> None:
    from transformers.models.whisper import tokenization_whisper as t

    class Tokenizer:
        eos_token_id, language = IDS["<|im_end|>"], None

        def decode(self, ids: list[int], decode_with_timestamps: bool) -> str:
            return aligned[1].tokenizer.decode(ids)

    luck = random.Random(0)
    pieces = [" ", " a", "b", ", ", ".", " (", '"', "é", "雨", "-", "x", " “", "？", "\n"]  # noqa: RUF001
    for _ in range(200):
        ids = aligned[1].tokenizer.encode("".join(luck.choices(pieces, k=luck.randint(1, 12))))
        for code, name in (("en", "english"), ("zh", "chinese")):
            expected, _, places = t._combine_tokens_into_words(Tokenizer(), ids, name)
            own = list(words_of(ids, aligned[1].tokenizer.decode, code))
            assert [text for text, _ in own] == expected
            assert [[*run] for _, run in own] == places
        cut = ids[: luck.randint(1, len(ids))]  # also inside a character
        assert [at for _, run in words_of(cut, aligned[1].tokenizer.decode, "en") for at in run] == [*range(len(cut))]


def test_a_path_is_the_cheapest(aligned: Hearing) -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 1), (1, 9), (9, 1), (5, 17), (30, 12)):
        costs = torch.randn(rows, columns, generator=generator).round(decimals=1).double().numpy()  # with ties
        texts, times = _dynamic_time_warping(costs)
        expected = [int(times[list(texts).index(row)]) for row in range(rows)]
        assert _path(costs) == expected


def test_heads_that_a_decoder_lacks_are_refused(tmp_path: Path) -> None:
    theirs = saved(tmp_path)
    for heads, why in (
        ([[2, 0]], "head 0 of layer 2"),
        ([[0, 4]], "head 4"),
        ([[0]], "alignment_heads"),
        ("x", "pairs"),
    ):
        theirs.generation_config.alignment_heads = heads
        theirs.generation_config.save_pretrained(tmp_path)
        with pytest.raises(lmstate.ModelError, match=why):
            lmstate.load(tmp_path, weights="float32").transcribe(noise(0.5), language="en", words=True)
