"""Prompts with pictures in the engine: each answer is that of the prompt alone, and a picture is found again."""

from __future__ import annotations

import random
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

import lmstate
from lmstate.engine.prefix.digests import beginnings, packed, unpacked
from lmstate.engine.session_record import Record
from lmstate.errors import EmbeddingsGone
from lmstate.generation.sampling import Sampler, TokenPicker
from lmstate.state import MediaSpan
from lmstate.vision.reader import PicturePrompt
from tests.state.test_media import PLACEHOLDER, has_axes, picture
from tests.vision.test_encode import png, said, saved
from tests.zoo import ours, text


def alone(model: lmstate.Model, prompt: PicturePrompt, count: int, sampler: Sampler, index: int = 0) -> list[int]:
    """Each token from a state of its own, which reads the whole text at once."""
    tokens: list[int] = []
    picker = TokenPicker(sampler, 1, first=index)
    picker.see(0, prompt.tokens)
    for _ in range(count):
        prompt.place(state := model.new_state())
        logits = model([[*prompt.tokens, *tokens]], state)
        assert logits is not None
        if (token := picker.pick(logits, [0])[0]) in model.eos_ids:
            break
        tokens.append(token)
    return tokens


def begun(prompt: PicturePrompt, most: int) -> PicturePrompt:
    """The beginning of a prompt up to `most` tokens, or to a picture in which they end."""
    at = min([most, *(span.at for span in prompt.media if span.at < most < span.end)])
    return PicturePrompt(prompt.tokens[:at], tuple(span for span in prompt.media if span.end <= at))


def followed(prompt: PicturePrompt, model: lmstate.Model, luck: random.Random, axes: bool) -> PicturePrompt:
    """A prompt that goes on with text and pictures, of a few: different ones stand in the same text."""
    tokens, media = list(prompt.tokens), list(prompt.media)
    for _ in range(luck.randint(1, 3)):
        tokens += text(luck.randint(1, 9), seed=luck.randrange(3))[0].tolist()
        if luck.random() < 0.7:
            seen = picture(8, model.config.hidden_size, luck.randrange(3), axes and luck.random() < 0.7)
            media.append(MediaSpan(len(tokens), seen))
            tokens += [PLACEHOLDER] * seen.count
    return PicturePrompt(tokens, tuple(media))


OPTIONS: dict[str, dict[str, Any]] = {
    "room": {"memory": "1GiB"},
    "little room": {"memory": 400_000, "rows": 3},
    "a folder": {"memory": 400_000, "rows": 3, "store": True},
}


@pytest.mark.parametrize(
    "case", ["llama", "mistral", "falcon_h1", "qwen2_vl", "qwen3_5", "gemma3-pattern", "gemma4_unified"]
)
@pytest.mark.parametrize("kind", OPTIONS)
def test_answers_are_those_of_each_prompt_alone(case: str, kind: str, tmp_path: Path) -> None:
    """Beginnings are shared, with the same and with other pictures at the same place, in rows beside each other."""
    model, luck = ours(case), random.Random(f"{case} {kind}")
    options = dict(OPTIONS[kind])
    if options.pop("store", False):
        options["store"] = tmp_path
    prompts, reused = [PicturePrompt(text(3)[0].tolist())], 0
    for _ in range(2):
        with lmstate.Engine(model, **options) as engine:
            asked = []
            for _ in range(7):
                earlier = luck.choice(prompts)
                cut = begun(earlier, luck.choice([len(earlier.tokens), luck.randint(1, len(earlier.tokens))]))
                prompts.append(new := followed(cut, model, luck, has_axes(case)))
                sampler = Sampler(temperature=1.0, seed=3) if luck.random() < 0.3 else Sampler()
                params = lmstate.SamplingParams(
                    max_new_tokens=luck.randint(1, 5), temperature=sampler.temperature, seed=sampler.seed,
                    n=luck.choice([1, 1, 2]), prompt_logprobs=luck.choice([None, None, None, 0]),
                )  # fmt: skip
                asked.append((new, params, sampler, engine.submit(new, params)))
                if luck.random() < 0.5:
                    asked[-1][3].result(600)
            for new, params, sampler, request in asked:
                done = request.result(600)
                reused += done.usage.reused
                for index, tokens in enumerate(done.tokens):
                    expected = alone(model, new, params.max_new_tokens, sampler, index)
                    assert tokens[: len(expected)] == expected
            assert "positions of a picture" in engine.tree() or kind != "room"
            assert engine.stats()["pictures"] == sum(len(new.media) for new, *_ in asked)
    assert reused > 50


