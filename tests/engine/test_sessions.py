"""Conversations: exact tokens, ways back, and only what is new computed, however the client tells the history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

import lmstate
from lmstate.engine import EngineClosed, SessionBusy
from lmstate.engine.session_record import Moment, Record
from lmstate.state.media import Media, MediaSpan
from tests.engine.alone import alone
from tests.engine.chat import TEMPLATE, chatting, tokenizer
from tests.engine.test_batching import prompt
from tests.zoo import ours

HOT = {"temperature": 1.3, "max_new_tokens": 30}


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("case", ["llama", "qwen3_next-dense"])
def test_a_client_that_resends_all_of_its_text_has_only_the_new_tail_computed(case: str) -> None:
    """The answers are sampled hot, so that their text, encoded again, is often other tokens."""
    model = chatting(case)
    recut = 0
    with lmstate.Engine(model) as engine:
        for seed in range(4):
            history = [said("system", "abcd and 0123"), said("user", f"hello {seed}")]
            held: list[int] = []
            for turn in range(4):
                request = engine.submit(history, seed=seed, **HOT)
                got = request.result(600)
                assert request.prompt[: len(held)] == held
                if turn:
                    new = len(request.prompt) - len(held)
                    assert request.prompt[: len(held)] == held
                    assert got.usage.prompt - got.usage.reused <= new + 1
                    recut += model.tokenizer.chat(history) != request.prompt
                text = got.texts[0]
                held = [*request.prompt, *got.tokens[0]]
                history = [*history, said("assistant", f" {text.strip()} "), said("user", f"go on {turn}")]
    assert recut, "no answer of this test is cut in another way by the tokenizer; then it shows nothing"


def test_an_answer_whose_thinking_is_left_out_is_still_found() -> None:
    model = chatting()
    engine = lmstate.Engine(model)
    with engine:
        asked = [said("user", "hello")]
        thought = "<think>abc</think>yes"
        tokens = [*model.tokenizer.chat(asked), *model.tokenizer.encode(thought, add_special_tokens=False)]
        engine.remember([*asked, said("assistant", thought)], tokens)
        ids = engine.encode([*asked, said("assistant", "yes"), said("user", "why?")])
        assert ids[: len(tokens)] == tokens
        assert model.tokenizer.decode(ids[len(tokens) :], False) == "<end>[user]why?<end>[assistant]"


def test_tools_go_to_the_template_through_encode() -> None:
    template = "{% for t in tools or [] %}({{ t.name }}){% endfor %}" + TEMPLATE
    model = replace(ours("llama"), _tokenizer=tokenizer(template))
    asked, tools = [said("user", "hi")], [{"name": "look"}]
    told = [*asked, said("assistant", "seen"), said("user", "more")]
    with lmstate.Engine(model, rows=1) as engine:
        first = engine.encode(asked, tools=tools)
        assert model.tokenizer.decode(first, False).startswith("(look)[user]hi")
        request = engine.submit(first, max_new_tokens=3, ignore_eos=True)
        answer = request.result(600).tokens[0]
        assert request.prompt == first
        engine.remember(told[:2], [*first, *answer], tools=tools)
        assert engine.encode(told, tools=tools)[: len(first) + 3] == [*first, *answer]
        assert engine.encode(told) == model.tokenizer.chat(told), "another conversation: it has no tools"


def test_a_session_of_ids_goes_on_from_its_exact_tokens() -> None:
    model = ours("mamba2")
    with lmstate.Engine(model) as engine:
        session = engine.session("one")
        expected: list[int] = []
        for turn in range(3):
            new = prompt(7, turn)
            got = session.send(new, max_new_tokens=5, ignore_eos=True).result(600)
            expected += new
            assert got.tokens == [alone(model, expected, 5, ends=frozenset())[0]]
            assert got.usage.prompt - got.usage.reused == len(new) + bool(turn)
            expected += got.tokens[0]
            assert session.tokens == expected


def test_undo_rewind_mark_and_fork_cost_nothing_again() -> None:
    model = ours("qwen3_next-dense")
    with lmstate.Engine(model) as engine:
        session = engine.session("main")
        first = session.send(prompt(20, 1), max_new_tokens=6, ignore_eos=True).result(600)
        mark = session.mark()
        before = session.tokens
        session.send(prompt(9, 2), max_new_tokens=6, ignore_eos=True).result(600)
        session.undo()
        assert session.tokens == before == [*prompt(20, 1), *first.tokens[0]]
        again = session.send(prompt(9, 3), max_new_tokens=6, ignore_eos=True).result(600)
        assert again.usage.prompt - again.usage.reused == 10
        other = session.fork("other")
        session.rewind(mark)
        assert session.tokens == before
        assert other.tokens == [*before, *prompt(9, 3), *again.tokens[0]]
        assert engine.sessions() == ["main", "other"]
        for one in (session, other):
            got = one.send(prompt(4, 5), max_new_tokens=4, ignore_eos=True).result(600)
            assert got.tokens == [alone(model, one.tokens[:-4], 4, ends=frozenset())[0]]
            assert got.usage.prompt - got.usage.reused <= 5
        other.close()
        assert engine.sessions() == ["main"]


def test_what_live_sessions_need_stays_whatever_else_comes() -> None:
    model = ours("qwen3_next-dense")
    with lmstate.Engine(model, rows=1, memory=600_000) as engine:
        session = engine.session("kept")
        session.send(prompt(40, 1), max_new_tokens=4, ignore_eos=True).result(600)
        for seed in range(40):
            engine.submit(prompt(60, 100 + seed), max_new_tokens=2).result(600)
        assert engine.stats()["prefixes_evicted"] > 0
        got = session.send(prompt(5, 2), max_new_tokens=2).result(600)
        assert got.usage.prompt - got.usage.reused == 6


def test_chat_messages_text_and_the_whole_conversation_again_are_one_history() -> None:
    model = chatting()
    with lmstate.Engine(model) as engine:
        session = engine.session("chat")
        session.send([said("system", "be brief"), said("user", "hi")], seed=1, **HOT).result(600)
        session.send("and now", seed=2, **HOT).result(600)
        roles = [message["role"] for message in session.messages]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        held = session.tokens
        got = session.send([*session.messages, said("user", "more")], seed=3, **HOT).result(600)
        assert session.tokens[: len(held)] == held
        assert got.usage.reused >= len(held) - 1
        session.undo()
        assert session.tokens == held
        edited = [*session.messages[:3], said("user", "something else")]
        session.send(edited, seed=4, **HOT).result(600)
        assert [message["content"] for message in session.messages[:4]] == [m["content"] for m in edited]
        assert len(session.messages) == 5


def test_one_request_of_a_session_at_a_time() -> None:
    with lmstate.Engine(ours("llama")) as engine:
        session = engine.session("one")
        running = session.send([1, 2, 3], max_new_tokens=10**6, ignore_eos=True)
        with pytest.raises(SessionBusy, match="'one' is answering"):
            session.send([4])
        with pytest.raises(SessionBusy):
            session.rewind(0)
        next(iter(running))
        running.cancel()
        got = running.result(600)
        assert session.tokens == [1, 2, 3, *got.tokens[0]]
        with pytest.raises(lmstate.RewindError, match="positions 0 to"):
            session.rewind(10**6)


def test_a_session_that_was_saved_goes_on_elsewhere(tmp_path: Path) -> None:
    model = chatting("qwen3_next-dense")
    path = tmp_path / "session.safetensors"
    with lmstate.Engine(model) as engine:
        session = engine.session("here")
        session.send("hello there", seed=1, **HOT).result(600)
        session.save(path)
        expected = session.send("go on", seed=2, **HOT).result(600)
    with lmstate.Engine(model) as engine:
        session = engine.load_session("there", path)
        got = session.send("go on", seed=2, **HOT).result(600)
        assert got.texts == expected.texts
        assert got.usage.reused == expected.usage.reused > 0
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(lmstate.SnapshotError):
            engine.load_session("broken", path)
        assert engine.sessions() == ["there"]


def test_a_session_of_a_closed_engine_stays_as_it_was() -> None:
    with lmstate.Engine(ours("llama")) as engine:
        session = engine.session("s")
        session.send([1, 2, 3], max_new_tokens=3).result(600)
    held = session.tokens
    for change in (session.undo, session.mark, lambda: session.rewind(0), lambda: session.send([4])):
        with pytest.raises(EngineClosed):
            change()
    assert session.tokens == held


def test_a_stop_string_ends_what_a_session_holds_before_it() -> None:
    model = chatting()
    with lmstate.Engine(model) as engine:
        whole = engine.submit("hello", seed=3, **HOT).result(600).texts[0]
        stop = whole[5:7]
        session = engine.session("s")
        got = session.send([said("user", "x")], seed=3, **HOT).result(600)
        stop = got.texts[0][8:10]
        session.undo()
        cut = session.send([said("user", "x")], seed=3, stop=[stop], **HOT).result(600)
        assert cut.finished == ["stop"]
        assert cut.stopped_by == [stop]
        assert cut.texts[0] == got.texts[0][: got.texts[0].index(stop)]
        assert model.tokenizer.decode(session.tokens).endswith(cut.texts[0])
        session.undo()
        with_it = {**HOT, "stop": [stop], "include_stop_str_in_output": True}
        cut = session.send([said("user", "x")], seed=3, **with_it).result(600)
        assert cut.texts[0] == session.messages[-1]["content"]
        assert cut.texts[0] == got.texts[0][: got.texts[0].index(stop) + len(stop)]
        assert model.tokenizer.decode(session.tokens).endswith(cut.texts[0])


def nested(depth: int) -> list[Any]:
    """Lists in each other, so many, around what is a control token."""
    value: Any = "<end>"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("place", ["content", "meta"])
def test_messages_that_are_nested_too_deep_are_refused(place: str) -> None:
    model, itself = chatting(), nested(1)
    itself += [itself, itself]
    with lmstate.Engine(model) as engine:
        session = engine.session("s")
        calls: dict[str, Any] = {
            "chat": model.tokenizer.chat,
            "encode": engine.encode,
            "explain": engine.explain,
            "remember": lambda said: engine.remember([*said, {"role": "assistant", "content": "y"}], [1, 2]),
            "submit": lambda said: engine.submit(said, max_new_tokens=1).result(600),
            "send": lambda said: session.send(said, max_new_tokens=1).result(600),
        }
        for call in calls.values():
            call([{"role": "user", "content": "x", place: nested(254)}])  # and the two around it
        held = session.tokens
        for value in (nested(255), nested(5000), itself):
            for call in calls.values():
                with pytest.raises(ValueError, match="nested more than 256 deep"):
                    call([{"role": "user", "content": "x", place: value}])
            with pytest.raises(ValueError, match="variables of the template are nested more than 256 deep"):
                engine.encode([said("user", "x")], tools=[value])
        assert session.tokens == held and session.send("on", max_new_tokens=1).result(600).tokens


def test_messages_that_are_added_to_while_they_are_answered_are_not_what_was_answered() -> None:
    model = chatting("llama")
    with lmstate.Engine(model) as engine, lmstate.Engine(model) as other:
        go = Event()
        engine.call(lambda _: go.wait(600))
        messages = [said("user", "one")]
        request = engine.submit(messages, seed=1, **HOT)
        messages.append(said("user", "two"))
        go.set()
        messages += [said("assistant", request.result(600).texts[0]), said("user", "three")]
        assert engine.encode(messages) == other.encode(messages)


def test_what_a_session_stood_on_takes_no_bytes_once_it_had_to_go() -> None:
    model, first = ours("llama"), prompt(40, 1)
    with lmstate.Engine(model) as engine:
        session = engine.session("one")
        session.send(first, max_new_tokens=4).result(600)
        engine.call(lambda _: engine._reuse.prefixes.shrink(0)).result(600)
        stats = engine.stats()
        assert (stats["prefix_bytes"], stats["row_bytes"]) == (0, 0)
        held = session.tokens
        got = session.send([5, 6], max_new_tokens=4).result(600)
        assert got.tokens == [alone(model, [*held, 5, 6], 4)[0]]


def test_a_text_like_the_first_one_goes_on_as_any_other() -> None:
    with lmstate.Engine(chatting()) as engine:
        session = engine.session("x")
        for count, told in enumerate(("yes", "no", "yes"), 1):
            session.send(told, max_new_tokens=2).result(60)
            assert [message["content"] for message in session.messages[::2]] == ["yes", "no", "yes"][:count]


def test_ids_after_messages_leave_a_session_that_forks_is_saved_and_survives(tmp_path: Path) -> None:
    model = chatting()
    with lmstate.Engine(model, store=tmp_path / "store") as engine:
        session = engine.session("x")
        session.send("hello", max_new_tokens=3).result(60)
        session.send([9, 10, 11], max_new_tokens=3).result(60)
        tokens = session.tokens
        assert session.fork("y").tokens == tokens
        session.save(tmp_path / "file")
        assert engine.load_session("z", tmp_path / "file").tokens == tokens
    with lmstate.Engine(model, store=tmp_path / "store") as engine:
        assert engine.sessions() == ["x", "y", "z"]
        again = engine.session("x")
        assert again.tokens == tokens
        again.undo()
        assert 0 < len(again.tokens) < len(tokens) and again.tokens == tokens[: len(again.tokens)]


@pytest.mark.parametrize("case", ["llama", "qwen3_next-dense"])
def test_an_answer_that_was_cut_goes_on_as_the_reader_saw_it(case: str) -> None:
    model = chatting(case)
    with lmstate.Engine(model) as engine:
        session = engine.session("x")
        session.send("hello there", seed=3, **HOT).result(60)
        request = session.send("go on", seed=4, **HOT)
        got = request.result(60)
        assert len(got.tokens[0]) > 6, "an answer that is too short to be cut"
        seen = got.tokens[0][:-5]
        text, whole = model.tokenizer.decode(seen), session.record
        for outside in (0, len(request.prompt) + len(got.tokens[0]) + 1):
            with pytest.raises(lmstate.RewindError, match="the last turn has positions"):
                session.cut(outside, "")
        session.cut(at := len(request.prompt) + len(seen), text)
        assert session.tokens == [*request.prompt, *seen]
        assert session.messages == [*whole.messages[:-1], said("assistant", text)]
        cut = session.record
        following = session.send("why?", max_new_tokens=3)
        assert following.prompt[:at] == [*request.prompt, *seen]
        assert following.result(60).usage.reused >= (at if case == "llama" else len(request.prompt)) - 1
        session.restore(whole)
        assert (session.tokens, session.messages) == (whole.tokens, whole.messages)
        again = session.send("why?", max_new_tokens=3)
        assert again.prompt[: len(whole.tokens)] == whole.tokens
        again.result(60)
        running = session.send("more", max_new_tokens=200, ignore_eos=True)
        for change in (lambda: session.restore(cut), lambda: session.cut(at, "")):
            with pytest.raises(SessionBusy):
                change()
        running.result(60)
        session.restore(cut)
        session.undo()
        assert session.messages == cut.messages[:2]


def test_a_cut_parts_no_picture() -> None:
    picture = Media.of(torch.zeros(4, chatting().config.hidden_size), 7)
    asked = Record([1, 7, 7, 7, 7, 2, 3], [said("user", "what?"), said("assistant", "a cat")])
    asked.turns, asked.media = [Moment(0, 0)], [MediaSpan(1, picture)]
    with lmstate.Engine(chatting()) as engine:
        session = engine.session("x")
        session.restore(asked)
        for inside in (1, 3, 5):
            with pytest.raises(lmstate.RewindError, match="the last turn has positions 6 to 7"):
                session.cut(inside, "")
        assert session.record == asked
        session.cut(6, "a")
        assert session.record.media == asked.media and session.tokens == asked.tokens[:6]


def test_forks_tell_what_they_were_forked_from(tmp_path: Path) -> None:
    with lmstate.Engine(chatting(), store=tmp_path / "store") as engine:
        session = engine.session("main")
        session.send("hello", max_new_tokens=3).result(60)
        side = session.fork("side")
        assert (session.parent, side.parent, side.fork("below").parent) == (None, "main", "side")
        side.restore(session.record)
        assert side.parent == "main"
    with lmstate.Engine(chatting(), store=tmp_path / "store") as engine:
        assert {name: engine.session(name).parent for name in engine.sessions()} == {
            "main": None, "side": "main", "below": "side",
        }  # fmt: skip
    with pytest.raises(ValueError, match="parent"):
        Record.from_json([], '{"messages": [], "turns": [], "marks": [], "parent": 3}')


def test_a_mark_keeps_its_messages_however_many_turns_follow() -> None:
    with lmstate.Engine(chatting()) as engine:
        session = engine.session("x")
        session.send("hello", max_new_tokens=2).result(60)
        at, messages = session.mark(), session.messages
        for _ in range(66):
            session.send("a", max_new_tokens=1).result(60)
        session.rewind(at)
        assert session.messages == messages
        asked = session.send("hi", max_new_tokens=1)
        assert engine.model.tokenizer.decode(asked.prompt, False).endswith("[user]hi<end>[assistant]")
        asked.result(60)


def test_a_session_of_another_engine_or_one_that_was_closed_takes_nothing() -> None:
    model = chatting()
    with lmstate.Engine(model) as one, lmstate.Engine(model) as other:
        session = one.session("x")
        session.send("hello", max_new_tokens=2).result(60)
        before = session.tokens
        with pytest.raises(lmstate.StateError, match="another engine"):
            other.submit("hello", session=session)
        assert session.tokens == before
        session.close()
        for use in (lambda: session.send("more"), session.mark, lambda: session.fork("y")):
            with pytest.raises(lmstate.StateError, match="was closed"):
                use()
        assert one.sessions() == []
        assert one.session("x").tokens == []


@pytest.mark.parametrize("name", [None, 5, b"x", "\ud800"])
def test_what_cannot_be_written_is_no_name_of_a_session(name: object) -> None:
    with lmstate.Engine(chatting()) as engine:
        with pytest.raises(ValueError, match="a name is a str"):
            engine.session(name)  # type: ignore[arg-type]
        assert engine.sessions() == []


def test_a_session_that_filled_the_model_holds_no_token_more(tmp_path: Path) -> None:
    model = ours("gpt2")
    most = model.max_positions
    assert most is not None
    with lmstate.Engine(model) as engine:
        session = engine.session("x")
        got = session.send(prompt(most - 3, 1), max_new_tokens=20, ignore_eos=True).result(60)
        assert got.finished == ["capacity"]
        assert len(session.tokens) == most
        session.save(tmp_path / "file")


def test_policies_given_by_a_function_find_what_they_stored(tmp_path: Path) -> None:
    model = ours("llama")
    reused = []
    for _ in range(2):
        with lmstate.Engine(model, store=tmp_path, kv=lambda layer: lmstate.kv.Quantized(8)) as engine:
            reused.append(engine.submit(prompt(200, 1), max_new_tokens=2).result(60).usage.reused)
    assert reused[0] == 0 and reused[1] > 100


def test_marks_that_were_stored_as_positions_alone_are_read() -> None:
    record = Record.from_json([5, 6, 7], '{"messages": [], "turns": [[1, 0]], "marks": [2, [3, 0]]}')
    assert record.marks == [Moment(2, 0), Moment(3, 0)]
    with pytest.raises(ValueError, match="marks lie in"):
        Record.from_json([5, 6, 7], '{"messages": [], "turns": [], "marks": [4]}')


@pytest.mark.parametrize("given", [5, None, torch.tensor([[1], [2]])], ids=str)
def test_what_cannot_be_said_is_refused_and_changes_nothing(given: object) -> None:
    with lmstate.Engine(ours("llama")) as engine:
        session = engine.session("a")
        session.send([1, 2], max_new_tokens=2).result(600)
        held = session.tokens
        with pytest.raises(ValueError, match="prompt"):
            session.send(given)  # type: ignore[arg-type]
        assert session.tokens == held
        session.send(torch.tensor([3, 4]), max_new_tokens=1).result(600)  # type: ignore[arg-type]
        assert session.tokens[: len(held) + 2] == [*held, 3, 4]
