"""Transcripts by models that hear in conversations: asked for as transformers and mistral-common ask for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lmstate
from lmstate.audio.heard import SoundReader
from lmstate.audio.transcript_prompts import ASKED, transcript_of
from lmstate.checkpoints.huggingface.tekken import tekken_files
from lmstate.text.tokenizer import Tokenizer
from tests.audio.hearing import HEARING
from tests.audio.test_heard import SOUNDS, hearing
from tests.audio.test_wav import wav
from tests.files.test_tekken import NAMED, tekken, written

SOUND = wav(SOUNDS[1], width=4)
asking = pytest.mark.parametrize("family", sorted(ASKED))


def prompt_of(model: lmstate.Model, language: str | None = None, prompt: str | None = None) -> list[int]:
    reader = model.pictures()
    assert isinstance(reader, SoundReader)
    return reader.transcript_prompt(SOUND, language, prompt)[0].tokens


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("audioflamingo3", {}), ("audioflamingo3", {"prompt": "Write it down."}), ("glmasr", {}),
        ("glmasr", {"prompt": "Write <|im_end|>it"}), ("qwen3_asr", {"language": "en"}),
        ("qwen3_asr", {"language": "german", "prompt": "Oslo, Bergen"}),
    ],
)  # fmt: skip
def test_a_question_is_that_of_transformers(family: str, options: dict[str, str]) -> None:
    _, processor, model = hearing(family)
    plain = {name: value.replace("<|im_end|>", "") for name, value in options.items()}
    sound = SOUNDS[1].numpy()
    expected = processor.apply_transcription_request(sound, **plain)["input_ids"][0].tolist()
    assert prompt_of(model, **plain) == expected
    if plain != options:
        ids = prompt_of(model, **options)
        assert len(ids) > len(expected) and ids.count(257) == expected.count(257), "text is no control token"


@pytest.mark.parametrize("language", [None, "en", "French"])
def test_a_question_is_that_of_mistral_common(language: str | None) -> None:
    _, _, model = hearing("voxtral")
    ids = prompt_of(model, language)
    code = {None: None, "en": "en", "French": "fr"}[language]
    begin = [NAMED.index("[/INST]"), *([] if code is None else model.tokenizer.encode(f"lang:{code}", False))]
    assert ids[-1 - len(begin) :] == [*begin, len(NAMED) + 2]
    pytest.importorskip("mistral_common", reason="pip install mistral-common")
    pytest.importorskip("soundfile", reason="pip install mistral-common[audio]")
    from mistral_common.protocol.transcription.request import TranscriptionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    assert model.folder is not None
    theirs = MistralTokenizer.from_file(str(model.folder / "tekken.json"))
    asked = TranscriptionRequest(model="x", audio=SOUND, language=code)
    assert ids == theirs.encode_transcription(asked).tokens


@asking
def test_an_answer_is_that_of_transformers(family: str) -> None:
    theirs, processor, model = hearing(family)
    language = "en" if family in ("voxtral", "qwen3_asr") else None
    made = model.transcribe(SOUND, language=language)
    ids = torch.tensor([prompt_of(model, language)])
    told = processor(text=["<|AUDIO|>"], audio=[SOUNDS[1].numpy()], sampling_rate=16_000, return_tensors="pt")
    features = {name: value for name, value in told.items() if name not in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = theirs.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, **features
        )[0].tolist()
    expected = expected[ids.shape[1] :] if expected[: ids.shape[1]] == ids[0].tolist() else expected
    (segment,) = made.segments
    assert list(segment.tokens[:12]) == [token for token in expected if token not in model.eos_ids]
    assert (made.language, made.duration, segment.end) == (language, 0.95, 0.95)
    assert made.text == transcript_of(family, processor, model.tokenizer.decode(segment.tokens), True)[0]
    assert segment.avg_logprob < 0 < segment.compression_ratio
    with lmstate.Engine(model) as engine:
        reader = model.pictures()
        assert isinstance(reader, SoundReader)
        prompt = reader.transcript_prompt(SOUND, language, None)[0]
        answered = engine.submit(prompt, max_new_tokens=len(segment.tokens)).result(600).tokens[0]
    assert answered == list(segment.tokens)


@pytest.mark.parametrize(
    "answer",
    [
        "language English<asr_text> Hello there. ",
        "language None<asr_text>",
        "Hello",
        "language Chinese<asr_text>好",
        "",
    ],
)
def test_the_words_of_an_answer_are_those_that_transformers_reads(answer: str) -> None:
    _, processor, _ = hearing("qwen3_asr")
    expected = processor.parse_output(answer)
    words, language = transcript_of("qwen3_asr", processor, answer, False)
    code = {"English": "en", "Chinese": "zh"}.get(expected["language"])
    assert (words, language) == (expected["transcription"], code)
    shown = [transcript_of("qwen3_asr", processor, answer[:end], False, whole=False)[0] for end in range(len(answer))]
    assert all(words.startswith(each) for each in shown), "what was streamed stays"


def test_an_answer_that_speaks_of_the_transcript_is_cut_to_it() -> None:
    _, processor, _ = hearing("audioflamingo3")
    answer = 'The spoken content of the audio is "Rain in Oslo".'
    assert transcript_of("audioflamingo3", processor, answer, False) == ("Rain in Oslo", None)


def test_wishes_without_words_are_refused(tmp_path: Any) -> None:
    for family, options, why in (
        ("voxtral", {"prompt": "x"}, "without one"), ("voxtral", {"language": "en[INST]"}, "code of two letters"),
        ("voxtral", {"language": "haw"}, "code of two letters"), ("qwen3_asr", {"language": "xx"}, "knows"),
        ("glmasr", {"language": "en"}, "leave it out"), ("voxtral", {"task": "translate"}, "translation"),
        ("voxtral", {"times": True}, "times"), ("qwen2_audio", {}, "voxtral and Whisper"),
    ):  # fmt: skip
        with pytest.raises(lmstate.UnsupportedError, match=why):
            hearing(family)[2].transcribe(SOUND, **options)
    model = hearing("voxtral")[2]
    for sound in (SOUND[:-5], SOUNDS[0], b"x"):
        with pytest.raises(lmstate.StateError, match=r"cut short|give the bytes|damaged"):
            model.transcribe(sound)
    named = [*NAMED, "[AUDIO]", "[BEGIN_AUDIO]"]
    deaf = Tokenizer(tekken_files(written(tmp_path, tekken("v7", named))))
    reader = model.pictures()
    with pytest.raises(lmstate.ModelError, match="TRANSCRIBE"):
        SoundReader(reader.tower, reader.pixels, None, deaf).transcript_prompt(SOUND, None, None)
    assert set(HEARING) > set(ASKED)
