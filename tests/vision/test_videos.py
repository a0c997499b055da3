"""Videos as frames: transformers' processors, towers and positions as the oracle, and bits at any cut."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image

import lmstate
from lmstate.serve import Settings
from lmstate.vision.families import VIDEOS
from lmstate.vision.videos import MOST_FRAMES, group_times
from tests.serve.byte_tokenizer import END, START, save_tokenizer
from tests.serve.running import running
from tests.vision.test_encode import png
from tests.vision.test_parity import config
from tests.zoo import randomize

BEGIN, STOP, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
IDS = {word: 258 + at for at, word in enumerate((BEGIN, STOP, IMAGE, VIDEO))}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICTURE = png(30, 20)
FRAMES = {"v": [png(40, 24, seed) for seed in range(4)], "w": [png(16, 40, seed) for seed in range(5, 8)]}
RATES = {"v": 2.0, "w": 1.5}
KINDS = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}
families = pytest.mark.parametrize("family", [name for name in VIDEOS if name.startswith("qwen")])


def opened(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file)).convert("RGB")


@cache
def pair(family: str) -> tuple[Any, Any, Any]:
    """Small models and the processor: transformers' model, its processor, and ours."""
    import transformers as t

    pytest.importorskip("torchvision")  # of transformers' processors of videos
    folder = Path(mkdtemp())
    save_tokenizer(folder, list(IDS), TEMPLATE)
    inner = t.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END, pad_token=END,
        additional_special_tokens=[START, *IDS],
    )  # fmt: skip
    sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2}
    films: Any
    seen = t.Qwen2VLImageProcessorPil(**sizes, size={"shortest_edge": 64, "longest_edge": 1024})
    if VIDEOS[family] == "timed":
        films = t.Qwen3VLVideoProcessor(**sizes, size={"shortest_edge": 256, "longest_edge": 4096})
    else:
        films = t.Qwen2VLVideoProcessor(**sizes, size={"shortest_edge": 64, "longest_edge": 1024})
    kind = KINDS.get(family, "Qwen3VL")
    getattr(t, f"{kind}Processor")(seen, inner, films, chat_template=TEMPLATE).save_pretrained(folder)
    given = config(family)
    given.text_config.vocab_size, given.text_config.eos_token_id = 258 + len(IDS), 257
    given.image_token_id, given.video_token_id = IDS[IMAGE], IDS[VIDEO]
    given.vision_start_token_id, given.vision_end_token_id = IDS[BEGIN], IDS[STOP]
    if family == "qwen2_5_vl":
        given.vision_config.tokens_per_second = 3
    torch.manual_seed(0)
    theirs = t.AutoModelForImageTextToText.from_config(given).eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    return theirs, t.AutoProcessor.from_pretrained(folder), lmstate.load(folder, weights="float32")


def said(order: str, rates: dict[str, float] = RATES) -> list[dict[str, Any]]:
    """`p` is a picture, `v` and `w` are videos, other letters are texts."""
    parts: list[dict[str, Any]] = []
    for letter in order:
        if letter in FRAMES:
            frames = [opened(file) for file in FRAMES[letter]]
            parts.append({"type": "video", "video": frames, "fps": rates[letter]})
        else:
            text = {"type": "text", "text": f"{letter} then"}
            parts.append({"type": "image", "image": PICTURE} if letter == "p" else text)
    return [{"role": "user", "content": parts}]


def theirs_of(processor: Any, order: str, rates: dict[str, float] = RATES) -> Any:
    """The inputs that transformers' processor makes."""
    text = processor.apply_chat_template(said(order), add_generation_prompt=True, tokenize=False)
    films = [letter for letter in order if letter in FRAMES]
    told = [
        {"total_num_frames": len(FRAMES[each]), "fps": rates[each], "frames_indices": [*range(len(FRAMES[each]))]}
        for each in films
    ]
    given: dict[str, Any] = {"images": [opened(PICTURE)] * order.count("p")} if "p" in order else {}
    videos = [[opened(file) for file in FRAMES[each]] for each in films]
    return processor(
        text=[text], videos=videos, video_metadata=told, do_sample_frames=False, return_tensors="pt", **given
    )


