"""The page in Chromium, against a server with SmolLM2: what a person does with it."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from socket import SO_REUSEADDR, SOL_SOCKET, socket
from typing import Any

import pytest

import lmstate
from lmstate.cluster.serving import FrontFiles
from lmstate.engine import Engine
from lmstate.engine.tiers.folder import RECORDS
from lmstate.engine.tiers.sqlite_records import inflate
from lmstate.serve import Settings
from lmstate.serve.conversations import keeper
from tests.cluster.helpers import fleet
from tests.serve.browser import Visit, needs_chromium
from tests.serve.running import Running, running, save_tiny, saying, standing_still
from tests.serve.test_behavior import command, held
from tests.serve.test_page import ROOT, look, say
from tests.waiting import GUARD, wait_until

pytestmark = needs_chromium

MESSAGES = "select data from records where kind like 'page messages of %'"


# A server whose answers are not over before a browser on a crowded machine has looked.
SLOW = (
    sys.executable,
    "-c",
    "import time; from lmstate.engine.scheduler import Scheduler as S; step = S.step;"
    " S.step = lambda self: (time.sleep(0.05), step(self))[1]; from lmstate.cli import main; main()",
)


@pytest.fixture
def enter() -> Iterator[Callable[[Any], Any]]:
    """Enters a context until the end of the test."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture
def visit(browser: Any, real: Running) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    visit = Visit(context, real.url)
    yield visit
    visit.well(real.url)
    context.close()


def test_a_conversation_is_a_tree_and_walking_it_computes_nothing(visit: Visit) -> None:
    page = visit.page
    visit.settings(max_tokens=12, temperature=0)
    first = visit.say("Name a river.")
    page.locator("#pane [aria-label='Edit this message, in a new branch']").click()
    page.fill("form.edit textarea", "Name a mountain.")
    visit.branch(lambda: page.press("form.edit textarea", "Enter"))
    visit.until("document.querySelector('#pane .user .body')?.innerText.includes('mountain')")
    second = visit.last()
    assert second != first
    before = len(visit.asked)
    visit.act("The branch before")
    assert visit.last() == first
    page.keyboard.press("Alt+t")
    page.locator("#panel .map button.assistant").last.click()
    assert visit.last() == second
    assert [method for method, _ in visit.asked[before:] if method != "GET"] == []
    visit.branch(lambda: visit.act("Regenerate this answer, in a new branch"))
    page.wait_for_selector("#panel .map li:nth-child(2) .map button.assistant >> nth=1")
    page.keyboard.press("Alt+z")
    assert visit.answers() == 0
    assert page.input_value("#text") == "Name a mountain."


def test_two_branches_stand_side_by_side_and_go_on_together(visit: Visit) -> None:
    visit.settings(max_tokens=10, temperature=0)
    visit.say("Name a river.")
    visit.branch(lambda: visit.act("Regenerate this answer, in a new branch"))
    visit.act("Show the next branch beside this one")
    assert visit.page.locator("#other article").count() == 2
    visit.say("And another one.", 2)
    visit.until("document.querySelectorAll('#other article[aria-busy=false]').length === 4")
    both = [visit.page.locator(f"#{pane} article.assistant .body").last.inner_text() for pane in ("pane", "other")]
    assert both[0] == both[1], "the same was said in both, greedily"
    visit.page.keyboard.press("Escape")
    assert not visit.page.is_visible("#other")


def test_an_answer_is_stopped_continued_and_lives_through_a_reload(visit: Visit, real: Running) -> None:
    page = visit.page
    visit.settings(max_tokens=400, temperature=0)
    wait_until(lambda: not real.server.service.running)
    with standing_still(real.engine, 60):
        page.fill("#text", "Write a long story about a ship.")
        page.press("#text", "Enter")
        visit.until("document.querySelector('#pane article.assistant')?.innerText.length > 80")
        page.reload()
        page.wait_for_selector("#pane article.assistant[aria-busy=true]")
        page.keyboard.press("Escape")
        visit.ended(1)
    stopped = visit.last()
    assert len(stopped) > 60
    with standing_still(real.engine, 60):
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
    told = page.inner_text("#panel")
    for line in ("Would be reused", "Rewind window", "Shared with other texts"):
        assert line in told
    assert "is the first that no stored prefix has" in told or "All of it was stored" in told
    assert page.locator("#panel .prefixes li.on").count() > 0
    assert "memory" in page.locator("#panel .prefixes li.on").first.inner_text()
    visit.act("The tokens of this answer and their alternatives")
    page.locator("#panel .tokens button").nth(2).click()
    visit.branch(lambda: page.locator("#panel .choices button:enabled").first.click())
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


