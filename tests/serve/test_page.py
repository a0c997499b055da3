"""The page's own API and files: a conversation is a tree, nothing in it is lost, and no text in it becomes markup."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import tomllib
from html import escape
from pathlib import Path, PurePosixPath
from time import perf_counter
from typing import Any

import httpx
import pytest

import lmstate
from lmstate.engine import Engine
from lmstate.engine.tiers.sqlite_records import SqliteRecords
from lmstate.serve import Settings
from lmstate.serve.conversations import keeper, markdown, writing
from lmstate.serve.conversations.branch_prompts import BranchPrompts
from lmstate.serve.conversations.live import Live
from lmstate.serve.conversations.markdown import GrowingMarkdown, render, render_blocks
from lmstate.serve.conversations.routes import changes
from lmstate.serve.conversations.store import ConversationStore
from lmstate.serve.conversations.tree import Conversation, MessageNode
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.owned_records import OwnedRecords
from tests.serve.running import Running, load_tiny, running, standing_still
from tests.waiting import wait_until

ROOT = "/page/conversations"
PAGE = Path(lmstate.__file__).parent / "serve" / "page"
HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "![x](https://example.com/a.png)",
    "<svg/onload=alert(1)>",
    '[x](https://e.com "a onmouseover=alert(1)")',
    "```html\n<script>alert(1)</script>\n```",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    '<a href="https://e.com" style="position:fixed">x</a>',
)


@pytest.fixture
def client(tiny: Running) -> Any:
    with tiny.client() as client:
        yield client
        for conversation in client.get(ROOT).json()["data"]:
            client.delete(f"{ROOT}/{conversation['id']}")


def create(client: httpx.Client, **settings: Any) -> str:
    answer = client.post(ROOT, json={"settings": {"max_tokens": 8, **settings}})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def look(client: httpx.Client, id: str) -> dict[str, Any]:
    """The whole conversation as a page that opens it is told."""
    with client.stream("GET", f"{ROOT}/{id}/events") as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                return json.loads(line[6:])
    raise AssertionError("the stream had no event")


def node(client: httpx.Client, id: str, name: str) -> dict[str, Any]:
    return next(one for one in look(client, id)["nodes"] if one["id"] == name)


def ended(client: httpx.Client, id: str, name: str) -> dict[str, Any]:
    wait_until(lambda: node(client, id, name)["status"] != "running")
    return node(client, id, name)


def say(client: httpx.Client, id: str, text: str | None, parent: str | None = None) -> dict[str, Any]:
    answer = client.post(f"{ROOT}/{id}/say", json={"text": text, "parent": parent})
    assert answer.status_code == 201, answer.text
    return ended(client, id, answer.json()["answer"])


def tokens(client: httpx.Client, id: str, name: str) -> list[dict[str, Any]]:
    return client.get(f"{ROOT}/{id}/{name}/tokens").json()["data"]


# ---- Markdown


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_a_script_a_style_or_a_request(text: str) -> None:
    for html in (render(text), "".join(render_blocks(text))):
        tags = re.findall(r"<[^>]*>", html)
        assert not any(re.match(r"</?(script|img|svg|iframe|style|form|input)", tag) for tag in tags), html
        assert not any(re.search(r"\s(on\w+|style|src)=", re.sub(r'"[^"]*"', '""', tag)) for tag in tags), html
        assert not any("javascript:" in tag or "data:" in tag for tag in tags), html


def test_code_is_highlighted_unless_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert '<span class="kn">import</span>' in render("```python\nimport os\n```")
    long = f"```autoit\n{' ' * (markdown.LONGEST_LINE + 1)}\n```"  # its lexer takes seconds for a few thousand blanks
    assert "span" not in render(long)
    monkeypatch.setattr(markdown, "HIGHLIGHT_SECONDS", 0.0)
    assert "span" not in render("```python\nimport os\n```")
    assert "import os" in render("```python\nimport os\n```")


def test_code_names_its_language_and_nothing_else() -> None:
    assert '<pre class="code language-c++">' in render("```c++\nint x;\n```")
    for language in ('"onload=x', "a&quot;b", "<b>", "x" * 31, "é"):
        assert '<pre class="code">' in render(f"```{language}\nx\n```")


def test_what_a_person_said_is_shown_as_it_was_typed(client: httpx.Client) -> None:
    id = create(client)
    for said in ("# no heading\n\n  * no list & no *stress*", *HOSTILE):
        parent = node(client, id, say(client, id, said)["parent"])
        assert parent["blocks"] == [[0, f'<div class="typed">{escape(said)}</div>']]


def test_a_growing_text_ends_as_the_whole_text_is_rendered() -> None:
    text = "# One\n\nA *paragraph*\nof lines.\n\n- a\n- b\n\n```python\nx = 1\n\n\ny = 2\n```\n\n"
    text += "> q\n\n|a|b|\n|-|-|\n|1|2|\n\n"
    text += "Let $x_1$ be\n$$\na\n= b\n- c\n$$\nso \\[y\\], and $$z\n\n$$ open\n- d\n\nEnd."
    growing, html = GrowingMarkdown(), list[str]()
    for letter in text:
        before = list(growing.blocks)
        if (first := growing.push(letter)) is not None:
            assert growing.blocks[:first] == before[:first]
    growing.push("", end=True)
    html = growing.blocks
    assert html == render_blocks(text)
    assert (
        len(html) == 11
        and html[7].count("<mo>") == 2
        and "<h2>One</h2>" in html[0]
        and '<span class="n">x</span>' in html[3]
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("$x^2$", "<msup><mi>x</mi><mn>2</mn></msup>"),
        (r"\(a*b*c\)", "<mi>a</mi><mo>∗</mo><mi>b</mi><mo>∗</mo><mi>c</mi>"),
        (r"so \[x\]", '<math display="block"><mi>x</mi></math>'),
        ("$$\nx\n= y\n$$", '<div class="math"><math display="block"><mrow><mi>x</mi><mo>=</mo><mi>y</mi>'),
        ("- one\n  $$\n  x\n  $$\n- two", '<li>one<div class="math"><math display="block"><mi>x</mi></math></div>'),
        (r"\begin{align}a&=b\\c&=d\end{align}", '<mtable class="aligned"><mtr><mtd><mi>a</mi></mtd><mtd><mo>=</mo>'),
        ("**$x$**", '<strong><math display="inline"><mi>x</mi></math></strong>'),
        ("|a|\n|-|\n|$x$|", '<td><math display="inline"><mi>x</mi></math></td>'),
        ("$5 and $10", "<p>$5 and $10</p>"),
        ("US$ 5 or $ 6$", "<p>US$ 5 or $ 6$</p>"),
        (r"\$5 and \\(x\\)", r"<p>$5 and \(x\)</p>"),
        ("`$x$`", "<p><code>$x$</code></p>"),
        ("```\n$$x$$\n```", '<pre class="code"><code>$$x$$\n</code></pre>'),
        ("$$ open *and* on", "<p>$$ open <em>and</em> on</p>"),
        ("$$x$$ is *it*", "<p>is <em>it</em></p>"),
        (r"a $\frac{$ b", r"<p>a <code>$\frac{$</code> b</p>"),
        (r"$\text{<b>}<i>\href{javascript:alert(1)}x$", "<mtext>&lt;b&gt;</mtext><mo>&lt;</mo><mi>i</mi><mo>&gt;</mo>"),
        (r"$\color{" + '"onclick=alert(1)' + "}x$", "<mrow></mrow><mi>x</mi>"),
    ],
)
def test_mathematics_between_its_marks_is_mathml_and_all_else_stays(text: str, shown: str) -> None:
    assert shown in render(text)


@pytest.mark.parametrize("text", ["$a ", r"\( ", r"\[", "$$", "$$\n", "x$", "$x $", r"\begin{align}" + "\n", "$x^{"])
def test_marks_of_mathematics_take_time_in_proportion_to_their_number(text: str) -> None:
    def seconds(count: int) -> float:
        began = perf_counter()
        render_blocks(text * count)
        return perf_counter() - began

    assert min(seconds(2000) for _ in range(3)) < 10 * min(seconds(500) for _ in range(3)) + 0.1


# ---- the tree


def test_branches_share_what_was_computed_and_answer_as_if_alone(client: httpx.Client) -> None:
    id = create(client, system="Be brief.", temperature=0)
    first = say(client, id, "Hello, who is there? Tell me all.")
    again = say(client, id, None, first["parent"])
    assert again["parent"] == first["parent"] and again["id"] != first["id"]
    assert again["text"] == first["text"], "greedy answers to one prompt are one"
    assert again["usage"]["computed_tokens"] <= 1
    left, right = (say(client, id, "And then?", one["id"]) for one in (first, again))
    assert left["text"] == right["text"]
    assert right["usage"]["computed_tokens"] <= 1, "the same tokens were said in the other branch"
    own = [token["id"] for token in tokens(client, id, left["id"])]
    state = client.get(f"{ROOT}/{id}/{left['id']}/state").json()
    assert state["tokens"] == left["usage"]["prompt"] + len(own)
    assert sum(state["memory"].values()) > 0
    # It is made once the answer was told of.
    wait_until(lambda: state["session"] in [one["name"] for one in client.get("/v1/sessions").json()["data"]])
    session = client.get(f"/v1/sessions/{state['session']}").json()
    body = {"prompt": session["tokens"][: -len(own)], "max_tokens": 8, "temperature": 0}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == left["text"]


def test_the_state_tells_bytes_shared_and_own_ways_back_and_tiers(client: httpx.Client) -> None:
    id = create(client, temperature=0)
    first = say(client, id, "Hello, who is there? Tell me all.")
    second = say(client, id, "And then?", first["id"])
    alone = client.get(f"{ROOT}/{id}/{second['id']}/state").json()
    say(client, id, "Or something else?", first["id"])
    told = client.get(f"{ROOT}/{id}/{second['id']}/state").json()
    assert told["shared_bytes"] > alone["shared_bytes"]
    assert told["own_bytes"] < alone["own_bytes"]
    assert told["rewind"] is None, "attention keeps an entry for each token"
    assert [(one["id"], one["computed"]) for one in told["back"]] == [(first["id"], 0)]
    assert told["back"][0]["tokens"] <= told["shared"] < told["tokens"]
    own = [one for one in told["prefixes"] if one["branch"]]
    assert sum(one["count"] for one in own) >= told["tokens"] - 1
    assert [one["start"] for one in own] == sorted(one["start"] for one in own)
    assert all(one["memory"] for one in own)
    usage = told["usage"]
    assert usage["reused_tokens"] <= usage["matched_tokens"] <= usage["prompt"]


def test_layers_that_forget_have_a_rewind_window_and_carries_in_a_tier(tmp_path: Path) -> None:
    model = load_tiny(tmp_path / "model", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    settings = Settings("tiny", port=0)
    with Engine(model, rows=1, store=tmp_path / "store") as engine, running(engine, settings) as server:
        with server.client() as client:
            id = create(client, temperature=0)
            first = say(client, id, "Hello, who is there? Tell me all.")
            second = say(client, id, "And then?", first["id"])
            told = client.get(f"{ROOT}/{id}/{second['id']}/state").json()
        assert told["rewind"] == 16
        held = [one for one in told["prefixes"] if one["branch"] and one["carry"]]
        assert held and held[-1]["start"] + held[-1]["count"] >= told["tokens"] - 1  # the last one was not fed yet
        assert all(one["memory"] and one["tier"] == "folder" for one in held)


def test_another_token_begins_a_branch_there(client: httpx.Client) -> None:
    id = create(client)
    first = say(client, id, "Hello")
    seen = tokens(client, id, first["id"])
    assert all(abs(sum(other["p"] for other in token["top"])) <= 1.001 for token in seen)
    at = 3
    other = next(one for one in seen[at]["top"] if one["id"] != seen[at]["id"] and not one["end"])
    answer = client.post(f"{ROOT}/{id}/{first['id']}/fork", json={"at": at, "token": other["id"]})
    forked = ended(client, id, answer.json()["answer"])
    now = tokens(client, id, forked["id"])
    assert [token["id"] for token in now[: at + 1]] == [*(token["id"] for token in seen[:at]), other["id"]]
    assert now[at]["p"] == pytest.approx(other["p"])
    assert forked["parent"] == first["parent"]
    assert node(client, id, first["id"])["text"] == first["text"]
    assert client.post(f"{ROOT}/{id}/{first['id']}/fork", json={"at": 99, "token": 5}).status_code == 400
    assert client.post(f"{ROOT}/{id}/{first['id']}/fork", json={"at": 0, "token": 10**6}).status_code == 400


def test_an_answer_that_was_cut_off_goes_on_as_if_it_never_was(client: httpx.Client) -> None:
    short, long = create(client, max_tokens=4), create(client, max_tokens=8)
    whole = say(client, long, "Hello")
    part = say(client, short, "Hello")
    assert part["status"] == "length"
    client.post(f"{ROOT}/{short}/{part['id']}/continue")
    assert ended(client, short, part["id"])["text"] == whole["text"]
    assert len(tokens(client, short, part["id"])) == 8
    below = say(client, short, "More", part["id"])
    other = client.post(f"{ROOT}/{short}/{part['id']}/continue").json()["answer"]
    assert other != part["id"], "what was said after the answer is not to follow another one"
    assert len(tokens(client, short, ended(client, short, other)["id"])) == 12
    assert node(client, short, part["id"])["text"] == whole["text"] and node(client, short, below["id"]) == below


def test_a_stopped_answer_keeps_its_text_and_changes_reach_who_watches(client: httpx.Client, tiny: Running) -> None:
    id = create(client, max_tokens=1500)
    wait_until(lambda: not tiny.server.service.running)
    seen: dict[int, str] = {}
    with standing_still(tiny.engine), client.stream("GET", f"{ROOT}/{id}/events") as stream:
        name = client.post(f"{ROOT}/{id}/say", json={"text": "Hello"}).json()["answer"]
        for line in stream.iter_lines():
            if not line.startswith("data: "):
                continue
            found = [one for one in json.loads(line[6:])["nodes"] if one["id"] == name]
            for one in found:
                seen |= dict(one["blocks"])
            if found and found[0]["status"] != "running":
                break
            if found and seen and found[0]["tokens"] > 90:  # though it stands still since then: no piece shows them
                assert client.post(f"{ROOT}/{id}/{name}/stop").status_code == 200
    stopped = node(client, id, name)
    assert stopped["status"] == "stopped" and stopped["text"]
    assert [seen[at] for at in range(stopped["count"])] == render_blocks(stopped["text"])


def test_who_is_told_that_an_answer_ended_is_told_all_of_it(
    client: httpx.Client, tiny: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tiny.server.pool.models[0].attached  # type: ignore[union-attr]
    id = create(client)
    live, blocks = kept._open[id], dict[int, str]()

    def told_meanwhile(text: str) -> list[str]:
        event = live.since(0)
        blocks.clear()
        for one in event["nodes"]:
            if one["role"] == "assistant" and one["status"] != "running":
                blocks.update(one["blocks"])
        return render_blocks(text + "!")

    monkeypatch.setattr(writing, "render_blocks", told_meanwhile)
    told = say(client, id, "Hello")
    assert told["text"] and told["status"] == "length"
    assert list(blocks.values()) in ([], [html for _, html in told["blocks"]])


def test_a_change_while_another_is_sent_is_told_next(tiny: Running) -> None:
    async def scene() -> list[str]:
        conversation = Conversation("c", "Title", 0.0, {}, {})
        live, seen = Live(conversation), list[str]()
        stream = changes(tiny.server.pool.models[0].attached, live, 0)  # type: ignore[union-attr]
        async for sent in stream:
            seen += [one["id"] for one in json.loads(sent[6:])["nodes"]]
            if (count := len(conversation.nodes)) < 2:  # the page has not taken the last event yet
                node = conversation.nodes[str(count)] = MessageNode(str(count), None, "user", "Hello")
                live.touch(node)
            else:
                await stream.aclose()
        return seen

    assert asyncio.run(scene()) == ["0", "1"]


def test_conversations_are_named_found_and_forgotten(client: httpx.Client) -> None:
    first, second = create(client), create(client)
    say(client, first, "about walruses")
    client.post(f"{ROOT}/{second}", json={"title": "100% sure"})

    def found(search: str) -> list[str]:
        return [one["id"] for one in client.get(ROOT, params={"search": search}).json()["data"]]

    assert found("walruses") == [first] and found("100%") == [second] and found("0_s") == []
    assert client.post(f"{ROOT}/{first}", json={"settings": {"temperature": -1}}).status_code == 400
    assert client.delete(f"{ROOT}/{first}").status_code == 200
    assert found("") == [second]
    assert client.get(f"{ROOT}/{first}/events").status_code == 404
    assert not [one for one in client.get("/v1/sessions").json()["data"] if one["name"].startswith(first)]


def test_only_an_empty_conversation_is_deleted_as_empty(client: httpx.Client) -> None:
    first, second = create(client), create(client)
    say(client, first, "Hello")
    assert client.delete(f"{ROOT}/{first}", params={"empty": 1}).status_code == 409
    assert client.delete(f"{ROOT}/{second}", params={"empty": 1}).status_code == 200
    assert [one["id"] for one in client.get(ROOT).json()["data"]] == [first]


def test_a_message_that_comes_while_an_empty_conversation_is_deleted_stays(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    id, close = create(client), keeper.Keeper._close_sessions

    def slowly(self: keeper.Keeper, conversation: str) -> None:
        monkeypatch.setattr(keeper.Keeper, "_close_sessions", close)
        say(client, id, "Hello")
        close(self, conversation)

    monkeypatch.setattr(keeper.Keeper, "_close_sessions", slowly)
    assert client.delete(f"{ROOT}/{id}", params={"empty": 1}).status_code == 409
    assert look(client, id)["nodes"][0]["text"] == "Hello"


def test_a_file_that_is_refused_late_leaves_no_conversation(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = create(client)
    last = say(client, id, "one")
    file = client.get(f"{ROOT}/{id}/{last['id']}/session").content

    def refuse(*_: object) -> None:
        raise ApiError("too large", 413)

    monkeypatch.setattr(BranchPrompts, "prompt", refuse)
    assert client.post("/page/upload", content=file).status_code == 413
    assert [one["id"] for one in client.get(ROOT).json()["data"]] == [id]


def test_a_branch_as_a_file_is_the_branch_elsewhere(client: httpx.Client) -> None:
    id = create(client, system="Be brief.")
    last = say(client, id, "two", say(client, id, "one")["id"])
    file = client.get(f"{ROOT}/{id}/{last['id']}/session").content
    other = client.post("/page/upload", content=file).json()["id"]
    nodes = look(client, other)["nodes"]
    assert [one["text"] for one in nodes] == [one["text"] for one in look(client, id)["nodes"]]
    client.post(f"{ROOT}/{other}", json={"settings": {"system": "Be brief.", "max_tokens": 8}})
    kept, moved = (say(client, one, "three", leaf) for one, leaf in ((id, last["id"]), (other, nodes[-1]["id"])))
    assert kept["text"] == moved["text"]
    assert kept["usage"]["prompt"] == moved["usage"]["prompt"]
    assert [one["id"] for one in tokens(client, other, nodes[1]["id"])] == []  # probabilities stay behind
    refused = client.post("/page/upload", content=b"nonsense")
    assert refused.status_code == 400
    assert tempfile.gettempdir() not in refused.text


def test_what_is_refused_changes_nothing(client: httpx.Client) -> None:
    id = create(client)
    answer = client.post(f"{ROOT}/{id}/say", json={"text": "x" * 3000})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert client.post(f"{ROOT}/{id}/say", json={"text": "  "}).status_code == 400
    assert client.post(f"{ROOT}/{id}/say", json={"text": "x", "parent": "none"}).status_code == 404
    assert client.post(f"{ROOT}/{id}/say", json={}).status_code == 400
    assert look(client, id)["nodes"] == []


def test_conversations_survive_a_restart(tiny_model: lmstate.Model, tmp_path: Path) -> None:
    settings = Settings("tiny", port=0, folder=tmp_path)
    with Engine(tiny_model, rows=2) as engine:
        with running(engine, settings) as server, server.client() as client:
            id = create(client, max_tokens=1500)
            kept = say(client, id, "Hello")
            name = client.post(f"{ROOT}/{id}/say", json={"text": "More", "parent": kept["id"]}).json()["answer"]
        with running(engine, settings) as server, server.client() as client:
            assert [one["id"] for one in client.get(ROOT).json()["data"]] == [id]
            assert node(client, id, kept["id"])["text"] == kept["text"]
            assert node(client, id, name)["status"] in ("stopped", "length", "done")
            client.post(f"{ROOT}/{id}", json={"settings": {"max_tokens": 4}})
            assert say(client, id, "Again", kept["id"])["usage"]["reused_tokens"] > 0


def test_an_answer_that_a_killed_server_left_can_be_continued(tmp_path: Path) -> None:
    file = tmp_path / "records"
    records = [OwnedRecords(SqliteRecords(file, b""), shared=False) for _ in range(2)]
    written = MessageNode("a", None, "assistant", "Half of", status="running", added=[1, 2, 3], start=1)
    ConversationStore(records[0], "model").put(Conversation("c", "Title", 0.0, {}, {}), written)
    found = ConversationStore(records[1], "model").get("c")
    assert found is not None
    assert found.nodes["a"].status == "stopped"
    assert (found.nodes["a"].text, found.nodes["a"].added) == ("Half of", [1, 2, 3])
    assert ConversationStore(records[1], "another model").get("c") is None
    for each in records:
        each.close()


# ---- the files


def test_the_page_asks_nothing_of_others(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy and "*" not in policy
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert named and all(client.get(one).status_code == 200 for one in named if not one.startswith("#"))
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=", page.text), "a strict policy refuses these"
    for file in PAGE.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]{2,}", text), f"{file.name} names another origin"
        assert not re.search(r"\beval\(|new Function|document\.write|outerHTML", text), file.name
        for other in re.findall(r'from "\./([^"]+)"', text):
            assert (PAGE / other).is_file()
    assert client.get("/page/files/../app.py").status_code == 404
    assert client.get("/page/files/nothing.js").status_code == 404


def test_every_file_of_the_page_is_in_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    packed = project["tool"]["setuptools"]["package-data"]["lmstate"]
    names = {file.name for file in PAGE.iterdir()}
    assert {"index.html", "style.css", "main.js"} <= names
    assert all(any(PurePosixPath(f"serve/page/{name}").match(glob) for glob in packed) for name in names)


def test_the_page_opens_without_a_key_and_its_conversations_do_not(tiny_model: lmstate.Model) -> None:
    with (
        Engine(tiny_model, rows=1) as engine,
        running(engine, Settings("tiny", port=0, api_keys=("k",))) as server,
        server.client() as client,
    ):
        assert client.get("/").status_code == 200
        assert client.get(ROOT).status_code == 401
        assert client.get(ROOT, headers={"authorization": "Bearer k"}).status_code == 200
