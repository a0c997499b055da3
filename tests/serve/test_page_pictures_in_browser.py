"""Pictures on the page in Chromium: pasted, dropped, chosen, shown in the tree, edited, exported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lmstate
from lmstate.engine import Engine
from lmstate.serve import Settings
from lmstate.vision.reader import name_of
from tests.serve.browser import Visit, needs_chromium
from tests.serve.running import Running, running
from tests.serve.test_page_accessibility import SIZES, findings
from tests.serve.test_page_pictures import kept, lose
from tests.serve.test_pictures import OTHER, PICTURE, data, expected, url
from tests.vision.test_encode import saved, saved_of

pytestmark = needs_chromium

# Hand a picture to an element as the browser does when one is pasted or dropped there.
GIVE = """([selector, type, data, kind]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], kind === "image/png" ? "a.png" : "a.svg", { type: kind }));
  const options = { bubbles: true, cancelable: true };
  const event = type === "paste" ? new ClipboardEvent(type, { ...options, clipboardData: transfer })
    : new DragEvent(type, { ...options, dataTransfer: transfer });
  document.querySelector(selector).dispatchEvent(event);
  return event.defaultPrevented;
}"""
SHOWN = "[...document.querySelectorAll('{}')].every((one) => one.complete && one.naturalWidth > 0)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> lmstate.Model:
    folder = tmp_path_factory.mktemp("llava")
    saved(folder)
    return lmstate.load(folder, weights="float32")


@pytest.fixture(scope="module")
def seeing(model: lmstate.Model) -> Iterator[Running]:
    with Engine(model, rows=2) as engine, running(engine, Settings("tiny", port=0)) as server:
        yield server


@pytest.fixture
def visit(browser: Any, seeing: Running) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    visit = Visit(context, seeing.url)
    visit.settings(max_tokens=6, temperature=0)
    yield visit
    context.close()


def give(visit: Visit, type: str, picture: bytes, selector: str = "#text", kind: str = "image/png") -> bool:
    return bool(visit.page.evaluate(GIVE, [selector, type, data(picture), kind]))


def shown(visit: Visit, selector: str, count: int) -> None:
    """So many pictures are there, and each was drawn."""
    visit.until(f"document.querySelectorAll('{selector}').length === {count}")
    visit.until(SHOWN.format(selector))


def names_in(visit: Visit, seeing: Running) -> list[list[str]]:
    conversation = kept(seeing).get(visit.page.url.rpartition("#")[2])
    assert conversation is not None
    return [node.pictures for node in conversation.nodes.values() if node.role == "user"]


def test_pictures_are_pasted_dropped_chosen_and_removed(
    visit: Visit, seeing: Running, model: lmstate.Model, tmp_path: Path
) -> None:
    page = visit.page
    (tmp_path / "other.png").write_bytes(OTHER)
    assert page.is_visible("#attach")
    assert give(visit, "paste", PICTURE)
    page.set_input_files("#files", tmp_path / "other.png")
    assert give(visit, "dragover", PICTURE, "main") and page.locator("#composer.over").count() == 1
    assert give(visit, "drop", PICTURE, "#pane") and page.locator("#composer.over").count() == 0
    shown(visit, "#attached img", 3)
    page.click("[aria-label='Remove picture 3']")
    shown(visit, "#attached img", 2)
    assert visit.say("what is this?") == expected(model, PICTURE, OTHER, "what is this?")[1].strip()
    assert names_in(visit, seeing) == [[name_of(PICTURE), name_of(OTHER)]]
    assert not page.is_visible("#attached")
    shown(visit, "#pane .picture img", 2)
    page.keyboard.press("Alt+t")
    shown(visit, "#panel .map .user img", 2)
    page.reload()
    shown(visit, "#pane .picture img", 2)
    page.click("#pane .picture >> nth=1")
    assert page.get_attribute("#pane .picture >> nth=1", "aria-expanded") == "true"
    visit.well(seeing.url)


@pytest.mark.parametrize("family", ["aya_vision", "granite4_vision", "idefics2", "idefics3"])
def test_families_of_many_tiles_answer_on_the_page(browser: Any, family: str, tmp_path: Path) -> None:
    saved_of(family, tmp_path)
    model = lmstate.load(tmp_path, weights="float32")
    with Engine(model, rows=1) as engine, running(engine, Settings("tiny", port=0)) as server:
        context = browser.new_context()
        visit = Visit(context, server.url)
        visit.settings(max_tokens=6, temperature=0)
        give(visit, "paste", OTHER)
        give(visit, "paste", PICTURE)
        shown(visit, "#attached img", 2)
        assert visit.say("what is this?") == expected(model, OTHER, PICTURE, "what is this?")[1].strip()
        shown(visit, "#pane .picture img", 2)
        visit.well(server.url)
        context.close()


def test_only_pictures_are_taken(visit: Visit, seeing: Running) -> None:
    page = visit.page
    assert give(visit, "paste", b"<svg onload='alert(1)'/>", kind="image/svg+xml")
    assert "not a PNG, JPEG, WebP or GIF" in page.inner_text("#problem")
    assert give(visit, "drop", b"no picture")
    visit.until("document.getElementById('problem').textContent.includes('is damaged')")
    assert not page.is_visible("#attached")
    assert not give(visit, "paste", b"text", kind="text/plain"), "text is the browser's to paste"


def test_branches_of_a_message_have_its_pictures(visit: Visit, seeing: Running, tmp_path: Path) -> None:
    page = visit.page
    give(visit, "paste", PICTURE)
    give(visit, "paste", OTHER)
    visit.say("")
    visit.branch(lambda: visit.act("Regenerate this answer, in a new branch"))
    visit.act("Edit this message, in a new branch")
    shown(visit, "form.edit li img", 2)
    page.click("form.edit [aria-label='Remove picture 1']")
    give(visit, "paste", PICTURE, "form.edit textarea")
    page.fill("form.edit textarea", "tell me")
    visit.branch(lambda: page.press("form.edit textarea", "Enter"))
    page.keyboard.press("Alt+z")
    shown(visit, "#attached img", 2)
    assert page.input_value("#text") == "tell me"
    page.click("[aria-label='Remove picture 2']")
    visit.say("tell me")
    one, other = name_of(PICTURE), name_of(OTHER)
    assert names_in(visit, seeing) == [[one, other], [other, one], [other]]
    exported = {}
    for label in ("Export this branch as Markdown", "Export the tree as JSON"):
        if not page.is_visible("#panel"):
            page.keyboard.press("Alt+s")
        with page.expect_download() as download:
            page.click(f"text={label}")
        download.value.save_as(tmp_path / download.value.suggested_filename)
        text = (tmp_path / download.value.suggested_filename).read_text(encoding="utf-8")
        exported[download.value.suggested_filename.rpartition(".")[2]] = text
    assert url(OTHER) in exported["md"] and url(PICTURE) not in exported["md"]
    told = json.loads(exported["json"])
    assert told["pictures"] == {one: url(PICTURE), other: url(OTHER)}
    assert [message["pictures"] for message in told["messages"] if message["role"] == "user"] == names_in(visit, seeing)
    with page.expect_download() as download:
        page.click("text=Save this branch with its state")
    download.value.save_as(tmp_path / "branch.safetensors")
    here = page.url
    page.set_input_files("#load", tmp_path / "branch.safetensors")
    visit.until(f"location.href !== '{here}'")
    shown(visit, "#pane .picture img", 1)
    visit.well(seeing.url)


def test_a_lost_picture_is_told_where_it_stood(visit: Visit, seeing: Running) -> None:
    page = visit.page
    give(visit, "paste", PICTURE)
    visit.say("what is this?")
    lose(kept(seeing), page.url.rpartition("#")[2], PICTURE)
    page.reload()
    page.wait_for_selector("#pane .picture .lost:text-is('Picture lost')")
    page.fill("#text", "and?")
    page.press("#text", "Enter")
    visit.until("document.getElementById('problem').textContent.includes('no longer in the store')")
    assert page.input_value("#text") == "and?"
    visit.act("Edit this message, in a new branch")
    page.click("form.edit [aria-label='Remove picture 1']")
    give(visit, "paste", OTHER, "form.edit textarea")
    visit.branch(lambda: page.press("form.edit textarea", "Enter"))
    assert names_in(visit, seeing) == [[name_of(PICTURE)], [name_of(OTHER)]]


def test_a_model_of_text_offers_no_pictures(browser: Any, tiny: Running) -> None:
    context = browser.new_context()
    visit = Visit(context, tiny.url)
    assert not give(visit, "paste", PICTURE)
    assert give(visit, "drop", PICTURE), "the page stays"
    visit.until("document.getElementById('problem').textContent.includes('reads text only')")
    assert not visit.page.is_visible("#attached")
    visit.well(tiny.url)
    context.close()


def test_files_of_text_go_into_the_message(browser: Any, tiny: Running, tmp_path: Path) -> None:
    context = browser.new_context()
    visit = Visit(context, tiny.url)
    page = visit.page
    (tmp_path / "one.py").write_text("x = '```'\n", encoding="utf-8")
    (tmp_path / "notes").write_text("é", encoding="utf-8")
    page.fill("#text", "Compare")
    page.set_input_files("#files", [tmp_path / "one.py", tmp_path / "notes"])
    visit.until("document.getElementById('text').value.includes('notes')")
    said = "Compare\n\none.py:\n````py\nx = '```'\n````\n\nnotes:\n```\né\n```\n"
    assert page.input_value("#text") == said and not page.is_visible("#problem")
    for name, content, why in (
        ("binary", b"\xff\x00", "no text in UTF-8"),
        ("nul.txt", b"a\x00", "no text in UTF-8"),
        ("long.txt", b"x" * (2**18 + 1), "may have 262144"),
    ):
        (tmp_path / name).write_bytes(content)
        page.set_input_files("#files", tmp_path / name)
        visit.until(f"document.getElementById('problem').textContent.includes('{why}')")
        assert page.input_value("#text") == said
    visit.well(tiny.url)
    context.close()


def test_a_server_with_keys_shows_its_pictures(browser: Any, model: lmstate.Model) -> None:
    """An `img` sends no key: the page fetches the picture itself."""
    context = browser.new_context()
    with Engine(model, rows=1) as engine, running(engine, Settings("tiny", port=0, api_keys=("k",))) as server:
        context.add_init_script("sessionStorage.setItem('key', 'k')")
        visit = Visit(context, server.url)
        visit.settings(max_tokens=2)
        give(visit, "paste", PICTURE)
        visit.say("look")
        visit.page.reload()
        shown(visit, "#pane .picture img", 1)
        visit.well(server.url)
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_serious_is_found_with_pictures(visit: Visit, seeing: Running, scheme: str, size: str) -> None:
    page, (width, height) = visit.page, SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    for _ in range(7):
        give(visit, "paste", OTHER)
    give(visit, "paste", PICTURE)
    shown(visit, "#attached img", 8)
    found = {"attached": findings(page)}
    visit.say("")
    shown(visit, "#pane .picture img", 8)
    page.click("#pane .picture >> nth=0")
    found["shown"] = findings(page)
    visit.act("Edit this message, in a new branch")
    found["edit"] = findings(page)
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+t")
    page.wait_for_selector("#panel .map img")
    found["tree"] = findings(page)
    assert {name: one for name, one in found.items() if one} == {}
    visit.well(seeing.url)
