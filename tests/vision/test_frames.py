"""Videos of families whose frames are pictures in a text, or one run: transformers' processors and towers as oracle."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

import lmstate
from lmstate.vision.families import VIDEOS
from tests.serve.byte_tokenizer import END, START, save_tokenizer
from tests.vision.test_parity import config
from tests.vision.test_videos import FRAMES, PICTURE, RATES, opened, said
from tests.zoo import randomize

GLM = ("glm4v", "glm4v_moe", "glm46v")
WORDS = {
    **{name: ["<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"] for name in GLM},
    "internvl": ["<img>", "</img>"],
    "llava_onevision": [],
    "smolvlm": ["<fake_token_around_image>", "<global-img>"],
}
MARKS = {**dict.fromkeys(GLM, ("<|image|>", "<|video|>")), "internvl": ("<IMG_CONTEXT>", "<video>")}


def marks(family: str) -> tuple[str, str]:
    return MARKS.get(family, ("<image>", "<video>"))


def processor(t: Any, family: str, inner: Any) -> Any:
    side = {"height": 16, "width": 16}
    if family in GLM:
        kind = "Glm46V" if family == "glm46v" else "Glm4v"
        sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 2048}}
        seen, films = (getattr(t, f"{kind}{part}Processor")(**sizes) for part in ("Image", "Video"))
        return getattr(t, f"{kind}Processor")(seen, inner, films)
    if family == "internvl":
        seen = t.GotOcr2ImageProcessor(size=side, max_patches=2)
        return t.InternVLProcessor(seen, inner, t.InternVLVideoProcessor(size=side), image_seq_length=4)
    if family == "smolvlm":
        longest = {"longest_edge": 16}
        seen = t.SmolVLMImageProcessor(size={"longest_edge": 32}, max_image_size=longest)
        films = t.SmolVLMVideoProcessor(size={"longest_edge": 32}, max_image_size=longest)
        return t.SmolVLMProcessor(seen, inner, films, image_seq_len=4)
    seen = t.LlavaOnevisionImageProcessor(size=side, image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]])
    films = t.LlavaOnevisionVideoProcessor(size=side)
    return t.LlavaOnevisionProcessor(seen, inner, films, num_image_tokens=16, vision_feature_select_strategy="full")


def template(family: str) -> str:
    image, video = marks(family)
    around = ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
    first, last, begin, end = around if family in GLM else ("", "", "", "")
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'image' %}"
        f"{first}{image}{last}{{% elif part.type == 'video' %}}{begin}{video}{end}{{% else %}}{{{{ part.text }}}}"
        "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


@cache
def pair(family: str) -> tuple[Any, Any, lmstate.Model]:
    import transformers as t

    for package in ("torchvision", *(["num2words"] if family == "smolvlm" else [])):
        pytest.importorskip(package)
    folder, (image, video) = Path(mkdtemp()), marks(family)
    words = [image, video, *WORDS[family]]
    ids = {word: 258 + at for at, word in enumerate(words)}
    save_tokenizer(folder, words, template(family))
    inner = t.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END, pad_token=END,
        extra_special_tokens={
            "image_token": image, "video_token": video, "context_image_token": image, "start_image_token": words[-2],
            "end_image_token": words[-1],
        },
    )  # fmt: skip
    inner.add_special_tokens({"additional_special_tokens": [START, *words]}, replace_extra_special_tokens=False)
    made = processor(t, family, inner)
    made.chat_template = template(family)
    made.save_pretrained(folder)
    given = config(family)
    given.text_config.vocab_size, given.text_config.eos_token_id = 258 + len(ids), 257
    given.image_token_id, given.video_token_id = ids[image], ids[video]
    torch.manual_seed(0)
    theirs = t.AutoModelForImageTextToText.from_config(given).eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    return theirs, made, lmstate.load(folder, weights="float32")


# transformers takes no pictures beside videos for GLM and SmolVLM, and for others several videos of one length alone.
ORDERS = [(name, order) for name in WORDS for order in ("v", "avbwc" if name in GLM else "apbvc")]
ORDERS.remove(("smolvlm", "apbvc"))


@pytest.mark.parametrize(("family", "order"), ORDERS)
def test_logits_are_those_of_transformers_at_any_cut(family: str, order: str) -> None:
    theirs, made, model = pair(family)
    prompt = model.encode(said(order))
    text = model.tokenizer.chat_text([{"role": "user", "content": said(order)[0]["content"]}])
    films = [letter for letter in order if letter in FRAMES]
    told = [
        {
            "total_num_frames": len(FRAMES[each]), "fps": RATES[each], "duration": len(FRAMES[each]) / RATES[each],
            "frames_indices": [*range(len(FRAMES[each]))],
        }
        for each in films
    ]  # fmt: skip
    given: dict[str, Any] = {"images": [opened(PICTURE)]} if "p" in order else {}
    videos = [[opened(file) for file in FRAMES[each]] for each in films]
    inputs = made(text=[text], videos=videos, video_metadata=told, do_sample_frames=False, return_tensors="pt", **given)
    assert inputs["input_ids"][0].tolist() == prompt.tokens
    with torch.no_grad():
        expected = theirs(**inputs).logits[0]
    prompt.place(state := model.new_state())
    whole = model([prompt.tokens], state, logits="all")[0]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    spans = prompt.media
    cuts = sorted({0, 3, spans[0].at + 1, spans[0].end - 1, spans[-1].at + 1, len(prompt.tokens)})
    prompt.place(state := model.new_state())
    for start, stop in pairwise(cuts):
        assert torch.equal(model([prompt.tokens[start:stop]], state, logits="all")[0], whole[start:stop])


def test_every_family_of_videos_is_compared() -> None:
    assert {*WORDS} | {name for name in VIDEOS if name.startswith("qwen")} == {*VIDEOS}
