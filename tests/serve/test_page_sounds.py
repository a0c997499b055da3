"""Sounds on the page: in the tree's conversations, and in Chromium, dropped, recorded, played and exported."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import lmstate
from lmstate.audio.wav import read_wav
from lmstate.engine import Engine
from lmstate.serve import Settings
from lmstate.vision.reader import name_of
from tests.audio.hearing import saved
from tests.audio.test_heard import said
from tests.audio.test_transcribe import noise
from tests.audio.test_wav import wav
from tests.serve.browser import Visit, needs_chromium
from tests.serve.running import Running, running
from tests.serve.test_page import ROOT, create, ended, look, node
from tests.serve.test_page_accessibility import findings
from tests.serve.test_page_pictures import kept, lose
from tests.serve.test_pictures import PICTURE, url

NOISES = [noise(0.6, 1), noise(0.95, 2)]
SOUND, OTHER = (wav(each, width=4) for each in NOISES)
# Hand a file to an element as the browser does when one is pasted or dropped there.
GIVE = """([selector, type, data, kind]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "a.wav", { type: kind }));
  const options = { bubbles: true, cancelable: true };
  const event = type === "paste" ? new ClipboardEvent(type, { ...options, clipboardData: transfer })
    : new DragEvent(type, { ...options, dataTransfer: transfer });
  document.querySelector(selector).dispatchEvent(event);
}"""


def sound_url(sound: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(sound).decode()}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> lmstate.Model:
    saved("glmasr", folder := tmp_path_factory.mktemp("glmasr"))
    return lmstate.load(folder, weights="float32")


@pytest.fixture(scope="module")
def hearing(model: lmstate.Model) -> Iterator[Running]:
    with Engine(model, rows=2) as engine, running(engine, Settings("tiny", port=0)) as server:
        yield server


@pytest.fixture
def client(hearing: Running) -> Iterator[httpx.Client]:
    with hearing.client() as client:
        yield client


def expected(model: lmstate.Model, *parts: Any) -> str:
    prompt = model.encode(said(*parts), add_generation_prompt=True)
    prompt.place(state := model.new_state())
    return model.generate(prompt.tokens, state, max_new_tokens=6, temperature=0.0)


def test_a_sound_is_heard_kept_and_moves_with_its_branch(client: httpx.Client, model: lmstate.Model) -> None:
    about = client.get("/page/about").json()
    assert (about["pictures"], about["sounds"]) == (False, True)
    id = create(client, max_tokens=6, temperature=0)
    sent = {"text": "What?", "pictures": [sound_url(SOUND), sound_url(OTHER)]}
    answer = ended(client, id, client.post(f"{ROOT}/{id}/say", json=sent).json()["answer"])
    assert answer["text"] == expected(model, *NOISES, "What?")
    names = [name_of(SOUND), name_of(OTHER)]
    assert [node(client, id, answer["parent"])[field] for field in ("pictures", "sounds")] == [names, names]
    given = client.get(f"{ROOT}/{id}/pictures/{names[1]}")
    assert given.content == OTHER and given.headers["content-type"] == "audio/wav"
    again = {"text": "Again", "pictures": names[:1], "parent": answer["id"]}
    more = ended(client, id, client.post(f"{ROOT}/{id}/say", json=again).json()["answer"])
    assert node(client, id, more["parent"])["sounds"] == names[:1], "it is known by its name"
    file = client.get(f"{ROOT}/{id}/{more['id']}/session")
    assert file.status_code == 200
    moved = client.post("/page/upload", content=file.content).json()["id"]
    told = [[(one["text"], one["sounds"]) for one in look(client, each)["nodes"]] for each in (id, moved)]
    assert told[0] == told[1]
    untitled = create(client, max_tokens=1)
    client.post(f"{ROOT}/{untitled}/say", json={"pictures": [sound_url(SOUND)]})
    assert "A sound" in [one["title"] for one in client.get(ROOT).json()["data"]]


def test_files_that_the_model_does_not_read_are_refused(client: httpx.Client, tiny: Running) -> None:
    id = create(client)
    for file, why in ((url(PICTURE), "read sounds alone"), (sound_url(SOUND[:-3]), "cut short"), ("x", "data URL")):
        refused = client.post(f"{ROOT}/{id}/say", json={"text": "x", "pictures": [file]})
        assert refused.status_code == 400 and why in refused.text
    assert look(client, id)["nodes"] == []
    with tiny.client() as deaf:
        assert deaf.get("/page/about").json()["sounds"] is False
        refused = deaf.post(f"{ROOT}/{create(deaf)}/say", json={"text": "x", "pictures": [sound_url(SOUND)]})
        assert refused.status_code == 400 and "not read" in refused.text


@pytest.fixture
def visit(browser: Any, hearing: Running) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    visit = Visit(context, hearing.url)
    visit.settings(max_tokens=6, temperature=0)
    yield visit
    context.close()


def give(visit: Visit, type: str, sound: bytes, selector: str = "#text", kind: str = "audio/x-wav") -> None:
    visit.page.evaluate(GIVE, [selector, type, base64.b64encode(sound).decode(), kind])


def playable(visit: Visit, selector: str, count: int) -> None:
    """So many sounds are there, and each can be played."""
    visit.until(f"document.querySelectorAll('{selector}').length === {count}")
    visit.until(f"[...document.querySelectorAll('{selector}')].every((one) => one.readyState > 0 && one.duration > 0)")


def sounds_in(visit: Visit, hearing: Running) -> list[list[str]]:
    conversation = kept(hearing).get(visit.page.url.rpartition("#")[2])
    assert conversation is not None
    return [each.sounds for each in conversation.nodes.values() if each.role == "user"]


@needs_chromium
def test_sounds_are_dropped_pasted_sent_and_edited(
    visit: Visit, hearing: Running, model: lmstate.Model, tmp_path: Path
) -> None:
    page = visit.page
    give(visit, "drop", SOUND, "#pane")
    give(visit, "paste", OTHER)
    playable(visit, "#attached audio", 2)
    assert visit.say("What?") == expected(model, *NOISES, "What?").strip()
    assert sounds_in(visit, hearing) == [[name_of(SOUND), name_of(OTHER)]]
    playable(visit, "#pane .sound audio", 2)
    found = {"shown": findings(page)}
    page.keyboard.press("Alt+t")
    visit.until("document.querySelector('#panel .map .user').textContent.includes('♪ Sound')")
    visit.act("Edit this message, in a new branch")
    playable(visit, "form.edit audio", 2)
    found["edit"] = findings(page)
    page.click("form.edit [aria-label='Remove sound 1']")
    visit.branch(lambda: page.press("form.edit textarea", "Enter"))
    assert sounds_in(visit, hearing)[1] == [name_of(OTHER)]
    page.keyboard.press("Alt+s")
    with page.expect_download() as download:
        page.click("text=Export this branch as Markdown")
    download.value.save_as(tmp_path / "branch.md")
    assert f"[Sound]({sound_url(OTHER)})" in (tmp_path / "branch.md").read_text(encoding="utf-8")
    assert {name: one for name, one in found.items() if one} == {}
    visit.well(hearing.url)
    lose(kept(hearing), page.url.rpartition("#")[2], OTHER)
    page.reload()
    page.wait_for_selector("#pane .sound .lost:text-is('Sound lost')")


@needs_chromium
def test_a_microphone_is_recorded(visit: Visit, hearing: Running) -> None:
    """Chromium's own beeps, which it hands to the page as Opus: what is sent is a WAV file of as long a sound."""
    page = visit.page
    page.click("[aria-label='Record a sound']")
    page.wait_for_selector("#record[aria-pressed='true']")
    assert findings(page) == []
    page.wait_for_timeout(400)
    page.click("[aria-label='End the recording']")
    playable(visit, "#attached audio", 1)
    seconds = page.evaluate("document.querySelector('#attached audio').duration")
    visit.say("What was that?")
    ((name,),) = sounds_in(visit, hearing)
    with hearing.client() as client:
        sent = client.get(f"{ROOT}/{page.url.rpartition('#')[2]}/pictures/{name}").content
    samples = read_wav(sent, 16_000)
    assert len(samples) == pytest.approx(16_000 * seconds, abs=2) and seconds > 0.2 and float(samples.std()) > 0
    visit.well(hearing.url)


