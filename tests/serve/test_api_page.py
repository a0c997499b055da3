"""`/docs` in Chromium: every path with its fields, and a form that asks the server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from lmstate.serve.app import PATHS
from tests.serve.browser import needs_chromium
from tests.serve.running import Running
from tests.serve.test_page_accessibility import SIZES, findings
from tests.waiting import GUARD, wait_until

pytestmark = needs_chromium


@pytest.fixture
def page(browser: Any, tiny: Running) -> Iterator[Any]:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(1000 * GUARD)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{tiny.url}/docs")
    page.wait_for_selector(".operation")
    yield page
    assert not wrong
    context.close()


def test_a_request_is_tried_on_the_page(page: Any, tiny: Running) -> None:
    assert page.locator(".operation").count() == len(PATHS)
    shown = page.locator(".operation", has=page.get_by_text("/v1/completions", exact=True))
    shown.locator("summary").first.click()
    assert "prompt (required)" in shown.inner_text()
    body = {"prompt": "Once", "max_tokens": 5, "temperature": 0}

    def sent(text: str, status: int) -> Any:
        shown.locator("textarea").fill(text)
        shown.get_by_role("button", name="Send").click()
        told = shown.locator("[role=status]")
        wait_until(lambda: re.match(f"{status} .* s$", told.inner_text()) is not None)
        return json.loads(shown.locator("pre").inner_text())

    with tiny.client() as client:
        expected = client.post("/v1/completions", json=body).json()["choices"]
    assert sent(json.dumps(body), 200)["choices"] == expected
    assert "prompt" in sent("{}", 400)["error"]["message"]


@pytest.mark.parametrize("size", SIZES)
def test_nothing_serious_is_found(page: Any, size: str) -> None:
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.get_by_text("/v1/chat/completions", exact=True).click()
    assert findings(page) == []
