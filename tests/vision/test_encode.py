"""Conversations with pictures: transformers' processor as the oracle, and files that nobody vouches for."""

from __future__ import annotations

import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import lmstate
from lmstate.vision.pictures import MOST_BYTES, read_picture
from tests.serve.byte_tokenizer import END, START, save_tokenizer
from tests.vision.test_parity import SEEING, TEXT, config
from tests.zoo import randomize

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def saved(folder: Path) -> Any:
    """A small LLaVA with its tokenizer and processor; returns transformers' model."""
    import transformers as t

    save_tokenizer(folder, ["<image>"], TEMPLATE)
    inner = t.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END, additional_special_tokens=[START, "<image>"]
    )
    inner.chat_template = TEMPLATE
    side = {"height": 16, "width": 16}
    pixels = t.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=side)
    processor = t.LlavaProcessor(
        pixels, inner, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )  # fmt: skip
    seeing = t.CLIPVisionConfig(**SEEING, image_size=16)
    words = t.LlamaConfig(**{**TEXT, "vocab_size": 259, "eos_token_id": 257})
    torch.manual_seed(0)
    theirs = t.LlavaForConditionalGeneration(
        t.LlavaConfig(vision_config=seeing, text_config=words, image_token_id=258)
    ).eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    processor.save_pretrained(folder)
    return theirs


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, lmstate.Model, Path]:
    folder = tmp_path_factory.mktemp("llava")
    return saved(folder), lmstate.load(folder, weights="float32"), folder


def saved_with_axes(folder: Path, family: str = "qwen2_vl", kind: str = "Qwen2VL") -> Any:
    """A small model whose pictures have positions of several axes; returns transformers' model."""
    import transformers as t

    save_tokenizer(folder, ["<image>"], TEMPLATE)
    sizes = {"shortest_edge": 64, "longest_edge": 1024}
    getattr(t, f"{kind}ImageProcessorPil")(patch_size=4, merge_size=2, size=sizes).save_pretrained(folder)
    given = config(family)
    given.text_config.vocab_size, given.image_token_id = 259, 258
    torch.manual_seed(0)
    theirs = t.AutoModelForImageTextToText.from_config(given).eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize(("family", "kind"), [("qwen2_vl", "Qwen2VL"), ("glm4v", "Glm4v"), ("qwen3_5", "Qwen2VL")])
def test_pictures_of_several_sizes_with_axes(family: str, kind: str, tmp_path: Path) -> None:
    import transformers as t

    theirs = saved_with_axes(tmp_path, family, kind)
    pixels = t.AutoImageProcessor.from_pretrained(tmp_path)  # another one where torchvision is
    model, files = lmstate.load(tmp_path, weights="float32"), [png(30, 20), png(16, 40, seed=1)]
    prompt = model.encode(said(files[0], "and", files[1]))
    inputs = pixels(images=[Image.open(io.BytesIO(file)) for file in files], return_tensors="pt")
    counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
    assert [span.media.count for span in prompt.media] == counts
    assert counts[0] != counts[1]
    types = torch.tensor([[int(token == 258) for token in prompt.tokens]])
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([prompt.tokens]), mm_token_type_ids=types, **inputs).logits[0, -1]
    state = model.new_state()
    prompt.place(state)
    logits = model([prompt.tokens], state)
    assert logits is not None
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def png(width: int, height: int, seed: int = 0) -> bytes:
    content = random.Random(seed).randbytes(width * height * 3)
    buffer = io.BytesIO()
    Image.frombytes("RGB", (width, height), content).save(buffer, "PNG")
    return buffer.getvalue()