def test_an_empty_page_has_examples_and_a_cut_answer_says_so(visit: Visit) -> None:
    page = visit.page
    example = page.locator(".welcome li button").first
    text = example.inner_text()
    example.click()
    assert page.input_value("#text") == text and page.evaluate("document.activeElement.id") == "text"
    visit.settings(max_tokens=2)
    visit.say(text)
    assert page.locator(".welcome").count() == 0
    assert page.inner_text("article.user h2") == "You" and page.inner_text("article.assistant h2") == "smollm2"
    assert "token limit" in page.inner_text("article.assistant .cut")


def test_code_shows_its_language_and_is_copied_from_a_head_that_stays(visit: Visit, real: Running) -> None:
    page = visit.page
    visit.settings(max_tokens=600)
    lines = "\n".join(f"x{line} = {line}" for line in range(60))
    with saying(real, f"So:\n\n```python\n{lines}\n```\n"):
        visit.say("Code, please.")
    assert page.inner_text(".code-head span") == "python"
    page.evaluate("document.getElementById('pane').scrollTop += 300")
    pane, head = (page.locator(one).bounding_box() for one in ("#pane", ".code-head"))
    assert pane["y"] - 1 <= head["y"] <= pane["y"] + 1, "it stays at the top while the code scrolls"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("[aria-label='Copy code']")
    visit.until("document.querySelector('[aria-label=\"Copy code\"]').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()").strip() == lines


def test_formulas_are_drawn_and_the_text_around_them_is_not(visit: Visit, real: Running) -> None:
    page = visit.page
    visit.settings(max_tokens=600)
    wide = " + ".join(f"x_{{{at}}}" for at in range(80))
    formula = f"$$\n\\frac{{a}}{{b}}\n= {wide}\n$$"
    with saying(real, f"Costs $5, and $x^2$ is\n\n{formula}\n\nso \\(<img src=x onerror=alert(1)>\\) $\\frac{{$."):
        visit.say("A formula, please.")
    assert page.locator(".assistant math").count() == 3 and page.locator(".assistant math[display=block]").count() == 1
    shown = page.inner_text(".assistant .body")
    assert "Costs $5, and " in shown and "$\\frac{$" in shown and "$$" not in shown
    over, under = (page.locator(f".assistant mfrac > :nth-child({one})").bounding_box() for one in (1, 2))
    assert over["y"] + over["height"] <= under["y"] + 1, "the browser draws a fraction"
    square = page.locator(".assistant msup > mn").first.bounding_box()
    assert square["height"] < page.locator(".assistant msup > mi").first.bounding_box()["height"] + 5
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a wide formula scrolls by itself"


def begun(visit: Visit, server: Running, **settings: Any) -> str:
    """The address of a conversation without messages, which the page shows."""
    with server.client() as client:
        url = f"{server.url}/#{client.post(ROOT, json={'settings': settings}).json()['id']}"
    visit.page.goto(url)
    visit.page.reload()
    return url


def test_settings_are_those_of_new_conversations(visit: Visit, real: Running) -> None:
    page = visit.page
    visit.settings(max_tokens=3, temperature=0)
    assert page.url.rstrip("/") == real.url and page.locator("#list [aria-current]").count() == 0
    for _ in range(2):
        visit.say("Name a river.")
        assert page.inner_text("article.assistant .cut") != ""
        page.keyboard.press("Alt+n")
        visit.until("document.querySelectorAll('#pane article').length === 0")
    page.keyboard.press("Alt+Comma")
    page.wait_for_selector("#panel h2:text-is('Settings of new conversations')")
    assert page.input_value("#set-max_tokens") == "3"


