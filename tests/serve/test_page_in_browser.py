"""The page in Chromium, against a server with SmolLM2: what a person does with it."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from socket import socket
from typing import Any

import pytest

import lmstate
from lmstate.engine import Engine
from lmstate.serve import Settings
from tests.serve.running import Running, running, wait_until

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")

# The text of every visible element beside its background: the least contrast of each, where it is below 4.5.
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = (color) => color.slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, at) => sum + v * [.2126, .7152, .0722][at], 0);
  const behind = (one) => { for (; one; one = one.parentElement) {
    const color = parse(getComputedStyle(one).backgroundColor);
    if (color.length < 4 || color[3] > 0) return color;
  } return [255, 255, 255]; };
  const bad = [];
  for (const one of document.querySelectorAll("body *")) {
    const said = [...one.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!said || !one.checkVisibility() || one.disabled || one.closest(".hidden")) continue;
    const pair = [parse(getComputedStyle(one).color), behind(one)].map(light).sort((a, b) => b - a);
    const ratio = (pair[0] + .05) / (pair[1] + .05);
    if (ratio < 4.5) bad.push([one.outerHTML.slice(0, 80), ratio]);
  }
  return bad;
}"""
NAMELESS = """() => [...document.querySelectorAll("button, input, textarea, a, [role=region], aside, section, meter")]
  .filter((one) => !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length))
  .map((one) => one.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        # Containers have no user namespaces for Chromium's own sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page that notes what went wrong in it, and whom it asked."""

    def __init__(self, context: Any, url: str) -> None:
        self.page = context.new_page()
        self.wrong: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.on("request", lambda request: self.asked.append((request.method, request.url)))
        self.page.on("dialog", lambda dialog: self.wrong.append(f"a dialog: {dialog.message}"))
        self.page.goto(url)
        self.page.wait_for_selector("#model:not(:empty)")

    def until(self, expression: str, seconds: float = 30) -> None:
        """By looking again: playwright's own waiting evaluates in the page, which the policy forbids."""
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"it did not come to pass: {expression}"
            self.page.wait_for_timeout(20)

    def settings(self, **values: Any) -> None:
        self.page.keyboard.press("Alt+Comma")
        for name, value in values.items():
            self.page.fill(f"#set-{name}", str(value))
        self.page.click("text=Keep settings")
        self.until("location.hash.length > 1")
        self.until("document.getElementById('said').textContent === 'Settings kept'")
        self.page.click("[aria-label='Close the panel']")

    def say(self, text: str, answers: int | None = None) -> str:
        count = self.answers() + 1 if answers is None else answers
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")
        self.ended(count)
        return self.last()

    def answers(self) -> int:
        return int(self.page.locator("#pane article.assistant").count())

    def ended(self, count: int) -> None:
        self.until(
            "(() => { const all = [...document.querySelectorAll('#pane article.assistant')];"
            f" return all.length === {count} && all.every((one) => one.getAttribute('aria-busy') === 'false'); }})()"
        )

    def last(self) -> str:
        return str(self.page.locator("#pane article.assistant .body").last.text_content()).strip()

    def act(self, name: str) -> None:
        self.page.locator(f"#pane [aria-label='{name}']").last.click()


@pytest.fixture
def visit(browser: Any, real: Running) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    visit = Visit(context, real.url)
    yield visit
    assert visit.wrong == []
    assert {re.sub(r"^(https?://[^/]+).*", r"\1", url) for _, url in visit.asked if not url.startswith("blob:")} == {
        real.url
    }
    context.close()


