"""Pictures of the page, by Chromium, of a conversation with SmolLM2.

    python -m bench.screenshot docs/page.webp         the one of the README
    python -m bench.screenshot --all build/page       every view, at three sizes, light and dark, as PNG to look at

Chromium is the system's (`apt-get install chromium`), driven by playwright.
"""

from __future__ import annotations

import argparse
import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

from lmstate.engine import Engine
from lmstate.serve import Settings, make_server

SIZES = {"phone": (360, 740), "laptop": (1280, 800), "wide": (1920, 1080)}
PANELS = {"tree": "Alt+t", "state": "Alt+s", "settings": "Alt+Comma"}
ASKED = (
    "Name three rivers of Europe, each with a word on it.",
    "Write a short Python function that sorts them by length.",
    "Which of them is the longest?",
)
MOST = 100_000  # bytes of the README's picture


@contextmanager
def served(model: str) -> Iterator[str]:
    import lmstate

    with Engine(lmstate.load(model), rows=4) as engine:
        server = make_server(engine, Settings(model, port=0), close_engine=False)
        thread = Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
            sleep(0.01)
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            server.should_exit = True
            thread.join(30)


def until(page: Any, expression: str, seconds: float = 120) -> None:
    deadline = monotonic() + seconds
    while not page.evaluate(expression):
        if monotonic() > deadline:
            raise TimeoutError(f"the page did not come to this: {expression}")
        page.wait_for_timeout(30)


def ended(page: Any, answers: int) -> None:
    all_ended = ".every((one) => one.ariaBusy === 'false')"
    until(page, f"document.querySelectorAll('#pane article.assistant').length === {answers}")
    until(page, f"[...document.querySelectorAll('#pane article.assistant')]{all_ended}")


def talk(page: Any, url: str) -> None:
    """A conversation of three turns, the last of which has two branches."""
    page.goto(url)
    page.wait_for_selector("#model:not(:empty)")
    page.keyboard.press("Alt+Comma")
    for name, value in {"max_tokens": 120, "seed": 1, "system": "Answer briefly and clearly."}.items():
        page.fill(f"#set-{name}", str(value))
    page.click("text=Save settings")
    until(page, "document.getElementById('said').textContent === 'Settings saved'")
    page.click("[aria-label='Close the panel']")
    for count, text in enumerate(ASKED, 1):
        page.fill("#text", text)
        page.press("#text", "Enter")
        ended(page, count)
    page.locator("#pane [aria-label='Regenerate this answer, in a new branch']").last.click()
    page.wait_for_selector("#pane [aria-label='The next branch']")
    ended(page, len(ASKED))


def webp(page: Any, path: Path) -> None:
    """As small as is needed for `MOST` bytes."""
    session = page.context.new_cdp_session(page)
    for quality in (90, 80, 70, 60, 50, 40):
        data = session.send("Page.captureScreenshot", {"format": "webp", "quality": quality})["data"]
        if len(base64.b64decode(data)) <= MOST:
            break
    path.write_bytes(base64.b64decode(data))


def every_view(page: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)

            def shot(name: str, end: str = f"{size}-{scheme}.png") -> None:
                page.wait_for_timeout(120)
                page.screenshot(path=folder / f"{name}-{end}")

            shot("chat")
            for name, key in PANELS.items():
                page.keyboard.press(key)
                page.wait_for_selector("#panel h2")
                shot(name)
                page.click("[aria-label='Close the panel']")
            page.locator("#pane [aria-label^='The tokens of this answer']").last.click()
            page.locator("#panel .tokens button").nth(3).click()
            shot("tokens")
            page.click("[aria-label='Close the panel']")
            page.locator("#pane [aria-label^='Show the next branch']").last.click()
            shot("compare")
            page.locator("#text").press("Escape")
            if size == "phone":
                page.click("#side-open")
                shot("side")
                page.click("#side-close")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.screenshot", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="the README's picture, as WebP")
    parser.add_argument("--all", type=Path, help="a folder for pictures of every view")
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        parser.error("there is no chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with served(options.model) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        talk(page, url)
        if options.file is not None:
            page.keyboard.press("Alt+t")
            page.wait_for_selector("#panel .map")
            page.wait_for_timeout(200)
            webp(page, options.file)
            page.click("[aria-label='Close the panel']")
        if options.all is not None:
            every_view(page, options.all)
        browser.close()


if __name__ == "__main__":
    main()