def said(*parts: str | bytes) -> list[dict[str, Any]]:
    """One message of the user, of texts and pictures."""
    content = [
        {"type": "image", "image": part} if isinstance(part, bytes) else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def test_a_conversation_is_that_of_the_processor(seeing: tuple[Any, lmstate.Model, Path]) -> None:
    import transformers as t

    theirs, model, folder = seeing
    first, second = png(20, 30), png(40, 17, seed=1)
    messages = said(first, "what is this, and this?", second)
    prompt = model.encode(messages)
    processor = t.AutoProcessor.from_pretrained(folder)
    given = said("", "", "")[0]["content"]
    given = [
        {"type": "image", "image": Image.open(io.BytesIO(part["image"]))} if part["type"] == "image" else part
        for part in messages[0]["content"]
    ]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": given}], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    assert prompt.tokens == inputs["input_ids"][0].tolist()
    with torch.no_grad():
        expected = theirs(**inputs).logits[0, -1]
    state = model.new_state()
    prompt.place(state)
    logits = model([prompt.tokens], state)
    assert logits is not None
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    again = model.encode(said("and then?", first))
    again.place(state)
    model([again.tokens], state, logits="none")
    assert [span.media.count for span in state.media(0)] == [16, 16, 16]
    assert state.media(0)[0].media == state.media(0)[2].media


def test_placeholders_in_a_message_are_text(seeing: tuple[Any, lmstate.Model, Path]) -> None:
    _, model, _ = seeing
    prompt = model.encode(said("an <image> and", png(20, 20)))
    assert prompt.tokens.count(258) == 16
    assert model.encode([{"role": "user", "content": "no <image>"}]).media == ()


def test_models_without_pictures_say_so(seeing: tuple[Any, lmstate.Model, Path], tmp_path: Path) -> None:
    _, model, folder = seeing
    for file in folder.iterdir():
        if "processor" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(lmstate.ModelError, match="processor"):
        lmstate.load(tmp_path, weights="float32").encode(said(png(20, 20)))
    with pytest.raises(lmstate.StateError, match="64"):
        model.encode(said(*[png(8, 8)] * 65))


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def header(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def test_hostile_files_are_refused() -> None:
    whole = png(60, 40)
    bomb = header(30_000, 30_000) + chunk(b"IDAT", zlib.compress(b"\0" * 2**20)) + chunk(b"IEND", b"")
    large = header(9_000, 8_000) + chunk(b"IDAT", zlib.compress(b"\0" * 2**20)) + chunk(b"IEND", b"")
    thin = header(4_000, 2) + chunk(b"IDAT", zlib.compress(b"\0" * 2**15)) + chunk(b"IEND", b"")
    text = header(8, 8) + chunk(b"zTXt", b"k\0\0" + zlib.compress(b"\0" * 2**26)) + whole[33:]
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
    for bad in (
        b"",
        b"GIF89a",
        whole[:200],
        whole[:-30],
        bomb,
        large,
        thin,
        text,
        postscript,
        svg,
        b"\0" * (MOST_BYTES + 1),
    ):
        with pytest.raises(lmstate.StateError, match="a picture") as told:
            read_picture(bad)
        assert " object at 0x" not in str(told.value)
    with pytest.raises(lmstate.StateError, match="bytes of a file"):
        read_picture("http://localhost/picture.png")  # type: ignore[arg-type]


def test_files_changed_at_random_are_read_or_refused() -> None:
    luck, kinds = random.Random(0), {}
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        buffer = io.BytesIO()
        Image.open(io.BytesIO(png(24, 16))).save(buffer, kind)
        kinds[kind] = buffer.getvalue()
        assert read_picture(kinds[kind]).size == (24, 16)
    for _ in range(300):
        content = bytearray(luck.choice([*kinds.values()]))
        for _ in range(luck.randint(1, 6)):
            content[luck.randrange(len(content))] = luck.randrange(256)
        try:
            read_picture(bytes(content)).load()
        except lmstate.StateError as error:
            assert " object at 0x" not in str(error)


def test_pictures_between_tokens_of_their_own(tmp_path: Path) -> None:
    """Gemma 3: its template writes the token that begins a picture, and the processor the places behind it."""
    import transformers as t

    begin, end, place = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
    template = TEMPLATE.replace("<image>", begin)
    save_tokenizer(tmp_path, [begin, end, place], template)
    inner = t.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token=END, additional_special_tokens=[START],
        extra_special_tokens={"boi_token": begin, "eoi_token": end, "image_token": place},
    )  # fmt: skip
    pixels = t.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    t.Gemma3Processor(pixels, inner, chat_template=template, image_seq_length=4).save_pretrained(tmp_path)
    given = config("gemma3")
    given.text_config.vocab_size, given.image_token_id, given.text_config.eos_token_id = 261, 260, 257
    torch.manual_seed(0)
    theirs = t.AutoModelForImageTextToText.from_config(given).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    files = [png(30, 20), png(16, 40, seed=1)]
    model, processor = lmstate.load(tmp_path, weights="float32"), t.AutoProcessor.from_pretrained(tmp_path)
    prompt = model.encode(said(files[0], "and", files[1]))
    whole = text = model.tokenizer.decode(prompt.tokens, skip_special_tokens=False)
    for _ in files:
        text = text.replace(f"\n\n{begin}{place * 4}{end}\n\n", begin, 1)
    assert text != whole and text.count(begin) == 2
    images = [Image.open(io.BytesIO(file)) for file in files]
    inputs = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    assert inputs["input_ids"][0].tolist() == prompt.tokens
    with torch.no_grad():
        expected = theirs(**inputs).logits[0, -1]
    prompt.place(state := model.new_state())
    logits = model([prompt.tokens], state)
    assert logits is not None
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


# The token of a place, where a template writes another one for a picture.
PLACES = {"ovis2": "<IMG_ATOM>", "llama4": "<|patch|>", "aya_vision": "<|IMG_PATCH|>"}


def processor_of(family: str, folder: Path) -> Any:
    """A small processor of a family, saved with a tokenizer in a folder."""
    import transformers as t

    place = PLACES.get(family, "<image>")
    names = {
        "aya_vision": {name: f"<|{name}|>" for name in ("START_OF_IMG", "END_OF_IMG")},
        "cohere2_vision": {name: f"<{name}>" for name in ("boi_token", "eoi_token", "img_line_break_token")},
        "smolvlm": {
            "fake_image_token": "<fake_token_around_image>", "end_of_utterance_token": "<end_of_utterance>",
            "global_image_token": "<global-img>", "video_token": "<video>",
        },
        "idefics3": {"fake_image_token": "<fake_token_around_image>", "end_of_utterance": "<end_of_utterance>"},
        "internvl": {
            "start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>",
            "context_image_token": "<image>",
        },
        "lfm2_vl": {name: f"<|{name}|>" for name in ("image_start", "image_end", "img_thumbnail")},
        "lighton_ocr": {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        "mistral3": {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        "gemma4": {name: f"<{name}>" for name in ("boi_token", "eoi_token", "boa_token", "eoa_token", "audio_token")},
        "idefics2": {"image_boundary_token": "<bound>", "end_of_utterance": "<end_of_utterance>"},
        "llama4": {
            name: f"<|{name}|>"
            for name in ("image_start", "image_end", "tile_x_separator", "tile_y_separator", "image")
        },
        "ovis2": {name: f"<IMG_{name}>" for name in ("START", "GRID", "COL", "ROW", "END")},
        "minicpmv4_6": {
            name: f"<{name}>"
            for kind in ("image", "slice", "image_id")
            for name in (f"{kind}_start_token", f"{kind}_end_token")
        } | {"video_token": "<video>"},
    }.get(family, {})  # fmt: skip
    save_tokenizer(folder, list(dict.fromkeys([place, *names.values(), "<image>"])), TEMPLATE)
    inner = t.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END, pad_token=END,
        additional_special_tokens=[START], extra_special_tokens={"image_token": "<image>", **names},
    )  # fmt: skip
    size = {"height": 16, "width": 16}
    if family == "idefics2":
        pixels = t.Idefics2ImageProcessorPil(size={"shortest_edge": 10, "longest_edge": 16}, do_image_splitting=True)
        made = t.Idefics2Processor(pixels, inner, image_seq_len=4, chat_template=TEMPLATE)
    elif family == "aya_vision":
        pixels = t.GotOcr2ImageProcessorPil(size=size, max_patches=4)
        made = t.AyaVisionProcessor(
            pixels, inner, patch_size=4, img_size=16, downsample_factor=2, chat_template=TEMPLATE
        )
    elif family == "cohere2_vision":
        pytest.importorskip("torchvision")  # of its processor of images
        pixels = t.Cohere2VisionImageProcessor(size=size, max_patches=4, patch_size=2)
        made = t.Cohere2VisionProcessor(pixels, inner, chat_template=TEMPLATE)
    elif family == "idefics3":
        pixels = t.Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
        made = t.Idefics3Processor(pixels, inner, image_seq_len=4, chat_template=TEMPLATE)
    elif family == "internvl":
        pytest.importorskip("torchvision")  # of its processor of videos
        pixels = t.GotOcr2ImageProcessorPil(size=size, max_patches=4)
        made = t.InternVLProcessor(
            pixels, inner, t.InternVLVideoProcessor(), image_seq_length=4, chat_template=TEMPLATE
        )
    elif family == "lfm2_vl":
        pytest.importorskip("torchvision")  # of its processor of images
        pixels = t.Lfm2VlImageProcessor(
            tile_size=16, encoder_patch_size=4, min_image_tokens=2, max_image_tokens=4, max_tiles=4, size=size
        )
        made = t.Lfm2VlProcessor(pixels, inner, chat_template=TEMPLATE)
    elif family == "lighton_ocr":
        pixels = t.PixtralImageProcessorPil(size={"longest_edge": 16}, patch_size=8)
        made = t.LightOnOcrProcessor(pixels, inner, patch_size=4, chat_template=TEMPLATE)
    elif family == "mistral3":
        pytest.importorskip("torchvision")  # which its processor asks for
        pixels = t.PixtralImageProcessorPil(size={"longest_edge": 16}, patch_size=4)
        made = t.PixtralProcessor(
            pixels, inner, patch_size=4, spatial_merge_size=2, image_token="<image>", chat_template=TEMPLATE
        )
    elif family == "smolvlm":
        pytest.importorskip("torchvision")  # of its processor of videos
        pytest.importorskip("num2words")
        pixels = t.SmolVLMImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
        made = t.SmolVLMProcessor(pixels, inner, t.SmolVLMVideoProcessor(), image_seq_len=4, chat_template=TEMPLATE)
    elif family == "ovis2":
        pixels = t.Ovis2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=4)
        made = t.Ovis2Processor(pixels, inner, image_seq_length=4, chat_template=TEMPLATE)
    elif family == "minicpmv4_6":
        pytest.importorskip("torchvision")  # of its processor of videos
        pixels = t.MiniCPMV4_6ImageProcessorPil(scale_resolution=32, patch_size=4)
        made = t.MiniCPMV4_6Processor(pixels, t.MiniCPMV4_6VideoProcessor(), inner, chat_template=TEMPLATE)
    elif family == "gemma4":
        pytest.importorskip("torchvision")  # of its processor of videos
        pixels = t.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
        made = t.Gemma4Processor(
            t.Gemma4AudioFeatureExtractor(), pixels, inner, t.Gemma4VideoProcessor(), chat_template=TEMPLATE
        )
    elif family == "llama4":
        pytest.importorskip("torchvision")  # of its processor of images
        made = t.Llama4Processor(
            t.Llama4ImageProcessor(size=size, max_patches=4), inner, patch_size=4, pixel_shuffle_ratio=0.5,
            image_token="<image>", fake_image_token="<image>", chat_template=TEMPLATE,
        )  # fmt: skip
    elif family == "llava_onevision":
        pins = [[16, 32], [32, 16], [32, 32]]
        pytest.importorskip("torchvision")  # of its processor of videos
        pixels = t.LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=pins)
        made = t.LlavaOnevisionProcessor(
            pixels, inner, t.LlavaOnevisionVideoProcessor(), num_image_tokens=16,
            vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_9", chat_template=TEMPLATE,
        )  # fmt: skip
    elif family == "paligemma":
        pixels = t.SiglipImageProcessorPil(size={"height": 8, "width": 8})
        pixels.image_seq_length, inner.bos_token = 4, START
        made = t.PaliGemmaProcessor(pixels, inner)
    elif family == "granite4_vision":
        pins = [[16, 32], [32, 16], [32, 32]]
        pixels = t.LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size=size, image_grid_pinpoints=pins)
        made = t.Granite4VisionProcessor(
            pixels, inner, patch_size=4, vision_feature_select_strategy="full", downsample_rate="1/2",
            chat_template=TEMPLATE,
        )  # fmt: skip
    else:
        pixels = t.DeepseekVLImageProcessorPil(size=size, min_size=4)
        made = t.DeepseekVLProcessor(pixels, inner, num_image_tokens=16, chat_template=TEMPLATE)
    made.save_pretrained(folder)
    return t.AutoProcessor.from_pretrained(folder)


