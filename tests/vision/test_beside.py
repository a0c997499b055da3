"""Pictures beside the text (Llama 3.2 Vision): layers that attend to them, in a state and through an engine."""

from __future__ import annotations

import gc
import math
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import openai
import pytest
import torch
from torch import Tensor

import lmstate
from lmstate.cluster.pictures import WirePicture, picture_to_wire, read_picture
from lmstate.cluster.wire import pack, unpack
from lmstate.serve import Settings
from lmstate.state.media import Media, MediaSpan, read_by
from tests.serve.byte_tokenizer import save_tokenizer
from tests.serve.running import running
from tests.serve.test_pictures import openai_parts
from tests.vision.test_encode import TEMPLATE, png, said
from tests.vision.test_parity import config, seen_tiles
from tests.vision.test_videos import opened
from tests.waiting import GUARD
from tests.zoo import randomize

IMAGE = 258
FIRST, SECOND = png(20, 30), png(60, 14, seed=1)


@cache
def pair() -> tuple[Any, Any, lmstate.Model]:
    """A small Llama 3.2 Vision: transformers' model, its image processor, and ours."""
    import transformers as t

    folder = Path(mkdtemp())
    save_tokenizer(folder, ["<image>"], TEMPLATE)
    pixels = t.MllamaImageProcessorPil(size={"height": 16, "width": 16}, max_image_tiles=4)
    pixels.save_pretrained(folder)
    given = config("mllama")
    given.text_config.vocab_size, given.image_token_index, given.text_config.eos_token_id = IMAGE, IMAGE, 257
    torch.manual_seed(0)
    theirs = t.AutoModelForImageTextToText.from_config(given).eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    return theirs, pixels, lmstate.load(folder, weights="float32")


def expected(ids: list[int], files: list[bytes]) -> Tensor:
    """transformers' logits, where tokens in front of all pictures see none, as in Meta's code and vLLM.

    transformers has their attention see all tiles of all pictures, padding too, so that what comes later changes them.
    """
    theirs, pixels, _ = pair()
    made = pixels(images=[opened(file) for file in files], return_tensors="pt")
    (tiles,) = made.pop("num_tiles")
    before = torch.arange(len(ids)) < ids.index(IMAGE)

    def none_in_front(module: Any, given: Any, out: Any) -> Any:
        return out[0].masked_fill(before[:, None], 0.0), *out[1:]

    layers = [layer for layer in theirs.model.language_model.layers if hasattr(layer, "cross_attn")]
    assert all(layer.cross_attn_attn_gate.abs() > 0.01 for layer in layers)
    hooks = [layer.cross_attn.register_forward_hook(none_in_front) for layer in layers]
    mask = seen_tiles([98 if token == IMAGE else 0 for token in ids], tiles)
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor([ids]), cross_attention_mask=mask, **made).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


@pytest.mark.parametrize("parts", [("so", FIRST, "what?"), (FIRST, SECOND, "or", SECOND), ("a", FIRST, "b", SECOND)])
def test_texts_in_front_and_pictures_in_a_row(parts: tuple[Any, ...]) -> None:
    _, _, model = pair()
    prompt = model.encode(said(*parts))
    files = [part for part in parts if isinstance(part, bytes)]
    assert prompt.tokens.count(IMAGE) == len(prompt.media) == len(files)
    whole = fed(prompt, [0, len(prompt.tokens)])
    torch.testing.assert_close(whole, expected(prompt.tokens, files), atol=1e-4, rtol=1e-4)
    at = prompt.media[0].at
    for cuts in ([0, *range(at, len(prompt.tokens) + 1)], [0, at + 1, at + 2, len(prompt.tokens)]):
        assert torch.equal(fed(prompt, cuts), whole)


def fed(prompt: Any, cuts: list[int]) -> Tensor:
    """The logits of a prompt that is fed in parts, beside a row of other tokens."""
    _, _, model = pair()
    state = model.new_state(2)
    prompt.place(state, 1)
    parts = []
    for start, stop in pairwise(cuts):
        got = model([[5, 6, 7][: stop % 4], prompt.tokens[start:stop]], state, logits="all")
        assert got is not None
        parts.append(got[1, : stop - start])
    return torch.cat(parts)


