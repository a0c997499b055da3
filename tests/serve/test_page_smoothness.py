"""What the page does for each piece of a growing answer does not grow with the conversation, nor with the answer."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest

from lmstate.serve.conversations.keeper import Keeper
from lmstate.serve.conversations.markdown import GrowingMarkdown, render_blocks
from lmstate.serve.conversations.tree import MessageNode
from tests.serve.browser import Visit, needs_chromium
from tests.serve.running import Running

pytestmark = needs_chromium

MESSAGES, RATE, SECONDS = 500, 200, 5.0  # tokens a second
PARAGRAPH = "Some **words** of `an answer` that goes on, and on, with a [link](https://example.com) here and there. "
CODE = "```python\n" + "def f(x): return x + 1.5  # and so on\n" * 12 + "```\n\n"
ANSWER = f"# A heading\n\n{PARAGRAPH * 3}\n\n{CODE}- one\n- two\n- three\n\n> quoted\n\n| a | b |\n|-|-|\n| 1 | 2 |\n\n"

# For each round of changes in the page: which messages and blocks they were in, and how many nodes they made.
WATCH = """() => {
  const seen = globalThis.seen = {rounds: [], outside: [], long: [], frames: []};
  new PerformanceObserver((list) => seen.long.push(...list.getEntries().map((one) => one.duration)))
    .observe({type: "longtask"});
  let before = performance.now();
  const frame = (now) => { seen.frames.push(now - before); before = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  new MutationObserver((records) => {
    const count = (node) => node.nodeType === 1 ? 1 + node.querySelectorAll("*").length : 1;
    const last = [...document.querySelectorAll("#pane article")].at(-1);
    const body = last.querySelector(".body"), round = {made: 0, blocks: new Set(), of: body.children.length};
    for (const {target, addedNodes} of records) {
      const element = target.nodeType === 1 ? target : target.parentElement;
      if (!last.contains(element)) { seen.outside.push(element?.outerHTML.slice(0, 100) ?? "taken out"); continue; }
      for (const node of addedNodes) round.made += count(node);
      for (const node of [element, ...addedNodes]) {
        const at = [...body.children].findIndex((block) => block.contains(node));
        if (at >= 0) round.blocks.add(at);
      }
    }
    seen.rounds.push({...round, blocks: [...round.blocks]});
  }).observe(document.body, {subtree: true, childList: true, characterData: true, attributes: true});
}"""


async def fill(keeper: Keeper) -> tuple[str, MessageNode]:
    """A conversation of many messages; its last answer, which is being written."""
    live = await keeper.create("Long", {})
    nodes: list[MessageNode] = []
    for at in range(MESSAGES):
        role = "assistant" if at % 2 else "user"
        nodes.append(MessageNode(f"n{at}", nodes[-1].id if nodes else None, role, ANSWER if at % 2 else "And then?"))
    nodes[-1].status, nodes[-1].text = "running", ""
    live.conversation.nodes = {node.id: node for node in nodes}
    live.touch(*nodes)
    return live.conversation.id, nodes[-1]


async def write(keeper: Keeper, id: str, answer: MessageNode) -> int:
    """Have the answer grow as one that a model writes does, for some seconds; the number of tokens."""
    live, growing = await keeper.open(id), GrowingMarkdown()
    words = (ANSWER * 50).split(" ")
    began, said = time.monotonic(), 0
    while said < RATE * SECONDS:
        now = min(time.monotonic() - began, SECONDS)
        text = "".join(f"{word} " for word in words[said : int(now * RATE)])
        said = int(now * RATE)
        answer.text += text
        if (first := growing.push(text)) is not None:
            live.grew(answer, growing.blocks, first)
        await asyncio.sleep(1 / RATE)
    growing.push("", end=True)
    live.grew(answer, growing.blocks)
    return said


def test_a_growing_answer_touches_its_last_block_alone(browser: Any, tiny: Running) -> None:
    keeper: Keeper = tiny.server.pool.models[0].attached  # type: ignore[union-attr]
    loop = tiny.server.servers[0].get_loop()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(600)

    id, answer = run(fill(keeper))
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    visit = Visit(context, f"{tiny.url}/#{id}")
    visit.until(f"document.querySelectorAll('#pane article').length === {MESSAGES}")
    visit.page.wait_for_selector("#list .open")
    visit.page.evaluate(WATCH)
    writing = asyncio.run_coroutine_threadsafe(write(keeper, id, answer), loop)
    while not writing.done():
        visit.page.wait_for_timeout(100)
    tokens = writing.result()
    last = "[...document.querySelectorAll('#pane article')].at(-1).querySelector('.body')"
    visit.until(f"{last}.children.length === {len(render_blocks(answer.text))}")
    seen = visit.page.evaluate("globalThis.seen")
    shown = visit.page.evaluate(
        "[...document.querySelectorAll('#pane article .body')]"
        ".filter((one) => one.checkVisibility({contentVisibilityAuto: true})).length"
    )
    rounds = [one for one in seen["rounds"] if one["blocks"]]
    print(
        f"{tokens} tokens, {len(rounds)} rounds of changes, {sum(one['made'] for one in rounds)} nodes made; "
        f"longest frame {max(seen['frames']):.0f} ms, long tasks {[round(one) for one in seen['long']]}"
    )
    assert tokens == RATE * SECONDS and len(rounds) > 5
    assert seen["outside"] == []
    # A round may end a block and begin others; those before the last one of the round before stay as they are.
    for before, now in pairwise(rounds):
        assert min(now["blocks"]) >= before["of"] - 1
    written = visit.page.evaluate("[...document.querySelectorAll('#pane article')].at(-1).querySelectorAll('*').length")
    assert sum(one["made"] for one in rounds) < 4 * written, "each node is made about once"
    assert shown < 20, "messages out of sight are not laid out"
    visit.well(tiny.url)
    context.close()
    assert run(keeper.open(id)).conversation.id == id
    run(keeper.delete(run(keeper.open(id))))


@pytest.mark.parametrize("unit", ["line", "word"])
def test_a_selection_in_a_growing_block_stays(browser: Any, tiny: Running, unit: str) -> None:
    context = browser.new_context()
    visit = Visit(context, tiny.url)
    more = {"line": "<p>one</p><p>two</p>", "word": "<p>one and two</p>"}[unit]
    kept = visit.page.evaluate(
        """async (more) => {
          const { showHtml } = await import("/page/files/dom.js");
          const block = document.querySelector("#pane");
          showHtml(block, "<p>one</p>");
          getSelection().selectAllChildren(block.querySelector("p"));
          showHtml(block, more);
          return [String(getSelection()), block.innerHTML];
        }""",
        more,
    )
    assert kept == ["one" if unit == "line" else kept[0], more]
    assert kept[0].startswith("one")
    context.close()