WRITTEN = [
    "aya_vision", "cohere2_vision", "deepseek_vl", "gemma4", "granite4_vision", "idefics2", "idefics3", "internvl",
    "lfm2_vl", "lighton_ocr", "llama4", "llava_onevision", "minicpmv4_6", "mistral3", "ovis2", "smolvlm",
]  # fmt: skip


def saved_of(family: str, folder: Path) -> tuple[Any, Any]:
    """A small model of a family with its tokenizer and processor; returns transformers' model and processor."""
    import transformers as t

    processor, given = processor_of(family, folder), config(family)
    given.image_token_id = processor.tokenizer.convert_tokens_to_ids(PLACES.get(family, "<image>"))
    if family == "ovis2":
        marks = ("<IMG_START>", "<IMG_END>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>")
        given.visual_indicator_token_ids = processor.tokenizer.convert_tokens_to_ids(marks)
        given.vocab_size = len(processor.tokenizer)
    given.text_config.vocab_size, given.text_config.eos_token_id = len(processor.tokenizer), 257
    if family == "gemma4":
        given.text_config.vocab_size_per_layer_input = len(processor.tokenizer)
    torch.manual_seed(0)
    theirs = t.AutoModelForImageTextToText.from_config(given).eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    return theirs, processor


@pytest.mark.parametrize("family", WRITTEN)
def test_places_are_those_of_the_processor(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers as t

    monkeypatch.setattr(t.modeling_outputs.MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)  # Llama 4
    theirs, processor = saved_of(family, tmp_path)
    files = [png(30, 20), png(16, 40, seed=1), png(20, 20, seed=2)]
    images = [Image.open(io.BytesIO(file)) for file in files]
    model = lmstate.load(tmp_path, weights="float32")
    prompt = model.encode(said(files[0], files[1], "and", files[2]))
    text = processor.apply_chat_template(said(b"", b"", "and", b""), add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False).to(torch.float32)
    assert inputs["input_ids"][0].tolist() == prompt.tokens
    with torch.no_grad():
        expected = theirs(**inputs).logits[0, -1]
    prompt.place(state := model.new_state())
    logits = model([prompt.tokens], state)
    assert logits is not None
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def test_a_prompt_of_one_piece_is_that_of_the_processor(tmp_path: Path) -> None:
    """PaliGemma: no chat template, pictures first, and tokens that see all of the prompt in front of an answer."""
    import transformers as t

    processor, given = processor_of("paligemma", tmp_path), config("paligemma")
    words, size = processor.tokenizer, len(processor.tokenizer)
    given.image_token_index, given.text_config.eos_token_id = words.convert_tokens_to_ids("<image>"), 257
    given.text_config.vocab_size = size
    theirs = t.AutoModelForImageTextToText.from_config(given).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    files = [png(30, 20), png(16, 40, seed=1)]
    model = lmstate.load(tmp_path, weights="float32")
    prompt = model.encode(said("what is", *files, " this?"))
    images = [Image.open(io.BytesIO(file)) for file in files]
    inputs = processor(text=["<image><image>what is this?"], images=[images], return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == prompt.tokens
    (span,) = prompt.media
    assert (span.at, span.end) == (0, len(prompt)) and span.media.pictured == 8
    inputs.pop("labels")
    with torch.no_grad():
        expected = theirs.generate(**inputs, max_new_tokens=9, do_sample=False, eos_token_id=size)
    prompt.place(state := model.new_state())
    assert (
        model.generate(prompt.tokens, state, max_new_tokens=9, ignore_eos=True, return_ids=True)
        == expected[0, len(prompt) :].tolist()
    )
    snapshot = state.snapshot(0)
    snapshot.save(tmp_path / "row")
    again = model.new_state()
    again.restore(0, lmstate.Snapshot.load(tmp_path / "row"))
    assert again.media(0) == state.media(0) and again.media(0)[0].media.text == span.media.text
    assert torch.equal(model([[5]], again), model([[5]], state))
    with pytest.raises(lmstate.StateError, match="and a text"):
        other = model.new_state()
        prompt.place(other)
        model([[*prompt.tokens[:-1], 7]], other)
    assert other.lengths == [0]
    second = model.encode(said("another", *files))
    assert second.identities[:8] != prompt.identities[:8], "what a picture's tokens saw depends on the question"