def test_texts_with_pictures_have_names_and_are_written() -> None:
    model = ours("llama")
    seen = picture(30, model.config.hidden_size, 0)
    plain = text(50)[0].tolist()
    one = PicturePrompt([*plain, *[PLACEHOLDER] * 30], (MediaSpan(50, seen),)).identities
    other = [*plain, *[PLACEHOLDER] * 30]
    assert list(unpacked(packed(one))) == one and list(unpacked(packed(other))) == other
    assert len(packed(other)) == 4 * 80
    assert [*beginnings(one)] != [*beginnings(other)]
    assert next(beginnings([*plain, *other])) == next(beginnings([*plain, *one]))
    with pytest.raises(lmstate.SnapshotError):
        unpacked(packed(one)[:-3])


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> lmstate.Model:
    folder = tmp_path_factory.mktemp("llava")
    saved(folder)
    return lmstate.load(folder, weights="float32")


def test_a_tower_sees_a_picture_once(seeing: lmstate.Model) -> None:
    tower = seeing.pictures().tower
    first, second = png(20, 30), png(40, 17, seed=1)
    with lmstate.Engine(seeing) as engine:
        runs = tower.runs
        done = engine.submit(said(first, "what is this?"), max_new_tokens=4).result(600)
        assert tower.runs == runs + 1 and done.usage.reused == 0 < done.usage.pictures
        done = engine.submit(said(first, "what is that?"), max_new_tokens=4).result(600)
        assert tower.runs == runs + 1 and done.usage.reused > 16
        done = engine.submit(said(second, "what is this?"), max_new_tokens=4).result(600)
        assert tower.runs == runs + 2 and done.usage.reused < 16
        assert engine.explain(said(first, "what is this?")).reused > 30
        with pytest.raises(ValueError, match="submit them"):
            engine.encode(said(first, "what is this?"))
        shown = "".join(prefix.text for prefix in engine.prefixes())
        assert "positions of a picture]" in shown and "this" in shown