@needs_chromium
def test_other_files_are_turned_into_wav_or_told(visit: Visit, hearing: Running, tiny: Running, browser: Any) -> None:
    page = visit.page
    floats = bytearray(wav(NOISES[0], width=4))
    floats[20:22] = b"\x03\x00"  # numbers with a point, which the server does not read
    floats[44:] = NOISES[0].numpy().astype("<f4").tobytes()
    give(visit, "drop", bytes(floats))
    playable(visit, "#attached audio", 1)
    visit.say("What?")
    ((name,),) = sounds_in(visit, hearing)
    with hearing.client() as client:
        sent = client.get(f"{ROOT}/{page.url.rpartition('#')[2]}/pictures/{name}").content
    assert float((read_wav(sent, 16_000) - NOISES[0]).abs().max()) < 2e-4
    give(visit, "drop", b"ID3 no sound", kind="audio/mpeg")
    visit.until("document.getElementById('problem').textContent.includes('no sound that this browser can read')")
    assert not page.is_visible("#attached")
    give(visit, "drop", PICTURE, kind="image/png")
    visit.until("document.getElementById('problem').textContent.includes('takes no pictures')")
    context = browser.new_context()
    deaf = Visit(context, tiny.url)
    give(deaf, "drop", SOUND)
    deaf.until("document.getElementById('problem').textContent.includes('reads text only: it takes no sounds')")
    assert not deaf.page.is_visible("#record") and not deaf.page.is_visible("#attached")
    context.close()