@families
@pytest.mark.parametrize("order", ["v", "avpbwc"])
def test_logits_are_those_of_transformers_at_any_cut(family: str, order: str) -> None:
    theirs, processor, model = pair(family)
    prompt, inputs = model.encode(said(order)), theirs_of(processor, order)
    assert inputs["input_ids"][0].tolist() == prompt.tokens
    with torch.no_grad():
        expected = theirs(**inputs).logits[0]
    prompt.place(state := model.new_state())
    whole = model([prompt.tokens], state, logits="all")[0]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    spans = prompt.media
    cuts = sorted({0, 3, spans[0].at + 1, spans[0].end - 1, spans[-1].at + 2, len(prompt.tokens)})
    state = model.new_state(2)
    prompt.place(state, 1)
    for start, stop in pairwise(cuts):
        got = model([[5, 6, 7][: stop % 4], prompt.tokens[start:stop]], state, logits="all")[1]
        assert torch.equal(got[: stop - start], whole[start:stop])


@families
def test_videos_are_rewound_forked_and_saved(family: str, tmp_path: Path) -> None:
    _, _, model = pair(family)
    prompt = model.encode(said("avbw"))
    assert {span.media.token for span in prompt.media} == {IDS[VIDEO]}
    assert len(prompt.media) == (4 if VIDEOS[family] == "timed" else 2)
    prompt.place(state := model.new_state(2))
    expected = model([prompt.tokens, []], state)[0]
    state.snapshot(0).save(tmp_path / "row")
    middle = prompt.media[0].at + 2
    state.select([0, 0])
    state.rewind(0, middle)
    for span in prompt.media[1:]:
        state.place(0, span.at, span.media)
    assert torch.equal(model([prompt.tokens[middle:], []], state)[0], expected)
    again = model.new_state()
    again.restore(0, lmstate.Snapshot.load(tmp_path / "row"))
    assert again.media(0) == state.media(1) == prompt.media
    both = model([[65], [65]], state)
    assert torch.equal(both[0], both[1]) and torch.equal(model([[65]], again)[0], both[0])
    runs = model.pictures().tower.runs
    assert model.encode(said("avbw")).identities == prompt.identities
    assert model.pictures().tower.runs == runs


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_text_goes_on_behind_the_time_of_a_long_video(family: str) -> None:
    """As Qwen's own code has it. transformers 5 lets the text begin beside the video, behind rows and columns alone."""
    theirs, processor, model = pair(family)
    slow = {"v": 0.2, "w": 0.25}
    prompt, inputs = model.encode(said("avb", slow)), theirs_of(processor, "avb", slow)
    (span,) = prompt.media
    told = {"second_per_grid_ts": inputs["second_per_grid_ts"]} if family == "qwen2_5_vl" else {}
    places, _ = theirs.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], video_grid_thw=inputs["video_grid_thw"], **told
    )
    own = places[:, 0, span.at : span.end]
    assert span.media.positions is not None
    assert torch.equal(span.media.positions + span.at, own)
    behind = int(own.max()) + 1
    places[:, 0, span.end :] = torch.arange(behind, behind + len(prompt.tokens) - span.end)
    with torch.no_grad():
        expected = theirs(**inputs, position_ids=places).logits[0]
    prompt.place(state := model.new_state())
    whole = model([prompt.tokens], state, logits="all")[0]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    prompt.place(state := model.new_state())
    parts = [model([[token]], state)[0] for token in prompt.tokens]
    assert torch.equal(torch.stack(parts), whole)


def test_frames_come_as_paths_and_bytes(tmp_path: Path) -> None:
    _, _, model = pair("qwen3_vl")
    (tmp_path / "one.png").write_bytes(FRAMES["v"][1])
    (part,) = said("v")[0]["content"]
    expected = model.encode(said("v"))
    mixed = [FRAMES["v"][0], tmp_path / "one.png", *part["video"][2:]]
    assert model.encode([{"role": "user", "content": [{**part, "video": mixed}]}]).identities == expected.identities
    faster = model.encode([{"role": "user", "content": [{**part, "fps": 25}]}])
    assert faster.tokens != expected.tokens and [s.media for s in faster.media] == [s.media for s in expected.media]
    with lmstate.Engine(model) as engine:
        answer = engine.submit(expected, max_new_tokens=3, temperature=0.0).result()
        again = engine.submit(said("v"), max_new_tokens=3, temperature=0.0).result()
        with pytest.raises(lmstate.UnsupportedError, match="a video was given, and none is read here"):
            engine.session("one").send(said("v"))
    expected.place(state := model.new_state())
    assert answer.texts[0] == model.generate(expected.tokens, state, max_new_tokens=3, temperature=0.0)
    assert again.texts == answer.texts and again.usage.reused >= expected.media[-1].end


