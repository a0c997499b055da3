"""Branches of a chat on real states: going back, elsewhere and to disk, the state is what the conversation says."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import Result
from typer.testing import CliRunner

import lmstate
from lmstate.cli.app import app
from lmstate.cli.chat.conversation import ChatConversation
from lmstate.cli.chat.slash_commands import COMMANDS, AskQuestion, run_command
from lmstate.engine.session_record import Record
from tests.cli.scripted import Templated
from tests.waiting import ctrl_c
from tests.zoo import VOCAB, ours

EOS = VOCAB - 1


class Stream:
    def push(self, token: int) -> str:
        return Letters().decode([token])

    def flush(self) -> str:
        return ""

    def follow(self, tokens: Iterable[int]) -> None:
        pass


class Letters(Templated):
    """Printable ASCII and the newline, one id each."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1 if letter == "\n" else ord(letter) - 30 for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join("\n" if i == 1 else chr(i + 30) if 2 <= i < 97 else "" for i in ids)

    def stream(self) -> Stream:
        return Stream()

    def chat_text(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = "".join(f"<{message['role'][0]}>{message['content']}</>" for message in messages)
        return text + "<a>" * add_generation_prompt


def talking(case: str) -> lmstate.Model:
    """A model of the zoo that never ends an answer by itself."""
    return dataclasses.replace(ours(case), _tokenizer=cast(Any, Letters()), eos_ids=frozenset())


@pytest.fixture(params=["llama", "qwen3_next"])
def conversation(request: pytest.FixtureRequest) -> ChatConversation:
    return ChatConversation(talking(request.param), max_new_tokens=6)


def ask(conversation: ChatConversation, question: str) -> str:
    return "".join(conversation.ask(question))


def command(conversation: ChatConversation, line: str) -> str:
    return run_command(line, COMMANDS, conversation)


def check(conversation: ChatConversation) -> None:
    """What follows its tokens is what follows them on a fresh state."""
    tokens = conversation.session.tokens
    if tokens:
        got = conversation.engine.submit(tokens, max_new_tokens=4).result(60)
        assert got.texts[0] == conversation.model.generate(tokens, max_new_tokens=4)


def test_undone_turns_cost_nothing_and_never_happened(conversation: ChatConversation) -> None:
    first = ask(conversation, "one two three four five six seven eight nine ten")
    held = conversation.session.tokens
    second = ask(conversation, "and then there were quite a few more words in the second one")
    told = command(conversation, "/undo")
    assert told.startswith("took back 1 turn; ")
    assert conversation.session.tokens == held
    cost = int(told.split("; ")[1].split()[0].replace("nothing", "0"))
    assert cost <= 1, "the last token of the turn before it may not be read yet"
    check(conversation)
    assert ask(conversation, "and then there were quite a few more words in the second one") == second
    command(conversation, "/undo 2")
    assert conversation.messages == [] and conversation.session.tokens == []
    assert ask(conversation, "one two three four five six seven eight nine ten") == first
    with pytest.raises(ValueError, match=r"^2 turns cannot be taken back; there is 1$"):
        command(conversation, "/undo 2")


def test_turns_are_counted_by_their_questions(conversation: ChatConversation) -> None:
    with pytest.raises(ValueError, match=r"^1 turn cannot be taken back; there are 0$"):
        command(conversation, "/undo")
    rules = [{"role": "system", "content": text} for text in ("one", "two")]
    conversation.session.restore(Record(messages=list(rules)))  # as a file may have it
    ask(conversation, "three")
    with pytest.raises(ValueError, match=r"^2 turns cannot be taken back; there is 1$"):
        command(conversation, "/undo 2")
    command(conversation, "/undo")
    assert conversation.messages == rules
    check(conversation)


def test_the_first_question_may_be_asked_again(conversation: ChatConversation) -> None:
    for question in ("one", "two", "one"):
        ask(conversation, question)
    assert [each["content"] for each in conversation.messages if each["role"] == "user"] == ["one", "two", "one"]
    check(conversation)


def test_a_conversation_with_a_new_system_message_can_be_cleared_and_comes_back(conversation: ChatConversation) -> None:
    ask(conversation, "one")
    command(conversation, "/system Be brief.")
    messages = conversation.messages
    command(conversation, "/clear")
    assert len(conversation.messages) == 1
    command(conversation, "/undo")
    assert conversation.messages == messages


def test_a_question_without_an_answer_leaves_what_was_cleared(
    conversation: ChatConversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(conversation, "one")
    messages = conversation.messages
    command(conversation, "/clear")

    def refuse(self: Letters, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        raise lmstate.ModelError("the template does not accept this")

    with monkeypatch.context() as patched, pytest.raises(lmstate.ModelError):
        patched.setattr(Letters, "chat_text", refuse)
        ask(conversation, "two")
    command(conversation, "/undo")
    assert conversation.messages == messages
    command(conversation, "/clear")
    ask(conversation, "two")
    command(conversation, "/undo")
    assert conversation.messages == [], "after an answer it takes back that turn"


def test_a_question_that_the_template_refuses_leaves_no_trace(
    conversation: ChatConversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(conversation, "one")
    ask(conversation, "two")
    messages, tokens = list(conversation.messages), conversation.session.tokens

    def refuse(self: Letters, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        raise lmstate.ModelError("the template does not accept this")

    monkeypatch.setattr(Letters, "chat_text", refuse)
    for pieces in (conversation.ask("three"), conversation.edit("three")):
        with pytest.raises(lmstate.ModelError):
            list(pieces)
    assert (conversation.messages, conversation.session.tokens) == (messages, tokens)


def test_a_file_that_cannot_be_written_is_named(conversation: ChatConversation, tmp_path: Path) -> None:
    ask(conversation, "one")
    path = tmp_path / "none" / "chat"
    with pytest.raises(FileNotFoundError) as error:
        command(conversation, f"/save {path}")
    assert error.value.filename == str(path) and ".part" not in str(error.value)
    with pytest.raises(IsADirectoryError, match="name a file in it"):  # and not that --force would replace it
        command(conversation, f"/save {tmp_path}")


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Files of this process cannot grow beyond a few bytes, as on a disk that is about to be full."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("case", ["llama", "qwen3_next"])
def test_a_chat_whose_disk_is_full_goes_on(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    model, old = talking(case), tmp_path / "old"
    monkeypatch.setattr(lmstate, "load", lambda *_, **__: model, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def chat(*lines: str) -> Result:
        return CliRunner().invoke(app, ["chat", "m", "-n", "6"], input="".join(f"{line}\n" for line in lines))

    first = chat("one", f"/save {old}", "two")
    assert first.exit_code == 0
    saved = old.read_bytes()
    request.getfixturevalue("full_disk")
    second = chat("one", f"/save {tmp_path / 'new'}", f"/save --force {old}", "two")
    assert second.exit_code == 1 and "2 of the questions and commands failed" in second.stderr
    assert f"lmstate: {tmp_path / 'new'}: " in second.stderr and f"lmstate: {old}: " in second.stderr
    assert ".part" not in second.stderr
    told = [line for line in first.stdout.splitlines() if not line.startswith("saved ")]
    assert second.stdout.splitlines() == told, "the conversation went on as without the files"
    assert [*tmp_path.iterdir()] == [old] and old.read_bytes() == saved


def test_edited_question_takes_the_place_of_the_last(conversation: ChatConversation) -> None:
    ask(conversation, "one")
    plain = ChatConversation(conversation.model, max_new_tokens=6)
    ask(plain, "one")
    ask(conversation, "two")
    with pytest.raises(AskQuestion) as edited:
        command(conversation, "/edit three")
    assert "".join(conversation.edit(edited.value.question)) == ask(plain, "three")
    assert conversation.messages == plain.messages
    check(conversation)


@pytest.mark.parametrize("stop", ["it fails", "Ctrl-C"])
def test_an_edited_question_without_an_answer_leaves_the_last_turn(
    conversation: ChatConversation, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(conversation, "one")
    ask(conversation, "two")
    messages, tokens = conversation.messages, conversation.session.tokens

    call = type(conversation.model).__call__

    def fail(*given: Any, **options: Any) -> Any:  # on the thread of the engine
        if stop == "it fails":
            raise ValueError("the state is full")
        press()
        return call(*given, **options)

    with ctrl_c() as press, monkeypatch.context() as patched:
        patched.setattr(type(conversation.model), "__call__", fail)
        with pytest.raises((ValueError, KeyboardInterrupt)):
            list(conversation.edit("three"))
    assert conversation.messages == messages and conversation.session.tokens == tokens
    check(conversation)
    plain = ChatConversation(conversation.model, max_new_tokens=6)
    for question in ("one", "two"):
        ask(plain, question)
    assert ask(conversation, "four") == ask(plain, "four")


def test_branches_go_on_apart(conversation: ChatConversation) -> None:
    ask(conversation, "one")
    command(conversation, "/fork side")
    ask(conversation, "left")
    left = conversation.session.tokens
    command(conversation, "/switch main")
    ask(conversation, "right")
    check(conversation)
    assert conversation.messages[2]["content"] == "right"
    tree = command(conversation, "/tree").splitlines()
    assert re.fullmatch(r'main ".+": \d+ tokens \(here\)', tree[0])
    assert tree[1].startswith('└─ side "left": ') and "shared with main" in tree[1]
    told = command(conversation, "/switch side")
    assert told.startswith(f"on side, {len(left)} tokens; ")
    assert conversation.session.tokens == left
    assert conversation.messages[2]["content"] == "left"
    check(conversation)
    for line in ("/fork side", "/fork", "/switch side", "/switch nowhere"):
        with pytest.raises(ValueError):
            command(conversation, line)


def test_saved_conversation_goes_on_in_another_process(conversation: ChatConversation, tmp_path: Path) -> None:
    ask(conversation, "one")
    held = len(conversation.session.tokens)
    path = tmp_path / "chat.lmstate"
    assert "saved" in command(conversation, f"/save {path}")
    later = ChatConversation(conversation.model, max_new_tokens=6)
    command(later, f"/load {path}")
    assert later.messages == conversation.messages
    assert ask(later, "two") == ask(conversation, "two")
    assert later.report is not None and conversation.report is not None
    # Random text may not be cut into its own tokens again. A recurrent layer then has to go back, and a file holds no
    # earlier carries to go back to; but what is all reused without the file is all reused with it.
    if conversation.report.reused >= held - 1:
        assert (later.report.fed, later.report.reused) == (conversation.report.fed, conversation.report.reused)
    check(later)
    snapshot = lmstate.Snapshot.load(path)
    for notes in ("", "[]", '{"messages": [{"role": "root", "content": "x"}]}', '{"messages": [3]}'):
        dataclasses.replace(snapshot, notes=notes).save(path)
        with pytest.raises(ValueError, match="not of a conversation"):
            command(later, f"/load {path}")
    with pytest.raises(FileNotFoundError):
        command(later, f"/load {tmp_path / 'none'}")
    check(later)


def test_a_saved_conversation_is_a_session_of_an_engine_and_the_reverse(tmp_path: Path) -> None:
    conversation = ChatConversation(talking("qwen3_next"), max_new_tokens=6)
    ask(conversation, "one")
    command(conversation, f"/save {tmp_path / 'chat'}")
    with lmstate.Engine(conversation.model) as engine:
        session = engine.load_session("taken", tmp_path / "chat")
        assert (session.messages, session.tokens) == (conversation.messages, conversation.session.tokens)
        session.save(tmp_path / "session")
    later = ChatConversation(conversation.model, max_new_tokens=6)
    command(later, f"/load {tmp_path / 'session'}")
    assert later.messages == conversation.messages
    assert ask(later, "two") == ask(conversation, "two")
    with lmstate.Engine(conversation.model) as engine:
        plain = engine.session("plain")
        plain.send([5, 6, 7], max_new_tokens=2).result(60)
        plain.save(tmp_path / "plain")
    messages = later.messages
    with pytest.raises(ValueError, match=r"it has no messages$"):
        command(later, f"/load {tmp_path / 'plain'}")
    assert later.messages == messages


@pytest.mark.parametrize("name", ["chat.lmstate", "monday", "chat.lms"])
def test_inspect_describes_a_snapshot(conversation: ChatConversation, name: str, tmp_path: Path) -> None:
    ask(conversation, "one")
    path = tmp_path / name
    command(conversation, f"/save {path}")
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exit_code == 0
    assert f"{conversation.held} (1 to recompute)" in result.stdout
    assert conversation.model.config.family in result.stdout
    assert "unknown" in result.stdout.splitlines()[1]  # a model that was not loaded has no name


def test_a_chat_keeps_keys_and_values_in_few_bits_after_a_reset_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = talking("llama")
    monkeypatch.setattr(lmstate, "load", lambda name, weights, **_: model, raising=False)
    options = ["chat", "m", "--kv-bits", "2", "-n", "6", "--no-stats", "--threads", "1"]
    result = CliRunner().invoke(app, options, input="Hello there\n/clear\nHello there\n")
    ids = Letters().chat([{"role": "user", "content": "Hello there"}], True)
    few = model.generate(ids, state=model.new_state(kv=lmstate.kv.Quantized(2)), max_new_tokens=6)
    assert few != model.generate(ids, max_new_tokens=6), "the bits show"
    assert result.exit_code == 0 and result.stdout.count(few) == 2