def test_rows_are_rewound_forked_and_saved(tmp_path: Path) -> None:
    _, _, model = pair()
    prompt, other = model.encode(said("a", FIRST, "b", SECOND, "c")), model.encode(said("a", FIRST, "b"))
    prompt.place(state := model.new_state(2))
    final = model([prompt.tokens, []], state)[0]
    held = state.memory()["media"]
    state.snapshot(0).save(tmp_path / "row")
    state.select([0, 0])
    assert state.memory()["media"] == held  # with the keys and values of both pictures, once
    assert held > sum(tensor.nbytes for span in prompt.media for tensor in (span.media.embeddings,))
    state.rewind(0, prompt.media[1].at)
    assert state.media(0) == prompt.media[:1] and state.media(1) == prompt.media
    shorter = len(other.tokens) - 5
    assert other.tokens[: prompt.media[0].at + 1] == prompt.tokens[: prompt.media[0].at + 1]
    state.rewind(0, prompt.media[0].at + 1)
    again = model([other.tokens[prompt.media[0].at + 1 : shorter], [65]], state)
    other.place(plain := model.new_state())
    assert torch.equal(model([other.tokens[:shorter]], plain)[0], again[0])
    restored = model.new_state()
    restored.restore(0, lmstate.Snapshot.load(tmp_path / "row"))
    assert restored.media(0) == prompt.media
    assert torch.equal(restored.snapshot(0).without_embeddings().logits, final)
    restored.restore(0, restored.snapshot(0).without_embeddings())  # which keeps what each token attends to
    assert torch.equal(model([[65]], restored)[0], again[1])
    with pytest.raises(lmstate.UnsupportedError, match="which ones depends on what is between them"):
        restored.drop(0, 1, 2)
    assert model.pictures().tower.runs == 2


def test_keys_and_values_of_pictures_that_are_gone_are_let_go() -> None:
    _, _, model = pair()
    last, counts = None, []
    for seed in range(4):
        prompt = model.encode(said(png(20, 30, seed=seed + 10), SECOND, "a"))
        assert prompt.media[0].end == prompt.media[1].at
        prompt.place(state := model.new_state())
        model([prompt.tokens], state)
        last = last or prompt.media[1].media
        counts.append(len(last.derived.tensors))
        del prompt, state
        gc.collect()
    assert counts[1:] == counts[:1] * 3


def test_what_has_no_such_layers_takes_no_such_picture() -> None:
    from tests.vision.test_parity import pair as others

    _, llava, _ = others("llava")
    width = llava.config.hidden_size
    media = Media.of(torch.zeros(3, width), 5, beside=True)
    with pytest.raises(lmstate.UnsupportedError, match="no layer of this model attends to such pictures"):
        llava.new_state().place(0, 0, media)
    _, _, model = pair()
    gone = media.without_embeddings()
    with pytest.raises(lmstate.StateError, match="embeddings were let go"):
        model.new_state().place(0, 0, gone)
    with pytest.raises(lmstate.StateError, match="as wide as 48"):
        model.new_state().place(0, 0, Media.of(torch.zeros(3, 96), 5, beside=True))
    with pytest.raises(lmstate.StateError, match="a text of its own"):
        Media.of(torch.zeros(3, 48), 5, text=[4], beside=True)
    assert Media.of(torch.zeros(1, 48), 5) != Media.of(torch.zeros(1, 48), 5, beside=True)


def test_an_engine_finds_the_picture_again() -> None:
    _, _, model = pair()
    messages = said("say", FIRST, "what it is")
    prompt = model.encode(messages)
    prompt.place(state := model.new_state())
    answer = model.generate(prompt.tokens, state, max_new_tokens=6, temperature=0.0)
    later = [*messages, {"role": "assistant", "content": "fine"}, *said(SECOND, "and this?")]
    whole = model.encode(later)
    whole.place(state := model.new_state())
    second = model.generate(whole.tokens, state, max_new_tokens=6, temperature=0.0)
    other = model.encode(said("say", SECOND, "what it is"))
    assert other.tokens == prompt.tokens and other.identities != prompt.identities
    with lmstate.Engine(model) as engine:
        first = engine.submit(messages, max_new_tokens=6, temperature=0.0).result()
        assert first.texts[0] == answer
        got = engine.submit(later, max_new_tokens=6, temperature=0.0).result()
        assert got.texts[0] == second and got.usage.reused > prompt.media[0].at
        beside = engine.submit(said("say", SECOND, "what it is"), max_new_tokens=6, temperature=0.0).result()
        assert beside.usage.reused <= prompt.media[0].at


