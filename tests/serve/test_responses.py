"""The state of the responses protocol: conversations, items by reference, responses in the background.

Asked by OpenAI's library with strict validation: what its types do not allow fails.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

import lmstate
from lmstate.engine import Engine
from lmstate.engine.tiers.sqlite_records import SqliteRecords
from lmstate.serve import Settings
from tests.serve.running import Running, running, standing_still
from tests.serve.test_behavior import held
from tests.waiting import GUARD, wait_until

IGNORE: Any = {"ignore_eos": True}
ASKED: Any = {"model": "tiny", "max_output_tokens": 4, "extra_body": IGNORE}
LONG: Any = {"model": "tiny", "max_output_tokens": 1500, "extra_body": IGNORE, "background": True}


def strict(server: Running) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True, timeout=GUARD
    )


@pytest.fixture(scope="module")
def client(tiny: Running) -> Iterator[openai.OpenAI]:
    with strict(tiny) as client:
        yield client


@pytest.fixture
def engine(tiny_model: lmstate.Model) -> Iterator[Engine]:
    with Engine(tiny_model, rows=2) as engine:
        yield engine


def test_a_conversation_goes_on_from_the_very_tokens_and_keeps_its_items(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(
        items=[{"type": "message", "role": "system", "content": "Be brief."}], metadata={"topic": "rivers"}
    )
    assert client.conversations.retrieve(conversation.id).metadata == {"topic": "rivers"}
    first = client.responses.create(input="Name a river.", conversation=conversation.id, **ASKED)
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    assert first.usage is not None
    second = client.responses.create(input="Another.", conversation={"id": conversation.id}, **ASKED)
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    listed = list(client.conversations.items.list(conversation.id, order="asc", limit=2))  # of several pages
    roles = [item.role for item in listed if item.type == "message"]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert [item.id for item in client.conversations.items.list(conversation.id)] == [item.id for item in listed][::-1]
    item = client.conversations.items.retrieve(listed[1].id or "", conversation_id=conversation.id)
    assert item == listed[1]
    # The same conversation said at once, without the server's memory of it.
    texts = ["Be brief.", "Name a river.", first.output_text, "Another."]
    whole: Any = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    assert client.responses.create(input=whole, **ASKED).output_text == second.output_text


def test_a_conversation_is_changed_item_by_item(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    first = client.responses.create(input="One", conversation=conversation.id, **ASKED)
    added = client.conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": "Two"}]
    )
    last = added.data[0].id or ""
    client.conversations.items.delete(first.output[0].id or "", conversation_id=conversation.id)
    after = client.responses.create(input="Three", conversation=conversation.id, **ASKED)
    whole: Any = [{"role": "user", "content": text} for text in ("One", "Two", "Three")]
    assert client.responses.create(input=whole, **ASKED).output_text == after.output_text
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.delete("msg_none", conversation_id=conversation.id)
    assert client.conversations.update(conversation.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert client.conversations.delete(conversation.id).deleted
    for ask in (
        lambda: client.conversations.retrieve(conversation.id),
        lambda: client.conversations.items.list(conversation.id),
        lambda: client.responses.create(input="x", conversation=conversation.id, **ASKED),
        lambda: client.responses.create(input=[{"type": "item_reference", "id": last}], **ASKED),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()


def test_two_answers_at_once_in_a_conversation_are_both_kept(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    both: Any = {"conversation": conversation.id, "background": True, **ASKED}
    made = [client.responses.create(input=text, **both) for text in ("One", "Two")]
    for response in made:
        wait_until(lambda id=response.id: client.responses.retrieve(id).status in ("completed", "incomplete"))
    texts = [item for item in client.conversations.items.list(conversation.id) if item.type == "message"]
    assert sorted(item.role for item in texts) == ["assistant", "assistant", "user", "user"]
    after = client.responses.create(input="Three", conversation=conversation.id, **ASKED)
    listed = client.conversations.items.list(conversation.id, order="asc").data
    whole: Any = [item.model_dump(exclude_none=True) for item in listed[:5]]
    assert client.responses.create(input=whole, **ASKED).output_text == after.output_text


def test_an_item_is_said_by_its_id(client: openai.OpenAI) -> None:
    first = client.responses.create(input="Name a river.", **ASKED)
    given = client.responses.input_items.list(first.id).data[0]
    said: Any = [{"type": "item_reference", "id": given.id}, {"type": "item_reference", "id": first.output[0].id}]
    more: Any = {"role": "user", "content": "Another."}
    referred = client.responses.create(input=[*said, more], **ASKED)
    after = client.responses.create(input="Another.", previous_response_id=first.id, **ASKED)
    assert referred.output_text == after.output_text
    bare: Any = [{"id": one["id"]} for one in said]  # the type may be left out
    assert client.responses.create(input=[*bare, more], **ASKED).output_text == after.output_text
    with pytest.raises(openai.NotFoundError, match="item_none"):
        client.responses.create(input=[{"type": "item_reference", "id": "item_none"}], **ASKED)


def test_a_response_in_the_background_is_made_and_asked_for(client: openai.OpenAI) -> None:
    plain = client.responses.create(input="Hello", **ASKED)
    made = client.responses.create(input="Hello", background=True, **ASKED)
    assert made.background
    assert made.status in ("queued", "in_progress")
    wait_until(lambda: client.responses.retrieve(made.id).status == "incomplete")
    assert client.responses.retrieve(made.id).output_text == plain.output_text
    assert client.responses.cancel(made.id).status == "incomplete"  # it had ended
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(plain.id)
    with pytest.raises(openai.BadRequestError, match="store"):
        client.responses.create(input="x", background=True, store=False, **ASKED)


def test_a_background_stream_is_followed_from_any_event_on(client: openai.OpenAI) -> None:
    begun: list[Any] = []
    with client.responses.create(input="Hello", background=True, stream=True, **ASKED) as stream:
        for event in stream:
            begun.append(event)
            if len(begun) == 4:
                break  # and leave
    id = begun[0].response.id
    rest = list(client.responses.retrieve(id, stream=True, starting_after=begun[-1].sequence_number))
    whole = list(client.responses.retrieve(id, stream=True))
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert [*begun, *rest] == whole
    last = whole[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == client.responses.retrieve(id).output_text
    assert len(last.response.output_text) > 0


def test_a_background_response_is_cancelled_and_deleted(engine: Engine) -> None:
    with (
        running(engine, Settings("tiny", port=0)) as server,
        strict(server) as client,
        standing_still(engine),
    ):
        made = client.responses.create(input="Hello", **LONG)
        with pytest.raises(openai.ConflictError, match="not ended"):
            client.responses.create(input="x", previous_response_id=made.id, **ASKED)
        assert client.responses.cancel(made.id).status == "cancelled"
        assert client.responses.retrieve(made.id).status == "cancelled"
        other = client.responses.create(input="Hello", **LONG)
        client.responses.delete(other.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(other.id)
        wait_until(lambda: not server.server.service.running)


def test_a_background_response_that_waits_is_queued(engine: Engine) -> None:
    with running(engine, Settings("tiny", port=0)) as server, strict(server) as client:
        go = held(engine)
        made = client.responses.create(input="Hello", background=True, **ASKED)
        assert made.status == "queued"
        assert client.responses.retrieve(made.id).status == "queued"
        go.set()
        wait_until(lambda: client.responses.retrieve(made.id).status == "incomplete")


def test_what_was_kept_survives_a_restart_and_a_shutdown_ends_the_background(engine: Engine, tmp_path: Path) -> None:
    kept, ends = Settings("tiny", port=0, folder=tmp_path), ExitStack()
    with running(engine, kept) as server, strict(server) as client:
        conversation = client.conversations.create()
        first = client.responses.create(input="One", conversation=conversation.id, **ASKED)
        ends.enter_context(standing_still(engine))
        made = client.responses.create(input="Hello", **LONG)
    wait_until(lambda: not server.server.service.running)
    ends.close()
    with running(engine, replace(kept)) as server, strict(server) as client:
        assert client.responses.retrieve(made.id).status == "cancelled"
        second = client.responses.create(input="Two", conversation=conversation.id, **ASKED)
        after = client.responses.create(input="Two", previous_response_id=first.id, **ASKED)
        assert second.output_text == after.output_text
        assert len(list(client.conversations.items.list(conversation.id))) == 4


def test_the_oldest_conversations_go_when_they_take_too_much(engine: Engine) -> None:
    with running(engine, Settings("tiny", port=0, stored_responses=5000)) as server, strict(server) as client:
        message: Any = {"type": "message", "role": "user", "content": "x" * 1500}
        made = [client.conversations.create(items=[message]) for _ in range(5)]
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(made[0].id)
        assert client.conversations.retrieve(made[-1].id).id == made[-1].id


def test_the_oldest_turns_go_where_a_client_asks_for_that(client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": f"{number} " + "x" * 300} for number in range(9)]
    system: Any = {"role": "system", "content": "Be brief."}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input=[system, *turns], **ASKED)
    assert refused.value.code == "context_length_exceeded"
    cut = client.responses.create(input=[system, *turns], truncation="auto", **ASKED)
    assert cut.truncation == "auto"
    assert cut.usage is not None
    assert cut.usage.input_tokens > 1500  # no more than needed went
    kept = [system, *turns[-5:]]
    same = [client.responses.create(input=[system, *turns[-last:]], **ASKED) for last in (5, 6)]
    assert cut.output_text in [response.output_text for response in same]
    assert client.responses.create(input=kept, truncation="auto", **ASKED).output_text == same[0].output_text
    with pytest.raises(openai.BadRequestError):
        client.responses.create(input="x" * 5000, truncation="auto", **ASKED)


def test_what_came_before_is_gone_on_with_without_input(client: openai.OpenAI) -> None:
    said: Any = [{"type": "message", "role": "user", "content": "Name a river."}]
    conversation = client.conversations.create(items=said)
    first = client.responses.create(conversation=conversation.id, **ASKED)
    assert first.output_text == client.responses.create(input="Name a river.", **ASKED).output_text
    assert client.responses.create(previous_response_id=first.id, **ASKED).output_text
    empty = client.conversations.create()
    for wrong in ({"conversation": empty.id}, {}, {"prompt": {"id": "pmpt_1"}, "input": "x"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**wrong, **ASKED)
    with pytest.raises(openai.BadRequestError, match="give one"):
        client.responses.create(conversation=conversation.id, previous_response_id=first.id, input="x", **ASKED)


def test_an_item_that_a_client_named_itself_is_no_others(client: openai.OpenAI) -> None:
    said: Any = {"type": "message", "id": "msg_mine", "role": "user", "content": "secret"}
    first = client.responses.create(input=[said], **ASKED)
    listed = client.responses.input_items.list(first.id).data[0]
    assert listed.id != "msg_mine"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input=[{"type": "item_reference", "id": "msg_mine"}], **ASKED)
    back: Any = [listed.model_dump(exclude_none=True), first.output[0].model_dump(exclude_none=True)]
    again = client.responses.create(input=[*back, {"role": "user", "content": "x"}], **ASKED)
    ids = [item.id for item in client.responses.input_items.list(again.id, order="asc").data]
    assert ids[:2] == [listed.id, first.output[0].id]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_stored_is_given_and_the_log_tells(
    tiny: Running,
    client: openai.OpenAI,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(tiny.server.config.app.state.responses.responses, "put", full)
        if stream:
            response = list(client.responses.create(input="Hello", stream=True, **ASKED))[-1].response
        else:
            response = client.responses.create(input="Hello", **ASKED)
    assert response.status == "incomplete" and response.usage.output_tokens == 4
    assert "could not be stored: database or disk is full" in caplog.text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_log_probabilities_of_a_stream_are_all_told(client: openai.OpenAI) -> None:
    text = "né 🦊!"  # characters of several tokens each
    told: list[Any] = []
    whole: list[Any] = []
    for event in client.responses.create(
        model="tiny", input="Hi", stream=True, top_logprobs=1, extra_body={"guided_choice": [text]}
    ):
        if event.type == "response.output_text.delta":
            told += event.logprobs
        elif event.type == "response.output_text.done":
            assert event.text == text
            whole = event.logprobs
    assert len(whole) == len(text.encode())
    assert [(one.token, one.logprob) for one in told] == [(one.token, one.logprob) for one in whole]


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "records.sqlite3").write_bytes(b"no database at all" * 100)
    with pytest.raises(OSError, match=r"records\.sqlite3 is not usable as file of records"):
        SqliteRecords(tmp_path / "records.sqlite3", b"")
