"""Chromium for the tests of the page, and a visit to it that notes what goes wrong."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.waiting import GUARD

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        # Containers have no user namespaces for Chromium's own sandbox, and no microphone: a fake one beeps.
        options = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options, timeout=1000 * GUARD)
        yield browser
        browser.close()


class Visit:
    """A page that notes what went wrong in it, and whom it asked."""

    def __init__(self, context: Any, url: str) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(1000 * GUARD)
        self.wrong: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.on("request", lambda request: self.asked.append((request.method, request.url)))
        self.page.on("dialog", lambda dialog: self.wrong.append(f"a dialog: {dialog.message}"))
        self.page.goto(url)
        self.page.wait_for_selector("#model:not(:empty)")

    def until(self, expression: str, seconds: float = GUARD) -> None:
        """By looking again: playwright's own waiting evaluates in the page, which the policy forbids."""
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"it did not come to pass: {expression}; {self.page.inner_text('main')}"
            self.page.wait_for_timeout(20)

    def settings(self, **values: Any) -> None:
        self.page.keyboard.press("Alt+Comma")
        for name, value in values.items():
            self.page.fill(f"#set-{name}", str(value))
        self.page.click("text=Save settings")
        self.until("document.getElementById('said').textContent === 'Settings saved'")
        self.page.click("[aria-label='Close the panel']")

    def say(self, text: str, answers: int | None = None) -> str:
        count = self.answers() + 1 if answers is None else answers
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")
        self.ended(count)
        self.until("document.getElementById('text').value === ''")  # the page knows that it was said
        return self.last()

    def branch(self, act: Callable[[], None]) -> None:
        """Do what makes another answer in the place of the last one, and wait until that is shown and ended."""
        shown = "[...document.querySelectorAll('#pane article.assistant')].at(-1)"
        before, count = self.page.evaluate(f"{shown}.dataset.id"), self.answers()
        act()
        self.until(f"({shown}?.dataset.id ?? '{before}') !== '{before}'")
        self.ended(count)

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

    def well(self, url: str) -> None:
        """Nothing went wrong in the page, and it asked nobody but its own server."""
        assert self.wrong == []
        origins = {re.sub(r"^(https?://[^/]+).*", r"\1", asked) for _, asked in self.asked if asked[:5] != "blob:"}
        assert origins == {url}
