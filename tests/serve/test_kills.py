"""A server that is killed at any moment and started again on its folder: each answer is that of its request alone."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

import lmstate
from tests.engine.alone import alone
from tests.serve.killed import PHASES
from tests.serve.running import load_tiny
from tests.serve.test_behavior import command
from tests.waiting import GUARD, wait_until

SHARED = [random.Random(7).randrange(256) for _ in range(120)]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@dataclass
class Client:
    """Asks whatever it likes until the server is gone, and goes on with the next one."""

    number: int
    draw: random.Random
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)  # (prompt, what followed it)
    chat: list[dict[str, str]] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)  # tokens of that chat
    responses: list[tuple[str | None, str, dict[str, Any]]] = field(default_factory=list)  # (previous, input, answer)
    kept: list[int] = field(default_factory=list)  # tokens of its session that the server has confirmed
    asked: tuple[str, dict[str, Any]] | None = None  # (key, body) of a turn whose end was not heard of
    conversation: str | None = None
    said: list[str] = field(default_factory=list)  # in that conversation, as the server has confirmed it
    saying: tuple[str, str] | None = None  # (key, text) of a turn in it whose end was not heard of
    failures: list[str] = field(default_factory=list)

    def run(self, url: str) -> None:
        acts = (self.complete, self.leave, self.talk, self.respond, self.session, self.converse)
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.Client(base_url=url, timeout=GUARD, limits=httpx.Limits(max_keepalive_connections=0)) as http,
        ):
            while True:
                try:
                    self.draw.choice(acts)(http)
                except httpx.TransportError:
                    return
                except Exception as error:
                    told = error.response.text if isinstance(error, httpx.HTTPStatusError) else ""
                    self.failures.append(f"{error!r} {told}")
                    return

    def post(self, http: httpx.Client, path: str, key: str | None = None, **body: Any) -> Any:
        answer = http.post(path, json=body, headers={} if key is None else {"Idempotency-Key": key})
        answer.raise_for_status()
        return answer.json()

    def prompt(self) -> list[int]:
        more = (self.draw.randrange(256) for _ in range(self.draw.randrange(1, 9)))
        return [*SHARED[: self.draw.randrange(1, 120)], *more]

    def complete(self, http: httpx.Client) -> None:
        prompt, count = self.prompt(), self.draw.randrange(1, 10)
        (choice,) = self.post(http, "/v1/completions", prompt=prompt, max_tokens=count, **GREEDY)["choices"]
        assert choice["prompt_token_ids"] == prompt
        self.answers.append((prompt, choice["token_ids"]))

    def leave(self, http: httpx.Client) -> None:
        body = {"prompt": self.prompt(), "max_tokens": 300, "stream": True, **GREEDY}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_bytes())

    def talk(self, http: httpx.Client) -> None:
        """A chat that goes on across kills: what the client sends is all that there is of it."""
        self.chat = [] if len(self.chat) > 6 else self.chat
        asked = [*self.chat, {"role": "user", "content": f"Question {self.number} {len(self.chat)}"}]
        made = self.post(http, "/v1/chat/completions", messages=asked, max_tokens=self.draw.randrange(1, 9), **GREEDY)
        (choice,) = made["choices"]
        self.answers.append((made["prompt_token_ids"], choice["token_ids"]))
        self.chat = [*asked, {"role": "assistant", "content": choice["message"]["content"]}]

    def respond(self, http: httpx.Client) -> None:
        """A response to one that was stored, if there is one: also to one of before a kill."""
        previous = self.draw.choice(self.responses)[2]["id"] if self.responses else None
        text = f"Say {self.draw.randrange(100)}"
        self.responses.append((previous, text, self.ask(http, previous, text)))

    def ask(self, http: httpx.Client, previous: str | None, text: str) -> dict[str, Any]:
        body = {"max_output_tokens": 5, "temperature": 0, "ignore_eos": True}
        return self.post(http, "/v1/responses", input=text, previous_response_id=previous, **body)

    def session(self, http: httpx.Client) -> None:
        """A session has all that was confirmed, and at most one turn more: what a kill interrupted."""
        name = f"s{self.number}"
        if http.get(f"/v1/sessions/{name}").status_code == 404:
            self.post(http, "/v1/sessions", name=name)
        before = http.get(f"/v1/sessions/{name}").json()["tokens"]
        assert before[: len(self.kept)] == self.kept and len(before) <= len(self.kept) + 16, "a turn is lost"
        if self.asked is None and len(before) > 200:
            to, self.kept = self.draw.randrange(50), []
            self.post(http, f"/v1/sessions/{name}/rewind", to=to)
            self.kept = before[:to]
            return
        if self.asked is None:
            given = [self.draw.randrange(256) for _ in range(self.draw.randrange(1, 9))]
            body = {"tokens": given, "max_tokens": self.draw.randrange(1, 9), "temperature": 0, "ignore_eos": True}
            self.asked = f"key {self.draw.random()}", body
        key, body = self.asked
        made = self.post(http, f"/v1/sessions/{name}/send", key=key, **body)
        asked = [*self.kept, *body["tokens"]]
        self.answers.append((asked, made["tokens"]))
        self.kept, self.asked = [*asked, *made["tokens"]], None
        assert made["stored"]
        assert http.get(f"/v1/sessions/{name}").json()["tokens"] == self.kept, "a turn is there twice, or not at all"

    def converse(self, http: httpx.Client) -> None:
        """A conversation has each turn that was confirmed once; one that a kill interrupted is asked for again."""
        if self.conversation is None:
            self.conversation = self.post(http, "/v1/conversations")["id"]
        if self.saying is None:
            self.saying = f"key {self.draw.random()}", f"Turn {len(self.said) // 2}"
        key, text = self.saying
        body = {"max_output_tokens": 4, "temperature": 0, "ignore_eos": True, "conversation": self.conversation}
        made = self.post(http, "/v1/responses", key=key, input=text, **body)
        assert made["store"]
        self.said += [text, made["output"][0]["content"][0]["text"]]
        self.saying = None
        assert self.heard(http) == self.said, "a turn is there twice, or not at all, or is another one"
        if len(self.said) > 20:
            self.conversation, self.said = None, []

    def heard(self, http: httpx.Client) -> list[str]:
        """What the server has of its conversation."""
        answer = http.get(f"/v1/conversations/{self.conversation}/items", params={"order": "asc", "limit": 100})
        answer.raise_for_status()
        return [item["content"][0]["text"] for item in answer.json()["data"]]

    def check(self, model: lmstate.Model, http: httpx.Client) -> None:
        """What was answered is what each request gets alone; what was stored is there, and goes on as it did."""
        assert not self.failures
        for prompt, tokens in self.answers:
            assert alone(model, prompt, len(tokens), ends=frozenset(), guess=tokens)[0] == tokens
        for previous, text, answer in self.draw.sample(self.responses, min(5, len(self.responses))):
            assert http.get(f"/v1/responses/{answer['id']}").json()["output"] == answer["output"]
            again = self.ask(http, previous, text)
            assert again["output"][0]["content"] == answer["output"][0]["content"]
        while self.conversation is not None and self.saying is not None:
            self.converse(http)
        assert self.conversation is None or self.heard(http) == self.said


def at_work(clients: list[Client], threads: list[Thread], more: int) -> None:
    """Wait until they have so many more answers, and a response that was stored: there is to be something to check."""
    wanted = more + sum(len(client.answers) for client in clients)

    def enough() -> bool:
        return sum(len(client.answers) for client in clients) >= wanted and any(one.responses for one in clients)

    wait_until(lambda: enough() or not any(thread.is_alive() for thread in threads))


def survive(tmp_path: Path, kills: int, seed: int) -> None:
    model = load_tiny(tmp_path / "model")
    draw = random.Random(seed)
    clients = [Client(number, random.Random(seed * 100 + number)) for number in range(5)]
    options = ("--weights", "float32", "--rows", "3", "--memory", "4MiB", "--store", str(tmp_path / "store"))
    for _ in range(kills):
        with command(tmp_path / "model", *options) as (process, url):
            threads = [Thread(target=client.run, args=(url,)) for client in clients]
            for thread in threads:
                thread.start()
            at_work(clients, threads, draw.randrange(5, 40))
            time.sleep(draw.uniform(0.0, 0.2))  # in the middle of whatever they are at then
            process.kill()
            for thread in threads:
                thread.join(GUARD)
                assert not thread.is_alive()
    with command(tmp_path / "model", *options) as (_, url), httpx.Client(base_url=url, timeout=300) as http:
        for client in clients:
            client.check(model, http)


def test_each_answer_of_a_server_that_is_killed_is_that_of_its_request_alone(tmp_path: Path) -> None:
    survive(tmp_path, kills=2, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_kills(tmp_path: Path, seed: int) -> None:
    survive(tmp_path, kills=8, seed=seed)


def survive_phases(tmp_path: Path, kills: list[tuple[str, int]], seed: int) -> None:
    """As `survive`, of a server that kills itself at phases of a turn."""
    model = load_tiny(tmp_path / "model")
    clients = [Client(number, random.Random(seed * 100 + number)) for number in range(3)]
    options = ("--weights", "float32", "--rows", "3", "--memory", "4MiB", "--store", str(tmp_path / "store"))
    for phase, call in kills:
        main = (sys.executable, "-m", "tests.serve.killed", phase, str(call))
        with command(tmp_path / "model", *options, main=main) as (process, url):
            threads = [Thread(target=client.run, args=(url,)) for client in clients]
            for thread in threads:
                thread.start()
            assert process.wait(GUARD) == -signal.SIGKILL
            for thread in threads:
                thread.join(GUARD)
                assert not thread.is_alive()
        assert [failure for client in clients for failure in client.failures] == [], (phase, call)
    with command(tmp_path / "model", *options) as (_, url), httpx.Client(base_url=url, timeout=300) as http:
        for client in clients:
            client.check(model, http)


def test_a_server_that_is_killed_while_it_stores_a_turn_loses_nothing(tmp_path: Path) -> None:
    survive_phases(tmp_path, [("record in its transaction", 9), ("record stored", 12)], seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("phase", PHASES)
def test_kills_at_each_phase_of_a_turn(phase: str, tmp_path: Path) -> None:
    draw = random.Random(phase)
    survive_phases(tmp_path, [(phase, draw.randrange(1, 40)) for _ in range(10)], seed=2)
