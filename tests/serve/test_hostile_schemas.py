"""Schemas, patterns and grammars whose cost multiplies: refused or ended within a budget of time and memory."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import httpx
import pytest

from lmstate.errors import GrammarError
from lmstate.serve.answer.compile_check import CompileCheck, TooCostly
from lmstate.serve.answer.grammar import Grammars
from lmstate.text.grammars.schema_bounds import MAX_REPEATS, check_schema, repeats
from tests.serve.byte_tokenizer import byte_tokenizer
from tests.serve.running import Running
from tests.waiting import wait_until

USER = [{"role": "user", "content": "Hi"}]
SECONDS, BYTES = 2.0, 2**28  # of the server's own, for one of them


def choices(count: int) -> dict[str, Any]:
    both = [{"anyOf": [{"const": i}, {"type": "string", "pattern": f"a{{{i + 1}}}"}]} for i in range(count)]
    return {"allOf": both}


def doubled(depth: int) -> dict[str, Any]:
    """Each definition takes the one below twice."""
    pair = [{"anyOf": [{"const": 1}, {"const": 2}]}]
    rules: dict[str, Any] = {"d0": pair[0]}
    for level in range(1, depth):
        rules[f"d{level}"] = {"allOf": [{"$ref": f"#/$defs/d{level - 1}"}, {"$ref": f"#/$defs/d{level - 1}"}]}
    return {"$defs": rules, "$ref": f"#/$defs/d{depth - 1}"}


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


HOSTILE = {
    "allOf of anyOf": choices(40),
    "oneOf of oneOf": {"allOf": [{"oneOf": [{"minimum": i}, {"maximum": -i}]} for i in range(40)]},
    "through references": doubled(12),
    "in a property": {"type": "object", "properties": {"a": choices(40)}, "required": ["a"]},
    "nested counts": {"type": "string", "pattern": "(a{1000}){1000}"},
    "nested counts in a name": {"type": "object", "patternProperties": {"((a{99}){99}){99}": {}}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_multiplies_is_refused_before_it_is_compiled(name: str) -> None:
    start = process_time()
    with pytest.raises(GrammarError, match="x has a"):
        check_schema(HOSTILE[name], "x")
    assert process_time() - start < SECONDS


def test_schemas_as_programs_write_them_are_not_refused() -> None:
    """Nullable fields by the dozen, unions of models, a model that holds itself, mixins."""
    nullable = {f"p{i}": {"anyOf": [{"type": "string"}, {"type": "null"}]} for i in range(60)}
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}}}
    mixins = {"allOf": [{"$ref": "#/$defs/Node"}, {"type": "object", "properties": nullable}]}
    union = {"anyOf": [{"$ref": "#/$defs/Node"}, mixins, *({"const": i} for i in range(1000))]}
    check_schema({"$defs": {"Node": node}, **union}, "x")
    check_schema({"type": "string", "pattern": r"^[a-z]{1,64}@([a-z0-9-]{1,63}\.){1,8}[a-z]{2,24}$"}, "x")


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("abc", 3), ("a{3}", 3), ("(ab){2,5}c", 11), ("[a-z]{2}", 2), (r"\d{4}-\d{2}", 7), ("((a{10}){10}){10}", 1000)],
)
def test_counts_of_a_pattern_are_multiplied(pattern: str, count: int) -> None:
    assert repeats(pattern) == count
    assert repeats("(" * 5000 + ")" * 5000 + "{" * 50) <= MAX_REPEATS


def test_a_costly_grammar_ends_its_helper_and_the_next_one_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(byte_tokenizer(tmp_path), 300)
    costly = "start: %json " + json.dumps(choices(22))  # as if the bounds had let it through

    async def run() -> None:
        check: CompileCheck = grammars._costs
        await check.check("start: %json " + json.dumps({"pattern": "a{3}"}), own=True)
        assert len(check._idle) == 1
        with pytest.raises(TooCostly):
            await check.check(costly, own=True)
        assert not check._idle
        await check.check('start: %lark {\nstart: "a"\n}', own=True)
        (helper,) = check._idle
        trial = asyncio.create_task(check.check(costly, own=True))
        await asyncio.sleep(0.3)
        assert helper.returncode is None
        trial.cancel()  # as when its client leaves
        with pytest.raises(asyncio.CancelledError):
            await trial
        assert helper.returncode is not None
        await grammars.close()

    asyncio.run(run())


def test_the_server_stays_small_and_answers_meanwhile(tiny: Running) -> None:
    before = resident()
    with tiny.client() as client:
        for schema in HOSTILE.values():
            format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            body: dict[str, Any] = {"messages": USER, "max_tokens": 1}
            start = monotonic()
            answers = [client.post("/v1/chat/completions", json={**body, "response_format": format})]
            answers.append(client.post("/v1/chat/completions", json={**body, "guided_json": schema}))
            tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
            answers.append(client.post("/v1/chat/completions", json={**body, "tools": [tool]}))
            assert [answer.status_code for answer in answers] == [400] * 3
            assert monotonic() - start < 10 * SECONDS
        assert client.post("/v1/chat/completions", json={**body, "guided_regex": "(a{999}){999}"}).status_code == 400
        grammar = "start: a{1000}\na: b{1000}\nb: c{1000}\nc: /x{1000}/"
        assert client.post("/v1/chat/completions", json={**body, "grammar": grammar}).status_code in (200, 400)
        assert client.get("/health").status_code == 200
    assert resident() - before < BYTES


def test_a_client_that_leaves_ends_the_trial_of_its_grammar(tiny: Running) -> None:
    alternatives = " | ".join(f'("{chr(97 + i % 26)}" x)' for i in range(200))
    grammar = f"start: {' '.join(['x'] * 30)}\nx: y{{1,900}}\ny: /{'(a|b){1,300}' * 40}/ | {alternatives}"
    body = {"messages": USER, "max_tokens": 1, "grammar": grammar}
    with tiny.client(timeout=0.2) as client, suppress(httpx.TimeoutException):
        client.post("/v1/chat/completions", json=body)
    wait_until(lambda: not tiny.server.service.running)
    with tiny.client() as client:
        assert client.post("/v1/chat/completions", json={**body, "grammar": 'start: "a"'}).status_code == 200