def test_two_tabs_see_one_conversation(visit: Visit, real: Running) -> None:
    url = begun(visit, real, max_tokens=8)
    other = Visit(visit.page.context, url)
    said = visit.say("Name a river.")
    other.ended(1)
    assert other.last() == said
    again = other.say("And a lake.")
    visit.ended(2)
    assert visit.last() == again
    assert other.wrong == []


def test_two_tabs_see_one_answer_grow_and_either_stops_it(visit: Visit, real: Running) -> None:
    url = begun(visit, real, max_tokens=400, temperature=0)
    other = Visit(visit.page.context, url)
    wait_until(lambda: not real.server.service.running)
    with standing_still(real.engine, 40):
        visit.page.fill("#text", "Write a long story about a ship.")
        visit.page.press("#text", "Enter")
        for one in (visit, other):
            one.until("document.querySelector('#pane article.assistant .body')?.innerText.length > 40")
        other.page.click("#stop")
        for one in (visit, other):
            one.ended(1)
    assert visit.last() == other.last()
    assert not visit.page.is_visible("#stop") and other.wrong == []
    with standing_still(real.engine, 40):
        other.act("Regenerate this answer, in a new branch")
        visit.page.wait_for_selector("#pane [aria-label='The next branch']")
        visit.page.keyboard.press("Escape")
        other.page.click("#stop")
        other.ended(1)


def test_conversations_are_found_renamed_and_deleted_by_keys(visit: Visit) -> None:
    page = visit.page
    visit.settings(max_tokens=2)
    visit.say("A word about walruses.")
    page.locator("#rename").press("Enter")
    page.fill("#dialog-input", "Tusks")
    page.press("#dialog-input", "Enter")
    page.wait_for_selector("h1:text-is('Tusks')")
    page.keyboard.press("Alt+k")
    # The list as it was is marked: what is found takes its place, and nothing else is asked for after that.
    page.evaluate("document.querySelectorAll('#list .open').forEach((one) => { one.dataset.before = true; })")
    page.keyboard.insert_text("walruses")
    visit.until(
        "(() => { const all = [...document.querySelectorAll('#list .open')];"
        " return all.length === 1 && all[0].textContent === 'Tusks' && !all[0].dataset.before; })()"
    )
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == "Tusks"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    visit.until("document.querySelectorAll('#list .open').length === 0")
    assert page.locator("#pane article").count() == 0


def test_what_is_refused_says_what_to_do_and_keeps_the_text(browser: Any, tiny_model: lmstate.Model) -> None:
    context = browser.new_context()
    settings = Settings("tiny", port=0)
    with Engine(tiny_model, rows=1, queue=1) as engine, running(engine, settings) as server, server.client() as client:
        visit = Visit(context, server.url)
        visit.settings(max_tokens=4)
        visit.page.fill("#text", "x" * 3000)
        visit.page.press("#text", "Enter")
        visit.page.wait_for_selector("#problem:not([hidden])")
        assert "begin another conversation" in visit.page.inner_text("#problem")
        assert visit.page.input_value("#text") == "x" * 3000 and visit.answers() == 0
        visit.until("location.hash === ''")
        assert client.get(ROOT).json()["data"] == [], "no empty conversation is left"
        visit.page.fill("#text", "Hello")
        go, body = held(engine), {"text": "Hello", "parent": None}
        other = client.post("/page/conversations", json={}).json()["id"]
        answer = client.post(f"/page/conversations/{other}/say", json=body).json()["answer"]  # and the queue is full
        visit.page.press("#text", "Enter")
        visit.until("document.getElementById('problem').textContent.includes('Your text is kept here')")
        assert visit.page.input_value("#text") == "Hello" and visit.answers() == 0
        client.post(f"/page/conversations/{other}/{answer}/stop")
        go.set()
        wait_until(lambda: not server.server.service.running)
        visit.page.press("#text", "Enter")
        visit.ended(1)
        assert not visit.page.is_visible("#problem")
    context.close()


