"""Pictures and sources through a front: each answer is that of one engine, and a picture is sent to a replica once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import lmstate
import lmstate.serve
from lmstate.cluster import Cluster, pictures
from lmstate.cluster.front import Front
from lmstate.cluster.moving import MovingRequest
from lmstate.cluster.parts import WirePart
from lmstate.cluster.pictures import KeptPictures, PictureMissing, picture_parts, picture_to_wire, read_picture
from lmstate.cluster.remote import SENDS
from lmstate.cluster.serving import FrontFiles
from lmstate.cluster.wire import WireAnswer, pack, unpack
from lmstate.engine import Engine, Request
from lmstate.errors import StateError, UnsupportedError
from lmstate.state import Media, MediaSpan
from lmstate.vision.reader import PicturePrompt
from tests.cluster.helpers import LocalChannel, fleet
from tests.cluster.test_front import check
from tests.state.test_media import PLACEHOLDER, has_axes, picture
from tests.vision.test_encode import png, said, saved, saved_with_axes
from tests.waiting import wait_until
from tests.zoo import ours, source, text

GIVEN: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 1.2, "seed": 7, "n": 2}


def pictured(model: lmstate.Model, axes: bool, *seeds: int) -> PicturePrompt:
    """A prompt of some text before each of these pictures."""
    tokens, media = [1], []
    for seed in seeds:
        tokens += text(40, seed=seed)[0].tolist()
        media.append(MediaSpan(len(tokens), picture(8, model.config.hidden_size, seed, axes)))
        tokens += [PLACEHOLDER] * media[-1].media.count
    return PicturePrompt([*tokens, 3], tuple(media))


def moved(
    cluster: Cluster, channels: list[LocalChannel], dies_after: int, whole: Request, submit: Callable[[], Request]
) -> None:
    """Check that a request has the whole answer whose replica, wherever it goes, dies after some tokens."""
    whole.result(600)
    for channel in channels:
        channel.dies_after = dies_after
        check(answer := submit(), whole)
        assert isinstance(answer, MovingRequest)
        if answer.moves:
            break
        channel.dies_after = -1
    assert answer.moves == 1
    channel.dead, channel.dies_after = False, -1
    wait_until(lambda: sum(one.takes for one in cluster.status()) == len(channels))


@pytest.mark.parametrize("dies_after", [0, 1, 15])
@pytest.mark.parametrize("case", ["llama", "falcon_h1", "qwen2_vl", "qwen3_5"])
def test_an_answer_to_pictures_outlives_its_replica(case: str, dies_after: int) -> None:
    model = ours(case)
    prompt = pictured(model, has_axes(case), 1, 2, 1)
    with Engine(model) as alone, fleet(Engine(model), Engine(model)) as (cluster, channels):
        whole = alone.submit(prompt, **GIVEN)
        moved(cluster, channels, dies_after, whole, lambda: cluster.front.submit(prompt, **GIVEN))
        assert [channel.calls["picture"] for channel in channels] == [2, 2], "the third is the first again"


def test_a_replica_has_a_picture_of_before(tmp_path: Path) -> None:
    saved(tmp_path)
    model = lmstate.load(tmp_path, weights="float32")
    files = FrontFiles.of(str(tmp_path))
    with Engine(model) as alone, fleet(Engine(model), files=files) as (cluster, (channel,)):
        front, runs = cluster.front, model.pictures().tower.runs
        for asked in (said(png(20, 30), "?"), said(png(20, 30), "and", png(9, 9)), said(png(9, 9), "!")):
            answer = front.submit(asked, max_new_tokens=6)
            answer.result(600)
            assert model.pictures().tower.runs == runs, "the front has a tower of its own"
            check(answer, alone.submit(asked, max_new_tokens=6))
            runs = model.pictures().tower.runs
            assert front.explain(asked) == channel.served.engine.explain(asked)
            assert front.explain(asked).reused == len(answer.prompt)
            prompt = model.encode(asked)
            assert front.held(prompt) == channel.served.engine.held(prompt)
            assert any(one.branch for one in front.prefixes(prompt.identities))
        assert channel.calls["picture"] == 2
        assert front.model.pictures().tower.runs == 2
        assert front.stats()["pictures"] == 4 and front.stats()["picture_seconds"] > 0


@pytest.mark.parametrize("axes", [False, True])
def test_sessions_have_pictures(axes: bool, tmp_path: Path) -> None:
    for folder in ("model", "store"):
        (tmp_path / folder).mkdir()
    (saved_with_axes if axes else saved)(tmp_path / "model")
    model, store = lmstate.load(tmp_path / "model", weights="float32"), f"file://{tmp_path / 'store'}"
    turns = [said(png(20, 30), "what is this?"), said("and", png(40, 17, seed=1), "?"), said("more")]
    with Engine(model) as alone:
        session = alone.session("one")
        expected = [session.send(turn, max_new_tokens=4).result(600).tokens for turn in turns]
        tokens = session.tokens
    engines = [Engine(model, store=store) for _ in "ab"]
    with fleet(*engines, store=store, files=FrontFiles.of(str(tmp_path / "model"))) as (cluster, channels):
        session, got = cluster.front.session("one"), []
        for turn in turns:
            got.append(session.send(turn, max_new_tokens=4).result(600).tokens)
            for channel in channels:
                channel.dead = bool(channel.taken) and len(got) == 2
        assert got == expected and session.tokens == tokens
        assert len(session.record.media) == 2


def test_pictures_that_a_replica_lets_go_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours("llama")
    prompt, other = pictured(model, False, 1, 2), pictured(model, False, 3)
    size = sum(span.media.embeddings.nbytes for span in prompt.media if span.media.embeddings is not None)
    monkeypatch.setattr(pictures, "MOST_BYTES", size)
    with Engine(model) as alone, fleet(Engine(model)) as (cluster, (channel,)):
        for asked in (prompt, other, prompt):
            check(cluster.front.submit(asked, max_new_tokens=3), alone.submit(asked, max_new_tokens=3))
        assert channel.calls["picture"] == 2 + 1 + 1, "the second one was still there"
        with pytest.raises(ValueError, match=f"bytes of pictures; a front sends at most {size:,}"):
            cluster.front.submit(pictured(model, False, 1, 2, 3))
        channel.served._pictures.put = lambda media: None  # type: ignore[method-assign]
        with pytest.raises(PictureMissing, match="1 pictures"):
            cluster.front.submit(other, max_new_tokens=3).result(600)
        assert channel.calls["picture"] == 2 + 1 + 1 + SENDS


def test_pictures_that_come_damaged_are_refused(tmp_path: Path) -> None:
    media = picture(8, 16, 0, True)
    told = picture_to_wire(media, "a", "b")

    async def parts() -> bytes:
        return b"".join([part async for part in picture_parts(media)])

    path, whole = tmp_path / "picture", asyncio.run(parts())
    path.write_bytes(whole)
    same = read_picture(told, path)
    assert same == media and torch.equal(same.positions, media.positions)  # type: ignore[arg-type]
    assert torch.equal(same.embeddings, media.embeddings)  # type: ignore[arg-type]
    wrong = [(b"", told), (whole[:-4], told), (whole + b"0000", told), (b"\1" + whole[1:], told)]
    wrong += [(whole, msgspec.structs.replace(told, **change)) for change in (
        {"token": 8}, {"axes": False}, {"shape": (4, 32)}, {"shape": (0, 0)}, {"shape": (-8, -16)},
        {"shape": (2**40, 2**40)}, {"hash": "0" * 64},
    )]  # fmt: skip
    for data, head in wrong:
        path.write_bytes(data)
        with pytest.raises((ValueError, StateError)):
            read_picture(head, path)
    asked = Media.of(media.embeddings, 7, text=[5, 9])  # type: ignore[arg-type]
    path.write_bytes(whole[len(whole) - asked.embeddings.nbytes :])  # type: ignore[union-attr]
    assert read_picture(picture_to_wire(asked, "a", "b"), path) == asked
    kept = KeptPictures()
    kept.put(media)
    with pytest.raises(ValueError, match="another token or length"):
        kept.placed([MediaSpan(0, replace(media, token=9))])


def test_uploads_follow_each_other_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmstate.cluster.parts.MOST_OPEN", 2)
    with fleet(Engine(ours("llama"))) as (_, (channel,)):

        def sent(to: str, id: str, start: int, data: bytes) -> None:
            told = asyncio.run(channel.call("part", pack(WirePart(to, id, start, data))))
            unpack(told, WireAnswer).read(type(None))

        me, uploads = channel.served.id, channel.served._uploads
        with pytest.raises(lmstate.engine.EngineError, match="was replaced"):
            sent("another", "a", 0, b"x")
        sent(me, "a", 0, b"one ")
        sent(me, "a", 4, b"two")
        with uploads.taken("a") as path:
            assert path.read_bytes() == b"one two"
        assert not path.exists()
        for id in "abc":
            sent(me, id, 0, b"x")
        with pytest.raises(ValueError, match="begins at 5; 1 bytes came"):
            sent(me, "c", 5, b"y")
        for gone in ("a", "c", "never"):
            with pytest.raises(ValueError, match="not here"), uploads.taken(gone):
                pass
        (left,) = uploads._open
        channel.served.check_health()
        assert [*uploads._open] == [left], "its next part may come"
        monkeypatch.setattr("lmstate.cluster.parts.ABANDONED", 0.0)
        channel.served.check_health()
        assert not uploads._open and uploads._folder is not None and not os.listdir(uploads._folder.name)


@pytest.mark.parametrize("case", ["bart", "t5", "whisper"])
def test_an_answer_to_a_source_outlives_its_replica(case: str) -> None:
    model = ours(case)
    given_source = source(model, 70, seed=4)
    with Engine(model) as alone, fleet(Engine(model), Engine(model)) as (cluster, channels):
        for begun in (None, text(41)[0].tolist()):
            whole = alone.submit(begun, source=given_source, **GIVEN)
            given = {"prompt": begun, "source": given_source, **GIVEN}
            moved(cluster, channels, 15, whole, partial(cluster.front.submit, **given))
        for bad, why in (
            ({"source": [[5], [6]]}, "one source"),
            ({"source": [5], "session": "one"}, "sessions have no sources"),
            ({"prompt": [5, 6]}, "reads a source"),
        ):
            with pytest.raises(ValueError, match=why):
                Front.submit(cluster.front, **bad)
        if not model.hears:
            with pytest.raises(UnsupportedError, match="a server's requests have none"):
                cluster.serve(lmstate.serve.Settings("tiny", port=0))


def test_a_model_without_an_encoder_reads_no_source() -> None:
    with fleet(Engine(ours("llama"))) as (cluster, _), pytest.raises(UnsupportedError, match="no encoder"):
        cluster.front.submit(source=[5])