def video(*frames: Any, **changes: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "video", "video": [*frames], "fps": 2.0, **changes}]}]


def test_what_is_no_video_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lmstate.vision.videos as videos

    _, _, model = pair("qwen2_vl")
    small = Image.new("RGB", (8, 8))
    with pytest.raises(FileNotFoundError):
        model.encode(video(video=tmp_path / "film.mp4"))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "av", None)
        with pytest.raises(lmstate.UnsupportedError, match=r"pip install 'lmstate\[video\]'; or give their frames"):
            model.encode(video(video=b"\0\0\0 ftypisom"))
    for fps in (None, 0, -1.0, float("nan"), float("inf"), True, "2"):
        with pytest.raises(lmstate.StateError, match="fps of a video is"):
            model.encode(video(small, small, fps=fps))
    (tmp_path / "bad.png").write_bytes(png(8, 8)[:40])
    for bad, told in (
        ([], "give a file, or a list of its frames"),
        ([small, 5], "frame 1 of a video: it is int"),
        ([small, tmp_path / "bad.png"], "frame 1 of a video: a picture"),
        ([small, Image.new("RGB", (8, 12))], "give one size"),
        ([Image.new("1", (9000, 8000))], "frame 0 of a video: a picture has 9000 x 8000"),
        ([small] * (MOST_FRAMES + 1), f"have {MOST_FRAMES + 1} frames"),
    ):
        with pytest.raises(lmstate.StateError, match=told):
            model.encode(video(*bad))
    large = Image.new("RGB", (6000, 6000))
    with pytest.raises(lmstate.StateError, match="more than 134217728 pixels"):
        model.encode(video(large, large, large, large))
    with pytest.raises(lmstate.StateError, match=f"have {MOST_FRAMES + 2} frames"):
        model.encode([*video(small, small), *video(*[small] * MOST_FRAMES)])
    model.pictures()._videos = None
    monkeypatch.setattr(videos, "find_spec", lambda name: None)
    with pytest.raises(lmstate.UnsupportedError, match="pip install torchvision"):
        model.encode(video(small, small))