def test_a_mark_past_the_vocabulary_has_no_logit() -> None:
    """What looks at the tokens of a prompt by their logits leaves it out."""
    model = pair()[2]
    prompt = model.encode(said("see ", FIRST))
    assert max(prompt.tokens) >= model.config.vocab_size
    params = lmstate.SamplingParams(repetition_penalty=1.3, prompt_logprobs=0, max_new_tokens=3, ignore_eos=True)
    with lmstate.Engine(model) as engine:
        completion = engine.submit(prompt, params).result(GUARD)
        engine.remember([{"role": "user", "content": "see"}, {"role": "assistant", "content": "b"}], prompt.tokens)
    assert completion.prompt_logprobs is not None and len(completion.tokens[0]) == 3
    told = [entry.logprob for entry in completion.prompt_logprobs if entry is not None]
    marks = [token >= model.config.vocab_size for token in prompt.tokens[1:]]
    assert [logprob == -math.inf for logprob in told] == marks
    assert model.grammars.token_bytes(IMAGE) == b"<image>"
    assert re.fullmatch("[ab]{3}", model.generate(prompt.tokens, regex="[ab]{3}"))


def test_positions_and_the_pictures_that_they_see() -> None:
    a, b, c, inside = (Media.of(torch.full((n, 4), 1.0), 9, beside=n < 4) for n in (1, 2, 3, 4))
    spans = (MediaSpan(2, a), MediaSpan(3, b), MediaSpan(5, inside), MediaSpan(10, c))
    assert [*read_by(spans, 0, 12)] == [(2, 3, (a, b), 1), (3, 10, (a, b), 2), (10, 12, (c,), 1)]
    assert [*read_by(spans, 4, 10)] == [(4, 10, (a, b), 2)]
    assert [*read_by(spans, 0, 2)] == []


def test_an_openai_client_shows_pictures() -> None:
    _, _, model = pair()
    prompt = model.encode(said("so", FIRST, "what?"))
    prompt.place(state := model.new_state())
    answer = model.generate(prompt.tokens, state, max_new_tokens=6, temperature=0.0)
    with lmstate.Engine(model) as engine, running(engine, Settings("tiny", port=0)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for _ in range(2):
            chat = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": openai_parts("so", FIRST, "what?")}],
                max_tokens=6, temperature=0,
            )  # fmt: skip
            assert chat.choices[0].message.content == answer
            assert chat.usage and chat.usage.prompt_tokens == len(prompt.tokens)
        assert chat.usage.prompt_tokens_details.cached_tokens > prompt.media[0].at
        with server.client() as plain:  # token ids that the server gives are taken back, marks too
            text = plain.post("/detokenize", json={"tokens": [*b"so", IMAGE]}).json()["prompt"]
            given = {"prompt": [*prompt.tokens], "max_tokens": 1, "echo": True, "logprobs": 0}
            told = plain.post("/v1/completions", json=given).json()["choices"][0]["logprobs"]
        assert text.endswith("<image>") and told["tokens"][prompt.tokens.index(IMAGE)] == "<image>"
        assert told["token_logprobs"][prompt.tokens.index(IMAGE)] == -9999.0


def test_a_front_sends_it_as_it_is(tmp_path: Path) -> None:
    media = Media.of(torch.arange(12.0).view(3, 4), 9, beside=True)
    assert media.embeddings is not None
    (tmp_path / "picture").write_bytes(media.embeddings.numpy().tobytes())
    told = unpack(pack(picture_to_wire(media, "a", "1")), WirePicture)
    got = read_picture(told, tmp_path / "picture")
    assert got == media and got.beside and got.count == 1
