"""axe-core finds nothing serious on any view of the page, narrow and wide, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.browser import Visit, needs_chromium
from tests.serve.running import Running

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
pytestmark = needs_chromium

MARKDOWN = (
    "# A heading\n\nWrite `hello` in **Python**, see [a page](https://example.com).\n\n```python\n"
    "def f(): return 'x' + 1.5  # y\n```\n> quoted\n\n| a | b |\n|-|-|\n| 1 | 2 |\n\n- one\n- two"
)
SIZES = {"phone": (360, 740), "laptop": (1280, 800)}


@pytest.fixture
def visit(browser: Any, tiny: Running) -> Iterator[Visit]:
    context = browser.new_context()
    visit = Visit(context, tiny.url)
    yield visit
    visit.well(tiny.url)
    context.close()


def findings(page: Any) -> list[str]:
    """What axe-core holds to be serious or critical, and what it finds too wide for the window."""
    response = axe.Axe().run(page).response
    assert {"color-contrast", "button-name"} <= {one["id"] for one in response["passes"] + response["violations"]}
    found = response["violations"]
    serious = [
        f"{one['impact']} {one['id']}: {node['html'][:120]} {node['failureSummary']}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return [*serious, *([f"{wide} pixels too wide"] if wide > 0 else [])]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_serious_is_found_on_any_view(visit: Visit, scheme: str, size: str) -> None:
    page, (width, height) = visit.page, SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    found = {"empty": findings(page)}
    visit.settings(max_tokens=12, temperature=0)
    visit.say(MARKDOWN)
    found["chat"] = findings(page)
    visit.branch(lambda: visit.act("Regenerate this answer, in a new branch"))
    for name, key in {"tree": "Alt+t", "state": "Alt+s", "settings": "Alt+Comma"}.items():
        page.keyboard.press(key)
        page.wait_for_selector("#panel h2")
        found[name] = findings(page)
    page.keyboard.press("Alt+Comma")
    visit.act("The tokens of this answer and their alternatives")
    page.locator("#panel .tokens button").nth(2).click()
    page.wait_for_selector("#panel .choices button")
    found["tokens"] = findings(page)
    page.click("[aria-label='Close the panel']")
    visit.act("Show the next branch beside this one")
    page.wait_for_selector("#other article")
    found["compare"] = findings(page)
    visit.act("Edit this message, in a new branch")
    found["edit"] = findings(page)
    page.locator("#rename").click()
    page.wait_for_selector("#dialog[open]")
    found["dialog"] = findings(page)
    page.click("#dialog-no")
    if size == "phone":
        page.click("#side-open")
        found["side"] = findings(page)
    assert {name: one for name, one in found.items() if one} == {}