def test_a_conversation_is_a_tree_and_walking_it_computes_nothing(visit: Visit) -> None:
    page = visit.page
    visit.settings(max_tokens=12, temperature=0)
    first = visit.say("Name a river.")
    page.locator("#pane [aria-label='Say this otherwise, in a new branch']").click()
    page.fill("form.edit textarea", "Name a mountain.")
    page.press("form.edit textarea", "Enter")
    visit.until("document.querySelector('#pane .user .body')?.innerText.includes('mountain')")
    visit.ended(1)
    second = visit.last()
    assert second != first
    before = len(visit.asked)
    visit.act("The branch before")
    assert visit.last() == first
    page.keyboard.press("Alt+t")
    page.locator("#panel .map button.assistant").last.click()
    assert visit.last() == second
    assert [method for method, _ in visit.asked[before:] if method != "GET"] == []
    visit.act("Another answer, in a new branch")
    page.wait_for_selector("#panel .map li:nth-child(2) .map button.assistant >> nth=1")
    visit.ended(1)
    page.keyboard.press("Alt+z")
    assert visit.answers() == 0
    assert page.input_value("#text") == "Name a mountain."


def test_two_branches_stand_side_by_side_and_go_on_together(visit: Visit) -> None:
    visit.settings(max_tokens=10, temperature=0)
    visit.say("Name a river.")
    visit.act("Another answer, in a new branch")
    visit.page.wait_for_selector("#pane [aria-label='The next branch']")
    visit.ended(1)
    visit.act("Show the next branch beside this one")
    assert visit.page.locator("#other article").count() == 2
    visit.say("And another one.", 2)
    visit.until("document.querySelectorAll('#other article[aria-busy=false]').length === 4")
    both = [visit.page.locator(f"#{pane} article.assistant .body").last.inner_text() for pane in ("pane", "other")]
    assert both[0] == both[1], "the same was said in both, greedily"
    visit.page.keyboard.press("Escape")
    assert not visit.page.is_visible("#other")


def test_an_answer_is_stopped_continued_and_lives_through_a_reload(visit: Visit) -> None:
    page = visit.page
    visit.settings(max_tokens=400)
    page.fill("#text", "Write a long story about a ship.")
    page.press("#text", "Enter")
    visit.until("document.querySelector('#pane article.assistant')?.innerText.length > 60")
    page.reload()
    page.wait_for_selector("#pane article.assistant[aria-busy=true]")
    page.keyboard.press("Escape")
    visit.ended(1)
    stopped = visit.last()
    assert len(stopped) > 60
    visit.act("Continue this answer")
    visit.until(f"document.querySelector('#pane article.assistant .body').innerText.length > {len(stopped) + 40}")
    page.locator("#stop").click()
    visit.ended(1)
    assert visit.last()[:60] == stopped[:60]


def test_the_state_and_the_tokens_are_shown_and_another_token_forks(visit: Visit) -> None:
    page = visit.page
    visit.settings(max_tokens=10, temperature=0)
    first = visit.say("Name a river.")
    page.keyboard.press("Alt+s")
    page.wait_for_selector("#panel dt:text-is('attention')")
    assert "Would be reused" in page.inner_text("#panel")
    visit.act("The tokens of this answer and their alternatives")
    page.locator("#panel .tokens button").nth(2).click()
    page.locator("#panel .choices button:enabled").first.click()
    page.wait_for_selector("#pane [aria-label='The next branch']")
    visit.ended(1)
    assert visit.last() != first
    visit.act("The branch before")
    assert visit.last() == first


def test_a_branch_is_saved_and_loaded_and_exported(visit: Visit, tmp_path: Path) -> None:
    page = visit.page
    visit.settings(max_tokens=8, temperature=0)
    first = visit.say("Name a river.")
    for name in ("Save this branch with its state", "Export this branch as Markdown", "Export the tree as JSON"):
        if not page.is_visible("#panel"):
            page.keyboard.press("Alt+s")
        with page.expect_download() as download:
            page.click(f"text={name}")
        download.value.save_as(tmp_path / download.value.suggested_filename)
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors", ".md", ".json"}
    here = page.url
    page.set_input_files("#load", next(tmp_path.glob("*.safetensors")))
    visit.until(f"location.href !== '{here}'")
    visit.ended(1)
    assert visit.last() == first
    assert first.strip() in next(tmp_path.glob("*.md")).read_text(encoding="utf-8")