def test_the_settings_show_the_replicas(browser: Any, tiny_model: lmstate.Model) -> None:
    """The facts of `lmstate cluster status`, of one engine and of a front."""
    context = browser.new_context()
    settings = Settings("tiny", port=0)
    with (
        fleet(Engine(tiny_model), Engine(tiny_model), files=FrontFiles(tiny_model.tokenizer)) as (cluster, _),
        running(cluster.front, settings) as server,
    ):
        page = Visit(context, server.url).page
        page.keyboard.press("Alt+Comma")
        page.wait_for_selector("text=The replicas")
        shown = page.inner_text("#panel")
        assert shown.count("0 waiting, 0 reading, 0 answering") == 2 and shown.count("none yet") == 2
    context.close()


@contextmanager
def own_port() -> Iterator[int]:
    """A port that is nobody else's until the end: bound, so that the system gives it to none, and not listened on."""
    with socket() as bound:
        bound.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


def test_a_server_that_ends_and_comes_back_loses_nothing(
    browser: Any, tiny_model: lmstate.Model, tmp_path: Path
) -> None:
    context = browser.new_context()
    with Engine(tiny_model, rows=2) as engine, own_port() as port:
        settings = Settings("tiny", port=port, folder=tmp_path)
        with running(engine, settings) as server, standing_still(engine):
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


def test_the_page_says_that_another_server_changed_the_conversation(
    browser: Any,
    tiny_model: lmstate.Model,
    tmp_path: Path,
    enter: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "LOOK_SECONDS", 0.05)
    engines = [enter(Engine(tiny_model, store=tmp_path)) for _ in range(2)]
    here, there = (enter(running(engine, Settings("tiny", port=0))) for engine in engines)
    context = browser.new_context()
    visit = Visit(context, here.url)
    visit.settings(max_tokens=4)
    visit.say("Hello")
    assert not visit.page.is_visible("#adopted")
    with there.client() as client:
        (id,) = (one["id"] for one in client.get(ROOT).json()["data"])
        (_, answer) = look(client, id)["nodes"]
        say(client, id, "Said elsewhere", answer["id"])
    visit.page.wait_for_selector("#adopted:not([hidden])")
    assert visit.page.inner_text("#adopted") == "Another server changed this conversation. This is its newest state."
    visit.page.wait_for_selector("text=Said elsewhere")
    context.close()


def test_an_answer_in_a_server_that_is_killed_goes_on_in_the_next(
    browser: Any, tmp_path: Path, enter: Callable[[Any], Any]
) -> None:
    model, context = save_tiny(tmp_path / "model"), browser.new_context()
    port = enter(own_port())
    options = ("--store", str(tmp_path / "store"), "--port", str(port), "--draft", "none")

    def saved() -> bool:
        """Whether a part of the answer is in the store: it is saved each second."""
        with closing(sqlite3.connect(tmp_path / "store" / RECORDS)) as database:
            return any(json.loads(inflate(data, 2**20))["node"]["text"] for (data,) in database.execute(MESSAGES))

    with command(model, *options, main=SLOW) as (process, url):
        visit = Visit(context, url)
        visit.settings(max_tokens=1800)
        visit.page.fill("#text", "Hello")
        visit.page.press("#text", "Enter")
        visit.page.wait_for_selector("#pane article.assistant[aria-busy=true] .body div")
        wait_until(saved)
        process.kill()
    visit.page.wait_for_selector("#connection:not([hidden])")
    visit.page.fill("#text", "Not lost")
    with command(model, *options):
        visit.until("document.getElementById('connection').hidden")
        visit.ended(1)
        before = visit.last()
        assert before and visit.page.input_value("#text") == "Not lost"
        visit.act("Continue this answer")  # it may have its end before anybody looks
        visit.until(
            f"document.querySelector('#pane article.assistant .body').textContent.trim().length > {len(before)}"
        )
        visit.ended(1)
    context.close()


def test_a_server_with_keys_is_asked_with_one(browser: Any, tiny_model: lmstate.Model) -> None:
    context = browser.new_context()
    with Engine(tiny_model, rows=1) as engine, running(engine, Settings("tiny", port=0, api_keys=("k",))) as server:
        page = context.new_page()
        page.set_default_timeout(1000 * GUARD)
        page.goto(server.url)
        for key in ("wrong", "k"):
            page.wait_for_selector("#dialog[open]")
            page.fill("#dialog-input", key)
            page.press("#dialog-input", "Enter")
        page.wait_for_selector("#model:not(:empty)")
        assert not page.is_visible("#problem")
    context.close()
