"""`lmstate chat`: the state goes on from turn to turn, and is always what the template of the conversation says."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, redirect_stdout
from itertools import islice
from pathlib import Path
from time import sleep

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lmstate.cli.app import app
from lmstate.cli.chat.command import answer, talk
from lmstate.cli.chat.conversation import ChatConversation
from lmstate.cli.chat.input import Typed, _edit_lines
from lmstate.cli.chat.slash_commands import COMMANDS, AskQuestion, complete, run_command
from tests.cli.scripted import ChatTokenizer, ScriptedModel


def turns(conversation: ChatConversation) -> list[tuple[str, str]]:
    """(question, answer) of every turn."""
    spoken = [message["content"] for message in conversation.messages if message["role"] != "system"]
    return list(zip(spoken[::2], spoken[1::2]))


def chat(runner: CliRunner, *lines: str, options: Sequence[str] = ()):  # type: ignore[no-untyped-def]
    return runner.invoke(app, ["chat", "m", *options], input="".join(f"{line}\n" for line in lines))


@pytest.fixture
def talker(model: ScriptedModel) -> Iterator[ChatConversation]:
    conversation = ChatConversation(model, "S")
    yield conversation
    conversation.close()


def test_the_second_turn_feeds_only_what_is_new(model: ScriptedModel, runner: CliRunner) -> None:
    result = chat(runner, "one", "two", options=["--draft", "none"])
    assert result.exit_code == 0 and result.stdout == "You said one.\nYou said two.\n"
    first = len(model.tokenizer.chat([{"role": "user", "content": "one"}], True))
    new = len("[end]\n[user]two[end]\n[assistant]")
    held = first + len("You said one.")
    assert result.stderr.splitlines()[0].startswith(f"[{first} tokens fed · 0 reused · 13 generated")
    assert result.stderr.splitlines()[1].startswith(f"[{new} tokens fed · {held} reused · 13 generated")
    assert model.fed == first + new + 2 * 13 + 1  # with one that the engine reads as it begins


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns_=st.lists(
        st.tuples(st.text("abé€ ", min_size=1, max_size=5), st.none() | st.integers(1, 12)), min_size=1, max_size=5
    ),
    trims=st.booleans(),
    limit=st.integers(1, 20),
)
def test_each_turn_is_computed_from_the_rendered_conversation(
    talker: ChatConversation, turns_: list[tuple[str, int | None]], trims: bool, limit: int
) -> None:
    """Whatever was cut short before, and also for a template that rewrites what was said."""

    class Trimming(ChatTokenizer):
        def chat_text(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
            short = [{**m, "content": m["content"].strip()[:3]} for m in messages[:-1]]
            return super().chat_text([*short, messages[-1]], add_generation_prompt)

    talker.model.tokenizer = Trimming() if trims else ChatTokenizer()
    talker.clear()
    talker.set("max_tokens", limit)
    for question, stop_after in turns_:
        before = list(talker.messages)
        with closing(talker.ask(question)) as pieces:
            text = "".join(islice(pieces, stop_after))
        rendered = talker.model.tokenizer.chat([*before, {"role": "user", "content": question}], True)
        held = talker.session.tokens
        assert held[: len(rendered)] == rendered
        assert talker.messages[-1]["content"] == text
        assert talker.model.tokenizer.decode(held[len(rendered) :]) == text
    assert len(turns(talker)) == len(turns_)


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(model: ScriptedModel, runner: CliRunner) -> None:
    script = model.script

    def interrupt(held: list[int]) -> int:
        if model.tokenizer.decode(held).endswith("one[end]\n[assistant]You"):
            signal.raise_signal(signal.SIGINT)
            sleep(0.3)  # the reader hears of it before the next token
        return script(held)

    model.script = interrupt
    result = chat(runner, "one", "/history", "two", options=["--draft", "none"])
    cut = result.stdout.splitlines()[0]
    assert result.exit_code == 0 and "You said one.".startswith(cut) and cut != "You said one."
    assert result.stdout == f"{cut}\n> one\n{cut}\nYou said two.\n", "the conversation has what was seen"
    assert "(stopped)" in result.stderr
    fed = len("[end]\n[user]two[end]\n[assistant]")
    assert any(f"[{more} tokens fed" in result.stderr for more in (fed, fed + 1)), "the last token may not be read yet"


@pytest.mark.parametrize("instead", [False, True])
def test_ctrl_c_twice_in_one_step_leaves_the_conversation_as_it_was(model: ScriptedModel, instead: bool) -> None:
    with closing(ChatConversation(model)) as conversation:
        for question in ("one", "two"):
            list(conversation.ask(question))
        before, script, pressed = conversation.session.record, model.script, list[int]()

        def interrupt(held: list[int]) -> int:
            if not pressed:  # the second one comes while the first waits for the end of this step
                for time in (1, 2):
                    pressed.append(time)
                    os.kill(os.getpid(), signal.SIGINT)
                    sleep(0.3)
            return script(held)

        model.script = interrupt
        answer(conversation, "three", stats=False, instead=instead)
        assert len(pressed) == 2 and conversation.messages == before.messages
        assert conversation.session.tokens == before.tokens
        assert "".join(conversation.ask("four")) == "You said four."


def test_a_turn_that_fails_is_told_and_the_next_one_answers(model: ScriptedModel, runner: CliRunner) -> None:
    script = model.script

    def fail(held: list[int]) -> int:
        if model.tokenizer.decode(held).endswith("one[end]\n[assistant]Y"):
            raise ValueError("the state is full; /clear begins again")
        return script(held)

    model.script = fail
    result = chat(runner, "one", "two")
    assert result.stdout == "Y\nYou said two.\n" and "lmstate: the state is full" in result.stderr


def test_a_question_without_any_answer_leaves_no_trace(model: ScriptedModel) -> None:
    conversation = ChatConversation(model)
    model.fail_at = model.calls + 1
    with pytest.raises(RuntimeError):
        list(conversation.ask("one"))
    model.fail_at = None
    assert conversation.messages == []
    assert "".join(conversation.ask("two")) == "You said two."


def test_commands_are_listed_run_and_refused(model: ScriptedModel, runner: CliRunner) -> None:
    lines = [
        "/help",
        "one",
        "/tokens",
        "/memory",
        "/clear",
        "/tokens",
        "/nonsense",
        "/clear now",
        "two",
        "/exit",
        "three",
    ]
    result = chat(runner, *lines)
    assert result.exit_code == 1  # two of them failed
    for expected in ("/memory", "messages", "forgot ", "0 tokens held", "You said two."):
        assert expected in result.stdout
    assert "You said three." not in result.stdout
    assert "no command /nonsense" in result.stderr and "/clear takes no argument" in result.stderr


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("one\\\ntwo", ["one\ntwo"]),
        ("one \\\n  two\\\n\nthree", ["one \n  two", "three"]),
        ("one\\", ["one"]),  # and then the input ends
        ('"""\none\n\n  two \\\n/undo\n"""\nthree', ["one\n\n  two \\\n/undo", "three"]),
        ('"""one\ntwo"""\nthree', ["one\ntwo", "three"]),
        ('"""one"""\n""" """\n""""""', ["one"]),
        ('"""/undo"""', ["/undo"]),
        ('"""one\ntwo', ["one\ntwo"]),
        ('say """one"""', ['say """one"""']),
        ("one\n/edit two\\\nthree", ["one", "two\nthree"]),
    ],
)
def test_messages_may_have_several_lines(
    model: ScriptedModel, runner: CliRunner, typed: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "".join(f"You said {text}.\n" for text in said)
    assert chat(runner, typed).stdout == expected
    # And on a terminal, where lines come from `input`.
    lines = iter(typed.split("\n"))
    prompts = []

    def line(prompt: str) -> str:
        prompts.append(prompt)
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr("lmstate.cli.chat.input.sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("lmstate.cli.chat.input._edit_lines", lambda complete: True)
    conversation = ChatConversation(model)
    with redirect_stdout(io.StringIO()) as out:
        talk(conversation, stats=False)
    assert out.getvalue().strip("\n") == expected.strip("\n")
    assert prompts[0] == "> " and prompts.count("> ") == len(said) + 1 + typed.count('""" """') * 2


def test_ctrl_c_forgets_a_message_that_was_begun(model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(['"""', "one", KeyboardInterrupt, "two", EOFError])

    def line(prompt: str) -> str:
        what = next(typed)
        if isinstance(what, str):
            return what
        raise what

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr("lmstate.cli.chat.input.sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("lmstate.cli.chat.input._edit_lines", lambda complete: True)
    conversation = ChatConversation(model)
    talk(conversation, stats=False)
    assert [question for question, _ in turns(conversation)] == ["two"]
    typed = iter([KeyboardInterrupt, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        talk(conversation, stats=False)


# What a terminal sends for a paste of three lines: with the marks that it was asked for, or without.
PASTE = "one\n two\\\n/undo\nlast"


@pytest.mark.parametrize("readline", [True, False])
def test_a_paste_is_one_message_and_ctrl_c_drops_what_follows(readline: bool) -> None:
    pty = pytest.importorskip("pty")
    script = (
        f"import sys; {readline} or sys.modules.update(readline=None)\n"
        "from lmstate.cli.chat.input import forget_typed_ahead, marked_pastes, read\n"
        "with marked_pastes():\n"
        "    while (typed := read()) is not None:\n"
        "        print(f'{len(typed.text)} {typed}', flush=True)\n"
        "        if typed.text == 'wait': sys.stdin.readline(); forget_typed_ahead()\n"
    )
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", script])
    seen = b""

    def until(expected: bytes) -> None:
        nonlocal seen
        while expected not in seen:
            seen += os.read(terminal, 4096)
        seen = seen.partition(expected)[2]

    try:
        until(b"> ")
        begin, end = (b"\033[200~", b"\033[201~") if readline else (b"", b"")
        os.write(terminal, begin + PASTE.encode() + end + b"\r")
        until(f"{len(PASTE)} {Typed(PASTE, command=False)}".encode())
        until(b"> ")
        os.write(terminal, b"/edit a\\\rb\r" if readline else b"/edit a\nb\n")
        until(f"9 {Typed(chr(10).join(['/edit a', 'b']), command=True)}".encode())
        until(b"> ")
        os.write(terminal, b"wait\r")
        until(b"4 Typed")
        os.write(terminal, b"x\rpasted\rlines\r")  # while an answer comes, and is stopped
        until(b"> ")
        os.write(terminal, b"next\r")
        until(b"4 Typed(text='next'")
    finally:
        os.close(terminal)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def test_a_model_without_a_template_is_refused(model: ScriptedModel, runner: CliRunner) -> None:
    model.tokenizer.has_chat_template = False
    result = chat(runner, "one")
    assert result.exit_code == 1 and "no chat template" in result.stderr and "--raw" in result.stderr


def test_the_demo_reuses_the_first_turn(model: ScriptedModel, runner: CliRunner) -> None:
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 0 and model.asked == [("smollm2", "auto")]
    assert "You said Name the capital of France.." in result.stdout
    assert " 0 reused" in result.stderr.splitlines()[0] and " 0 reused" not in result.stderr.splitlines()[1]


@pytest.mark.parametrize(
    ("lines", "code"),
    [(["one"], 0), (["one", "/tokens", "/exit", "/nonsense"], 0), (["/nonsense", "one"], 1), (["/load nowhere"], 1)],
)
def test_piped_lines_that_failed_show_in_the_exit_code(
    model: ScriptedModel, runner: CliRunner, lines: list[str], code: int
) -> None:
    result = chat(runner, *lines)
    assert result.exit_code == code and ("failed" in result.stderr) == bool(code)
    assert "Errno" not in result.stderr


def test_a_reader_that_leaves_ends_the_chat_quietly(
    model: ScriptedModel, runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("lmstate.cli.chat.command.write_pieces", leave)
    monkeypatch.setattr("lmstate.cli.app._forget_stdout", lambda: None)
    result = chat(runner, "one", "two")
    assert (result.exit_code, result.stderr) == (0, "")


def test_an_edited_question_that_fails_is_told_too(model: ScriptedModel, runner: CliRunner) -> None:
    script = model.script

    def fail(held: list[int]) -> int:
        if model.tokenizer.decode(held).endswith("[user]two[end]\n[assistant]"):
            raise ValueError("the state is full")
        return script(held)

    model.script = fail
    result = chat(runner, "one", "/edit two", "three", options=["--no-stats"])
    assert result.exit_code == 1 and "lmstate: the state is full" in result.stderr
    assert result.stdout.endswith("You said three.\n")


def test_a_transcript_holds_the_questions_too(model: ScriptedModel, runner: CliRunner) -> None:
    result = chat(runner, "one", "two\\", "lines", "/tokens", options=["--transcript", "--no-stats"])
    assert result.exit_code == 0 and result.stderr == ""
    held = len("[user]one[end]\n[assistant]You said one.[end]\n[user]two\nlines[end]\n[assistant]You said two\nlines.")
    assert result.stdout == (
        f"> one\nYou said one.\n> two\n... lines\nYou said two\nlines.\n> /tokens\n{held} tokens held, 4 messages\n"
    )


def test_an_answer_is_given_once_more_with_other_settings_and_another_system_message(model: ScriptedModel) -> None:
    conversation = ChatConversation(model, "S")

    def command(line: str) -> str:
        return run_command(line, COMMANDS, conversation)

    with pytest.raises(ValueError, match="nothing was asked"):
        command("/regen")
    "".join(conversation.ask("one\ntwo"))
    assert command("/history") == "system: S\n> one\n... two\nYou said one\ntwo."
    assert command("/system") == "S"
    command("/system Be brief.")
    assert "temperature 0.7" in command("/set temperature 0.7").splitlines()
    assert "top_k 3" in command("/set top-k 3").splitlines()
    assert "top_k off" in command("/set top_k off").splitlines()
    command("/set max_tokens 3")
    assert (conversation.params.temperature, conversation.params.top_k) == (0.7, None)
    for line in ("/set warmth 1", "/set temperature warm", "/set temperature -1", "/set top_p 7", "/set seed 1.5"):
        before = conversation.params
        with pytest.raises(ValueError):
            command(line)
        assert conversation.params == before
    with pytest.raises(AskQuestion) as asked:
        command("/regen")
    assert "".join(conversation.edit(asked.value.question)) == "You"
    assert [message["content"] for message in conversation.messages] == ["Be brief.", "one\ntwo", "You"]
    held = model.tokenizer.decode(conversation.session.tokens)
    assert held == "[system]Be brief.[end]\n[user]one\ntwo[end]\n[assistant]You"


def test_tab_completes_commands_branches_and_files(model: ScriptedModel, tmp_path: Path) -> None:
    (tmp_path / "talks").mkdir()
    (tmp_path / "talk.lmstate").touch()
    conversation = ChatConversation(model)
    for name in ("left", "lean", "main 2"):
        conversation.fork(name)

    def completed(begun: str) -> list[str]:
        return complete(begun, COMMANDS, conversation)

    assert completed("/s") == ["/save ", "/set ", "/switch ", "/system "]
    assert completed("/set top") == ["/set top_k ", "/set top_p "]
    assert completed("/to") == ["/tokens"]
    assert completed("/") == sorted(f"{each} " if " " in COMMANDS[each].usage else each for each in COMMANDS)
    assert completed("/switch ") == ["/switch lean", "/switch left", "/switch main"]  # not the one that it is on
    assert completed("/switch lef") == ["/switch left"]
    for begun in (f"/load {tmp_path}/ta", f"/save {tmp_path}/ta", f"/save --force {tmp_path}/ta"):
        assert completed(begun) == [f"{begun}lk.lmstate", f"{begun}lks/"]
    assert completed(f"/load {tmp_path}/nowhere/x") == completed("hello") == completed("") == completed("/fork l") == []


def test_readline_asks_for_completions_until_there_are_no_more() -> None:
    readline = pytest.importorskip("readline")
    before = readline.get_completer(), readline.get_completer_delims()
    try:
        _edit_lines(lambda begun: [begun + "a", begun + "b"])
        completer = readline.get_completer()
        assert [completer("/", index) for index in range(3)] == ["/a", "/b", None]
    finally:
        readline.set_completer(before[0])
        readline.set_completer_delims(before[1])
