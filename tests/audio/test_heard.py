"""Sounds in conversations: transformers' towers and processors as the oracle, and the bits at any cut."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

import lmstate
from lmstate.audio import heard
from lmstate.audio.heard import SoundReader
from lmstate.audio.listener import open_extractor
from lmstate.checkpoints.huggingface.tekken import tekken_files
from lmstate.text.tokenizer import Tokenizer
from lmstate.vision import tower
from tests.audio.hearing import HEARING, MARK, saved
from tests.audio.test_transcribe import noise
from tests.audio.test_wav import wav
from tests.files.test_tekken import tekken, written
from tests.zoo import ours

SOUNDS = [noise(0.6, 1), noise(0.95, 2), noise(33.3, 3)]  # the last one is of many windows
DRAWN: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.0, "seed": 1}
every_family = pytest.mark.parametrize("family", HEARING)


@cache
def hearing(family: str) -> tuple[Any, Any, lmstate.Model]:
    folder = Path(mkdtemp())
    return *saved(family, folder), lmstate.load(folder, weights="float32")


def said(*parts: torch.Tensor | str) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "audio", "audio": wav(part, width=4)}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


@every_family
@pytest.mark.parametrize("order", [[0], [0, 1], [1, "Between.", 0], ["First.", 0, "last.", 1], [2]])
def test_logits_are_those_of_transformers(family: str, order: list[Any]) -> None:
    if 2 in order and family == "qwen2_audio":
        pytest.skip("its processor cuts sounds of more than one window")
    theirs, processor, model = hearing(family)
    prompt = model.encode(said(*(SOUNDS[part] if isinstance(part, int) else part for part in order), "What?"))
    played = [SOUNDS[part] for part in order if isinstance(part, int)]
    made = [processor(text=[MARK], audio=[each.numpy()], sampling_rate=16_000, return_tensors="pt") for each in played]
    names = {name for name in made[0] if name not in ("input_ids", "attention_mask")}
    place = theirs.config.audio_token_id
    counts = [int((each["input_ids"] == place).sum()) for each in made]
    assert prompt.tokens.count(place) == sum(counts) and [span.media.count for span in prompt.media] == counts
    ids = torch.tensor([prompt.tokens])
    for each in made:
        wanted = each["input_ids"][0].tolist()
        starts = range(len(prompt.tokens) - len(wanted) + 1)
        assert any(prompt.tokens[at : at + len(wanted)] == wanted for at in starts), "with what stands around it"
    with torch.no_grad():
        features = {name: torch.cat([one[name] for one in made]) for name in names}
        expected = theirs(input_ids=ids, attention_mask=torch.ones_like(ids), **features).logits
    state = model.new_state()
    prompt.place(state)
    got = model(ids, state, logits="all")
    assert not torch.allclose(model(ids), got, atol=0.1), "the sounds do not show"
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@every_family
def test_bits_do_not_depend_on_the_cut_or_on_neighbors(family: str) -> None:
    _, _, model = hearing(family)
    prompt = model.encode(said("One", SOUNDS[0], "two", SOUNDS[1], "three?"))
    whole = model.new_state()
    prompt.place(whole)
    expected = model([prompt.tokens], whole, logits="all")[0]
    cuts = [0, 3, 9, prompt.media[0].end - 1, prompt.media[1].at + 2, len(prompt.tokens)]
    state = model.new_state(2)
    prompt.place(state, 1)
    for start, stop in pairwise(cuts):
        got = model([[5, 6, 7][: stop % 4], prompt.tokens[start:stop]], state, logits="all")[1]
        assert torch.equal(got[: stop - start], expected[start:stop])
    middle = prompt.media[1].at + 3
    state.select([1, 1])
    state.rewind(0, middle)
    got = model([prompt.tokens[middle:], []], state)[0]
    assert torch.equal(got, expected[-1])
    assert state.snapshot(0).identities == whole.snapshot(0).identities


@pytest.mark.parametrize("order", [[0, "What?"], ["One", 1, "two", "three", 2], [0, 1]])
def test_ids_are_those_of_mistral_common(order: list[Any]) -> None:
    pytest.importorskip("mistral_common", reason="pip install mistral-common")
    pytest.importorskip("soundfile", reason="pip install mistral-common[audio]")
    from mistral_common.protocol.instruct.chunk import AudioChunk, TextChunk
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    _, _, model = hearing("voxtral")
    asked = said(*(SOUNDS[part] if isinstance(part, int) else part for part in order))
    chunks = [
        AudioChunk(input_audio=wav(SOUNDS[part], width=4)) if isinstance(part, int) else TextChunk(text=part)
        for part in order
    ]
    theirs = MistralTokenizer.from_file(str(model.folder / "tekken.json"))
    messages = [UserMessage(content=chunks), AssistantMessage(content="Rain."), UserMessage(content="And [AUDIO]?")]
    expected = theirs.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
    later = [{"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And [AUDIO]?"}]
    assert model.encode([*asked, *later]).tokens == expected


def test_an_engine_and_a_session_answer_to_sounds(tmp_path: Path) -> None:
    _, _, model = hearing("qwen2_audio")
    asked = [said(SOUNDS[index], "What?") for index in (0, 1, 0)]
    prompts = [model.encode(each, add_generation_prompt=True) for each in asked]
    expected = []
    for prompt in prompts:
        state = model.new_state()
        prompt.place(state)
        expected.append(model.generate(prompt.tokens, state, return_ids=True, **DRAWN))
    assert expected[0] == expected[2] != expected[1]
    runs = model.pictures().tower.runs
    with lmstate.Engine(model, store=tmp_path) as engine:
        requests = [engine.submit(each, **DRAWN) for each in asked]
        assert [request.result(600).tokens[0] for request in requests] == expected
        session = engine.session("one")
        assert session.send(asked[1], **DRAWN).result(600).tokens[0] == expected[1]
    assert model.pictures().tower.runs == runs, "a sound that was heard is found again"
    with lmstate.Engine(model, store=tmp_path) as engine:
        session = engine.find_session("one")
        assert session is not None and session.messages[0] == asked[1][0], "its file is in the record"


def test_what_cannot_be_heard_is_refused() -> None:
    _, _, model = hearing("qwen2_audio")
    for parts, why in (([noise(1.2)], "seconds"), ([SOUNDS[0]] * 17, "17 sounds")):
        with pytest.raises(lmstate.StateError, match=why):
            model.encode(said(*parts))
    for file, why in ((b"ID3", "damaged"), ("x", "give the bytes"), (wav(SOUNDS[0])[:-5], "cut short")):
        with pytest.raises(lmstate.StateError, match=why):
            model.encode([{"role": "user", "content": [{"type": "audio", "audio": file}]}])
    with pytest.raises(lmstate.UnsupportedError, match="read sounds alone"):
        model.encode([{"role": "user", "content": [{"type": "image", "image": b"\x89PNG"}]}])
    texts = model.pictures().texts([wav(SOUNDS[0])])
    with pytest.raises(lmstate.ModelError, match="2 places"):
        texts.chat_text([{"role": "user", "content": f"x{MARK}{MARK}"}])
    with pytest.raises(lmstate.UnsupportedError, match="folders"):
        ours("llama").encode(said(SOUNDS[0]))


@every_family
def test_a_sound_that_is_too_short_is_refused(family: str) -> None:
    _, _, model = hearing(family)
    assert len(model.encode(said(noise(0.1))).media) == 1
    for count in (1, 161, 1599):
        with pytest.raises(lmstate.StateError, match="or more"):
            model.encode(said(noise(0.1)[:count]))


def test_a_tekken_file_without_sounds_takes_none(tmp_path: Path) -> None:
    reader = hearing("voxtral")[2].pictures()
    deaf = Tokenizer(tekken_files(written(tmp_path, tekken("v7"))))
    with pytest.raises(lmstate.ModelError, match="0 places"):
        SoundReader(reader.tower, reader.pixels, None, deaf).encode(said(SOUNDS[0]))


def test_windows_that_the_tower_does_not_take_are_refused(tmp_path: Path) -> None:
    _, processor, model = hearing("voxtral")
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({**processor.feature_extractor.to_dict(), "chunk_length": 1})
    )
    with pytest.raises(lmstate.ModelError, match="does not take what its processor made"):
        SoundReader(model.pictures().tower, open_extractor(tmp_path), None, model.tokenizer).encode(said(SOUNDS[0]))


@pytest.mark.parametrize("family", ["qwen2_audio", "voxtral"])
def test_a_model_takes_no_sounds_where_its_processor_cannot_be_made(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(family, tmp_path)
    model = lmstate.load(tmp_path, weights="float32")
    assert model.takes_sounds and model._pictures is None
    for module in (heard, tower):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert not model.takes_sounds
    with pytest.raises(lmstate.UnsupportedError, match="sounds need transformers"):
        model.transcribe(wav(SOUNDS[0]))
    monkeypatch.undo()
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    assert not model.takes_sounds