def test_prompts_that_are_markup_do_nothing(visit: Visit) -> None:
    visit.settings(max_tokens=2)
    text = (
        "<script>alert(1)</script><img src=x onerror=alert(2)> [a](javascript:alert(3)) ![b](http://example.com/b.png)"
    )
    visit.say(text)
    assert "<script>" in visit.page.inner_text("#pane article.user .body")
    assert visit.page.locator("#pane img, #pane script, #pane a[href^=javascript]").count() == 0
    visit.page.keyboard.press("Alt+t")
    visit.page.wait_for_selector("#panel .map button")
    assert visit.page.locator("#panel img, #list img").count() == 0


def test_two_tabs_see_one_conversation(visit: Visit, real: Running) -> None:
    visit.settings(max_tokens=8)
    other = Visit(visit.page.context, visit.page.url)
    said = visit.say("Name a river.")
    other.ended(1)
    assert other.last() == said
    again = other.say("And a lake.")
    visit.ended(2)
    assert visit.last() == again
    assert other.wrong == []


def test_conversations_are_found_renamed_and_deleted_by_keys(visit: Visit) -> None:
    page = visit.page
    visit.settings(max_tokens=2)
    visit.say("A word about walruses.")
    page.locator("#rename").press("Enter")
    page.fill("#dialog-input", "Tusks")
    page.press("#dialog-input", "Enter")
    page.wait_for_selector("h1:text-is('Tusks')")
    page.keyboard.press("Alt+k")
    page.keyboard.type("walruses")
    visit.until("document.querySelectorAll('#list .open').length === 1")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == "Tusks"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    visit.until("document.querySelectorAll('#list .open').length === 0")
    assert page.locator("#pane article").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_control_has_a_name_and_every_text_contrast_at_every_size(visit: Visit, scheme: str) -> None:
    page = visit.page
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    visit.settings(max_tokens=24)
    visit.say("Write `hello` in Python, in a code block.\n\n```python\ndef f(): return 'x'  # y\n```\n> quoted")
    for panel in ("Alt+t", "Alt+s", "Alt+Comma"):
        page.keyboard.press(panel)
        page.wait_for_selector("#panel h2")
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate(NAMELESS) == []
    for width in (360, 800, 1600):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 360, "height": 740})
    page.click("#side-open")
    assert page.evaluate(CONTRAST) == []


def test_a_server_that_ends_and_comes_back_loses_nothing(
    browser: Any, tiny_model: lmstate.Model, tmp_path: Path
) -> None:
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = Settings("tiny", port=port, folder=tmp_path)
    context = browser.new_context()
    with Engine(tiny_model, rows=2) as engine:
        with running(engine, settings) as server:
            visit = Visit(context, server.url)
            visit.settings(max_tokens=1500)
            visit.page.fill("#text", "Hello")
            visit.page.press("#text", "Enter")
            visit.page.wait_for_selector("#pane article.assistant[aria-busy=true] .body div")
        visit.page.wait_for_selector("#connection:not([hidden])")
        visit.page.fill("#text", "Not lost")
        with running(engine, settings):
            wait_until(lambda: not visit.page.is_visible("#connection") or visit.page.wait_for_timeout(50))
            visit.ended(1)
            assert visit.last().strip()
            assert visit.page.input_value("#text") == "Not lost"
            visit.page.reload()
            visit.ended(1)
            assert visit.page.input_value("#text") == "Not lost"
    context.close()


def test_a_server_with_keys_is_asked_with_one(browser: Any, tiny_model: lmstate.Model) -> None:
    context = browser.new_context()
    with Engine(tiny_model, rows=1) as engine, running(engine, Settings("tiny", port=0, api_keys=("k",))) as server:
        page = context.new_page()
        page.goto(server.url)
        for key in ("wrong", "k"):
            page.wait_for_selector("#dialog[open]")
            page.fill("#dialog-input", key)
            page.press("#dialog-input", "Enter")
        page.wait_for_selector("#model:not(:empty)")
        assert not page.is_visible("#problem")
    context.close()