def film(format: str, codec: str, shades: Sequence[int], rate: int = 10) -> bytes:
    """A video file whose frames are gray."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 40, 24, "yuv420p"
        for shade in shades:
            frame = av.VideoFrame.from_ndarray(np.full((24, 40, 3), shade, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize(("format", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx")])
def test_frames_of_files(format: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    import lmstate.vision.video_files as files

    shades = [*range(0, 250, 5)]
    data = film(format, codec, shades)

    def read(*limits: Any) -> tuple[list[int], float]:
        frames, fps = files.frames_of_file(data, *limits)
        return [round(float(np.asarray(frame).mean())) for frame in frames], fps

    found, fps = read(2.0, 768, 2**27)
    assert fps == 2.0 and len(found) == 10
    assert all(abs(shade - shades[5 * at]) < 4 for at, shade in enumerate(found))
    assert read(20.0, 768, 2**27)[0][:4:2] == read(10.0, 768, 2**27)[0][:2], "a frame stays until the next one"
    assert read(2.0, 4, 2**27) == ([found[0], found[4], found[8]], 0.5)
    assert read(2.0, 768, 40 * 24 * 5) == ([found[0], found[2], found[4], found[6], found[8]], 1.0)
    for cut in (0, 3, 20, 200):
        with pytest.raises(lmstate.StateError, match=r"a video (is damaged|has another format|file has no pictures)"):
            files.frames_of_file(data[:cut], 2.0, 768, 2**27)
    with pytest.raises(lmstate.StateError, match="another format than MP4"):
        files.frames_of_file(b"#EXTM3U\nhttp://example.com/a.ts", 2.0, 768, 2**27)
    monkeypatch.setattr(files, "MOST_PIXELS", 240)
    assert {frame.size for frame in files.frames_of_file(data, 2.0, 768, 2**27)[0]} == {(20, 12)}
    with pytest.raises(lmstate.StateError, match="seconds to decode"):
        files.frames_of_file(data, 2.0, 768, 2**27, until=0.0)
    monkeypatch.setattr(files, "SECONDS", -1.0)
    with pytest.raises(lmstate.StateError, match="seconds to decode"):
        files.frames_of_file(data, 2.0, 768, 2**27)
    monkeypatch.setattr(files, "MOST_SOURCE_PIXELS", 24 * 40 - 1)
    with pytest.raises(lmstate.StateError, match="a video has 40 x 24 pixels; it may have 959"):
        files.frames_of_file(data, 2.0, 768, 2**27)
    monkeypatch.setattr(files, "MOST_BYTES", len(data) - 1)
    with pytest.raises(lmstate.StateError, match=f"a video has {len(data)} bytes"):
        files.frames_of_file(data, 2.0, 768, 2**27)


def test_clients_send_videos() -> None:
    _, _, model = pair("qwen3_vl")
    frames = [png(40, 24, seed) for seed in range(4)]
    payloads = [base64.b64encode(frame).decode() for frame in frames]

    def answer(part: Any) -> str:
        prompt = model.encode([{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}])
        prompt.place(state := model.new_state())
        return model.generate(prompt.tokens, state, max_new_tokens=4, temperature=0.0)

    with lmstate.Engine(model) as engine, running(engine, Settings("tiny", port=0)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def asked(*parts: Any) -> str | None:
            content: Any = [*parts, {"type": "text", "text": "what?"}]
            chat = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": content}], max_tokens=4, temperature=0
            )
            return chat.choices[0].message.content

        listed = {"type": "video", "video": frames, "fps": 2.0}
        url = f"data:video/jpeg;base64,{','.join(payloads)}"
        assert asked({"type": "video_url", "video_url": {"url": url}}) == answer({**listed, "fps": 1.0})
        assert asked({"type": "video_url", "video_url": {"url": url, "fps": 2.0}}) == answer(listed)
        urls = [f"data:image/png;base64,{payload}" for payload in payloads]
        assert asked({"type": "video", "video": urls, "fps": 2.0}) == answer(listed)
        for part, told in (
            ({"type": "video", "video": []}, "a list of frames"),
            ({"type": "video", "video": ["http://example.com/a.png"]}, "a frame is data:image/jpeg;base64"),
            ({"type": "video_url"}, "video_url"),
            ({"type": "video_url", "video_url": {"url": url.replace(";base64", ";fps=x;base64")}}, "it is a number"),
            ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA,!"}}, "not base64"),
            ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA"}}, "frame 0 of a video"),
            ({"type": "video_url", "video_url": {"url": "data:video/avi;base64,AAAA"}}, "video"),
            ({"type": "video", "video": urls[:1] * (MOST_FRAMES + 1), "fps": 2.0}, f"have {MOST_FRAMES + 1} frames"),
        ):
            with pytest.raises(openai.BadRequestError, match=told):
                asked(part)
        if find_spec("av") is not None:
            data = film("mp4", "mpeg4", range(0, 250, 5))
            url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
            for fps in (None, 4.0):
                sent = {"url": url} if fps is None else {"url": url, "fps": fps}
                assert asked({"type": "video_url", "video_url": sent}) == answer(
                    {"type": "video", "video": data, "fps": fps or 2.0}
                )


def test_models_without_videos_say_so(tmp_path: Path) -> None:
    from tests.vision.test_encode import saved_with_axes

    saved_with_axes(tmp_path, "glm_ocr", "Glm4v")
    model, small = lmstate.load(tmp_path, weights="float32"), Image.new("RGB", (8, 8))
    with pytest.raises(lmstate.UnsupportedError, match="a video was given, and glm_ocr models read pictures alone"):
        model.encode(video(small, small))


def test_times_of_groups() -> None:
    assert group_times(5, 2.0, 2) == [0.25, 1.25, 2.0]