def test_other_requests_go_on_while_the_tower_runs(seeing: lmstate.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tower, began, go = seeing.pictures().tower, Event(), Event()
    embed = type(tower).embed

    def slow(self: Any, tile: Any) -> torch.Tensor:
        began.set()
        assert go.wait(600)
        return embed(self, tile)

    monkeypatch.setattr(type(tower), "embed", slow)
    with lmstate.Engine(seeing) as engine:
        answers: list[Any] = []
        thread = Thread(target=lambda: answers.append(engine.submit(said(png(9, 9), "?"), max_new_tokens=2).result()))
        thread.start()
        assert began.wait(600)
        assert engine.submit([5, 6, 7], max_new_tokens=30).result(600).tokens
        go.set()
        thread.join()
        assert answers[0].usage.pictures > 0


def test_sessions_have_pictures(seeing: lmstate.Model, tmp_path: Path) -> None:
    first, second = png(20, 30), png(40, 17, seed=1)
    with lmstate.Engine(seeing, store=tmp_path / "store") as engine:
        session = engine.session("one")
        session.send(said(first, "what is this?"), max_new_tokens=4).result(600)
        length = len(session.tokens)
        done = session.send(said("and", second, "?"), max_new_tokens=4).result(600)
        assert done.usage.reused >= length - 1
        whole = session.record.prompt
        assert [span.media.count for span in whole.media] == [16, 16]
        with pytest.raises(lmstate.RewindError, match=f"go back to {whole.media[1].at} or to {whole.media[1].end}"):
            session.rewind(whole.media[1].at + 3)
        session.save(tmp_path / "saved")
        session.fork("other").rewind(length)
        expected = alone(seeing, PicturePrompt([*whole.tokens, 9, 10], whole.media), 5, Sampler())
        assert session.send([9, 10], max_new_tokens=5).result(600).tokens[0][: len(expected)] == expected
        session.undo()
    with lmstate.Engine(seeing, store=tmp_path / "store") as engine:
        session = engine.session("one")
        assert session.record.prompt == whole
        done = session.send([9, 10], max_new_tokens=5).result(600)
        assert done.tokens[0][: len(expected)] == expected and done.usage.reused >= len(whole.tokens) - 1
        other = engine.session("other")
        assert len(other.record.media) == 1 and other.messages[0] == said(first, "what is this?")[0]
        assert other.send(said("more"), max_new_tokens=5).result(600).usage.reused >= length - 1
    with lmstate.Engine(seeing, store=tmp_path / "store") as engine:
        other = engine.session("other")  # nothing of it is in memory
        other.save(tmp_path / "other")
        ids = Record(other.tokens, media=other.record.media)
        with pytest.raises(EmbeddingsGone, match="messages do not have their files"):
            engine.new_session("ids", ids).save(tmp_path / "ids")
        assert not (tmp_path / "ids").exists()
        expected_other = other.send(said("more"), max_new_tokens=5).result(600).tokens
    with lmstate.Engine(seeing) as engine:
        session = engine.load_session("three", tmp_path / "saved")
        assert session.send([9, 10], max_new_tokens=5).result(600).tokens[0][: len(expected)] == expected
        other = engine.load_session("other", tmp_path / "other")
        assert other.send(said("more"), max_new_tokens=5).result(600).tokens == expected_other


def test_pictures_that_do_not_fit_are_refused() -> None:
    model = ours("llama")
    seen = picture(8, model.config.hidden_size, 0)
    with lmstate.Engine(model) as engine:
        for bad, why in (
            (PicturePrompt([1, 2, 3], (MediaSpan(1, seen),)), "behind the last of 3 tokens"),
            (PicturePrompt([1] * 20, (MediaSpan(1, seen),)), "each of its tokens is 7"),
            (PicturePrompt([7] * 20, (MediaSpan(1, picture(8, 5, 0)),)), "as wide as"),
            (PicturePrompt([7] * 20, (MediaSpan(1, seen), MediaSpan(4, seen))), "before the one in front"),
            (PicturePrompt([7] * 30, (MediaSpan(1, picture(8, model.config.hidden_size, 0, True)),)), "rope has one"),
        ):
            with pytest.raises(ValueError, match=why):
                engine.submit(bad)
        with pytest.raises(lmstate.UnsupportedError, match="checkpoint folders"):
            engine.submit(said(png(9, 9), "?"))
        lost = PicturePrompt([7] * 9, (MediaSpan(0, seen.without_embeddings()),))
        with pytest.raises(lmstate.StateError, match="let go"):
            engine.submit(lost, max_new_tokens=1).result(600)
        assert len(engine.submit([7] * 9, max_new_tokens=1).result(600).tokens[0]) <= 1


def test_damaged_records_of_pictures_are_refused() -> None:
    model = ours("qwen2_vl")
    seen = picture(8, model.config.hidden_size, 0, True)
    record = Record([3, *[PLACEHOLDER] * seen.count], media=[MediaSpan(1, seen)])
    tokens = record.tokens
    assert Record.from_json(tokens, record.to_json()).prompt == record.prompt
    told = record.to_json()
    for bad in (told.replace("[[1, 7", "[[2, 7"), told.replace("[[1, 7", "[[1, 6"), told.replace("[[0, 0", '[["", 0')):
        assert bad != told
        with pytest.raises(ValueError, match="damaged"):
            Record.from_json(tokens, bad)
    image = Record([1], [{"role": "user", "content": [{"type": "image", "image": b"\0\1"}]}])
    assert Record.from_json([1], image.to_json()) == image
    with pytest.raises(ValueError):
        Record.from_json([1], image.to_json().replace("AAE=", "AA!"))
