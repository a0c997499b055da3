"""Pictures and sounds in one conversation: transformers' towers and processors as the oracle, and bits at any cut."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from PIL import Image

import lmstate
from lmstate.serve import Settings
from lmstate.vision import tower
from tests.audio.test_transcribe import noise
from tests.audio.test_wav import wav
from tests.serve.byte_tokenizer import END, START, save_tokenizer
from tests.serve.running import running
from tests.serve.test_page import ROOT, create, ended
from tests.serve.test_page_sounds import sound_url
from tests.serve.test_pictures import url
from tests.vision.test_encode import png
from tests.vision.test_parity import SEEING, TEXT
from tests.zoo import randomize

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% elif part.type == 'audio' %}<audio>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = {"boi_token": "<boi>", "image_token": "<image>", "eoi_token": "<eoi>", "boa_token": "<boa>",
         "audio_token": "<audio>", "eoa_token": "<eoa>"}  # fmt: skip
IDS = {word: 258 + at for at, word in enumerate((*WORDS.values(), "<last>", "<|video|>"))}
SOUNDS = [noise(0.6, 1), noise(0.6, 2), noise(0.95, 3)]
PICTURES = [png(30, 20), png(16, 40, seed=1)]
FILES = {"s": wav(SOUNDS[0], width=4), "t": wav(SOUNDS[1], width=4), "u": wav(SOUNDS[2], width=4),
         "p": PICTURES[0], "q": PICTURES[1]}  # fmt: skip
families = pytest.mark.parametrize("family", ["gemma3n", "gemma4"])


def config(family: str) -> Any:
    import transformers as t

    size, eos = 258 + len(IDS), {"eos_token_id": 257, "pad_token_id": 0}
    given = {**TEXT, **eos, "vocab_size": size, "max_position_embeddings": 2048}
    places = {"image_token_id": IDS["<image>"], "audio_token_id": IDS["<audio>"]}
    if family == "gemma4":
        text = t.Gemma4TextConfig(
            **{**given, "num_hidden_layers": 4}, head_dim=8, global_head_dim=16, sliding_window=5,
            layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
            hidden_size_per_layer_input=12, vocab_size_per_layer_input=size, use_bidirectional_attention=None,
        )  # fmt: skip
        seeing = t.Gemma4VisionConfig(
            **SEEING, head_dim=8, num_key_value_heads=4, pooling_kernel_size=2, position_embedding_size=60
        )
        hearing = t.Gemma4AudioConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, output_proj_dims=24)
        return t.Gemma4Config(text_config=text, vision_config=seeing, audio_config=hearing, **places)
    text = t.Gemma3nTextConfig(
        **{**given, "num_hidden_layers": 5}, head_dim=8, sliding_window=17,
        layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
        num_kv_shared_layers=2, hidden_size_per_layer_input=12, vocab_size_per_layer_input=258, laurel_rank=6,
        activation_sparsity_pattern=[0.9, 0.5, 0.0, 0.0, 0.0],
    )  # fmt: skip
    return t.Gemma3nConfig(
        text_config=text, vision_soft_tokens_per_image=4, audio_soft_tokens_per_image=8, **places,
        vision_config=t.Gemma3nVisionConfig(
            architecture="test_resnet", hidden_size=96, vocab_offset=258, vocab_size=3, do_pooling=False
        ),
        audio_config=t.Gemma3nAudioConfig(
            hidden_size=32, vocab_offset=261, vocab_size=5, conf_num_hidden_layers=1, conf_num_attention_heads=2
        ),
    )  # fmt: skip


def processor_of(family: str, folder: Path) -> Any:
    import transformers as t

    save_tokenizer(folder, list(IDS), TEMPLATE)
    inner = t.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END, pad_token=END,
        additional_special_tokens=[START], extra_special_tokens=WORDS,
    )  # fmt: skip
    if family == "gemma4":
        pixels = t.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
        return t.Gemma4Processor(
            t.Gemma4AudioFeatureExtractor(), pixels, inner, t.Gemma4VideoProcessor(), chat_template=TEMPLATE
        )
    pixels = t.SiglipImageProcessorPil(size={"height": 64, "width": 64})
    return t.Gemma3nProcessor(
        t.Gemma3nAudioFeatureExtractor(), pixels, inner, chat_template=TEMPLATE, image_seq_length=4, audio_seq_length=8
    )


@cache
def pair(family: str) -> tuple[Any, Any, lmstate.Model]:
    import transformers as t

    pytest.importorskip("timm" if family == "gemma3n" else "torchvision")
    folder = Path(mkdtemp())
    processor = processor_of(family, folder)
    torch.manual_seed(0)
    theirs = t.AutoModelForMultimodalLM.from_config(config(family)).eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    processor.save_pretrained(folder)
    return theirs, t.AutoProcessor.from_pretrained(folder), lmstate.load(folder, weights="float32")


def said(order: str) -> list[dict[str, Any]]:
    """Letters of `FILES`, other letters are texts."""
    kinds = {True: "audio", False: "image"}
    parts = [
        {"type": (kind := kinds[letter in "stu"]), kind: FILES[letter]} if letter in FILES else
        {"type": "text", "text": f"{letter} then"} for letter in order
    ]  # fmt: skip
    return [{"role": "user", "content": parts}]


@families
@pytest.mark.parametrize("order", ["s", "axs", "ps", "sp", "asbptc", "paqbscu"])
def test_logits_are_those_of_transformers(family: str, order: str) -> None:
    theirs, processor, model = pair(family)
    assert model.takes_sounds
    prompt = model.encode(said(order))
    text = processor.apply_chat_template(said(order), add_generation_prompt=True, tokenize=False)
    sounds = [SOUNDS["stu".index(letter)].numpy() for letter in order if letter in "stu"]
    images = [Image.open(io.BytesIO(FILES[letter])) for letter in order if letter in "pq"]
    given = {"images": images} if images else {}
    inputs = processor(text=[text], audio=sounds, return_tensors="pt", add_special_tokens=False, **given)
    assert inputs["input_ids"][0].tolist() == prompt.tokens
    with torch.no_grad():
        expected = theirs(**inputs).logits[0]
    prompt.place(state := model.new_state())
    got = model([prompt.tokens], state, logits="all")[0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(model([prompt.tokens])[0], got, atol=0.1), "the sounds do not show"


@families
def test_bits_do_not_depend_on_the_cut_or_on_neighbors(family: str) -> None:
    _, _, model = pair(family)
    prompt = model.encode(said("aspbuc"))
    prompt.place(whole := model.new_state())
    expected = model([prompt.tokens], whole, logits="all")[0]
    sounds = [span for span in prompt.media if span.media.token == IDS["<audio>"]]
    assert len(sounds) == 2
    cuts = [0, 5, sounds[0].at + 1, sounds[0].end - 1, sounds[1].at + 2, len(prompt.tokens)]
    state = model.new_state(2)
    prompt.place(state, 1)
    for start, stop in pairwise(cuts):
        got = model([[5, 6, 7][: stop % 4], prompt.tokens[start:stop]], state, logits="all")[1]
        assert torch.equal(got[: stop - start], expected[start:stop])
    middle = sounds[1].at + 3
    state.select([1, 1])
    state.rewind(0, middle)
    for span in prompt.media:
        if span.at >= middle:  # what stands around sounds of Gemma 3n
            state.place(0, span.at, span.media)
    assert torch.equal(model([prompt.tokens[middle:], []], state)[0], expected[-1])
    assert state.snapshot(0).identities == whole.snapshot(0).identities


@families
def test_what_is_not_read_is_refused(family: str) -> None:
    _, _, model = pair(family)
    with pytest.raises(lmstate.StateError, match="may have 30"):
        model.encode([{"role": "user", "content": [{"type": "audio", "audio": wav(noise(30.5))}]}])
    assert model.encode([{"role": "user", "content": [{"type": "audio", "audio": wav(noise(0.1))}]}]).media
    for count in (1, 400, 1599):
        with pytest.raises(lmstate.StateError, match="or more"):
            model.encode([{"role": "user", "content": [{"type": "audio", "audio": wav(noise(0.1)[:count])}]}])
    for kind, file in (("image", None), ("audio", 5), ("audio", "x")):
        with pytest.raises(lmstate.StateError, match="give the bytes of a file"):
            model.encode([{"role": "user", "content": [{"type": kind, kind: file}]}])
    with pytest.raises(lmstate.StateError, match="17 sounds"):
        model.encode(said("s" * 17))
    with pytest.raises(lmstate.StateError, match="its file is a sound"):
        model.encode([{"role": "user", "content": [{"type": "image", "image": FILES["s"]}]}])
    with pytest.raises(lmstate.UnsupportedError, match="in a chat"):
        model.transcribe(FILES["s"])


def test_a_model_takes_neither_where_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, model = pair("gemma4")
    assert model.sees and model.takes_sounds
    monkeypatch.setattr(tower, "find_spec", lambda name: None if name == "torchvision" else object())
    assert not model.sees and not model.takes_sounds


def test_a_text_model_that_reads_pictures_as_one_piece_takes_no_sounds(tmp_path: Path) -> None:
    from lmstate.vision.tower import hears_beside

    told = {"model_type": "gemma4", "audio_config": {}, "text_config": {"use_bidirectional_attention": None}}
    for directions, hears in ((None, True), ("vision", False)):
        told["text_config"] = {"use_bidirectional_attention": directions}
        (tmp_path / "config.json").write_text(json.dumps(told))
        assert hears_beside(tmp_path) is hears
    (tmp_path / "config.json").write_text(json.dumps({**told, "audio_config": None}))
    assert not hears_beside(tmp_path)


def test_a_server_answers_to_both() -> None:
    _, _, model = pair("gemma4")
    parts = [
        {"type": "input_audio", "input_audio": {"data": b64encode(FILES["s"]).decode(), "format": "wav"}},
        {"type": "image_url", "image_url": {"url": url(FILES["p"])}},
        {"type": "text", "text": "a then"},
    ]
    prompt = model.encode(said("spa"), add_generation_prompt=True)
    prompt.place(state := model.new_state())
    expected = model.generate(prompt.tokens, state, max_new_tokens=6, temperature=0.0)
    runs = model.pictures().tower.runs
    with (
        lmstate.Engine(model) as engine,
        running(engine, Settings("tiny", port=0)) as server,
        server.client() as client,
    ):
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 6, "temperature": 0}
        made = client.post("/v1/chat/completions", json=body).json()
        assert made["choices"][0]["message"]["content"] == expected
        assert made["usage"]["prompt_tokens"] == len(prompt.tokens)
        about = client.get("/page/about").json()
        assert (about["pictures"], about["sounds"]) == (True, True)
        id = create(client, max_tokens=6, temperature=0)
        sent = {"text": "a then", "pictures": [sound_url(FILES["s"]), url(FILES["p"])]}
        answer = ended(client, id, client.post(f"{ROOT}/{id}/say", json=sent).json()["answer"])
        assert answer["text"] == expected and model.pictures().tower.runs == runs
