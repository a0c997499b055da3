"""`lmstate generate --image` and `/image` of a chat: the answers are those of a state that reads it all at once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lmstate
from lmstate.cli.app import app
from lmstate.cli.chat.conversation import ChatConversation
from lmstate.cli.chat.messages import messages_of
from lmstate.cli.chat.slash_commands import COMMANDS, AskQuestion, complete, run_command
from lmstate.vision.reader import PicturePrompt
from tests.cli.scripted import scripted
from tests.vision.test_encode import png, said, saved
from tests.zoo import ours

FIRST, SECOND = png(20, 30), png(40, 17, seed=1)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> lmstate.Model:
    folder = tmp_path_factory.mktemp("llava")
    saved(folder)
    return lmstate.load(folder, weights="float32")


@pytest.fixture
def files(tmp_path: Path, seeing: lmstate.Model, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two pictures; `lmstate.load` gives the model that sees them."""
    monkeypatch.setattr(lmstate, "load", lambda name, weights, **_: seeing, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    paths = [tmp_path / "first.png", tmp_path / "second png"]
    for path, content in zip(paths, (FIRST, SECOND)):
        path.write_bytes(content)
    return list(map(str, paths))


def generate(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["generate", "m", *map(str, arguments)], input="")
    assert result.exit_code == code, result.stderr
    return result.stderr if code else result.stdout


def answer(model: lmstate.Model, messages: list[dict[str, Any]], count: int = 6) -> str:
    prompt = model.encode(messages)
    prompt.place(state := model.new_state())
    return model.generate(prompt.tokens, state=state, max_new_tokens=count, temperature=0.0)


def test_pictures_stand_in_front_of_the_prompt(seeing: lmstate.Model, files: list[str], tmp_path: Path) -> None:
    one, two = files
    told = json.loads(generate("what is this?", "--image", one, "--image", two, "-n", 6, "--json"))
    messages = said(FIRST, SECOND, "what is this?")
    assert told["text"] == answer(seeing, messages)
    assert told["usage"]["prompt"] == len(seeing.encode(messages))
    assert generate("--image", two, "-n", 6)[:-1] == answer(seeing, said(SECOND))
    state = tmp_path / "state"
    begun = generate("what is this?", "--image", one, "-n", 6, "--save-state", state)[:-1]
    more = json.loads(
        generate("and this?", "--state", state, "--image", two, "-n", 6, "--json", "--save-state", state, "--force")
    )
    messages = [*said(FIRST, "what is this?"), {"role": "assistant", "content": begun}, *said(SECOND, "and this?")]
    assert more["text"] == answer(seeing, messages) and more["usage"]["reused"] > 16
    messages.append({"role": "assistant", "content": more["text"]})
    assert messages_of(lmstate.Snapshot.load(state)) == messages


def test_pictures_that_cannot_be_read_are_told(
    seeing: lmstate.Model, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("no picture")
    (tmp_path / "saved").write_bytes(b"")
    assert "no such file" in generate("?", "--image", tmp_path / "none.png", code=1)
    told = generate("?", "--image", tmp_path / "text", code=1)
    assert f"{tmp_path / 'text'}: a picture has another format than PNG, JPEG, WEBP, GIF, or is damaged" in told
    for other in (["--raw"], ["--source", "x"]):
        assert "--image goes with a question" in generate("?", "--image", files[0], *other, code=2)
    generate("--raw", "Once", "-n", 1, "--save-state", tmp_path / "saved", "--force")
    assert "leave out --image" in generate("?", "--image", files[0], "--state", tmp_path / "saved", code=1)
    blind = dataclasses.replace(ours("qwen2_vl"), _tokenizer=seeing.tokenizer)
    monkeypatch.setattr(lmstate, "load", lambda *_, **__: blind, raising=False)
    assert "pictures are read by models of checkpoint folders" in generate("?", "--image", files[0], code=1)


def test_a_chat_shows_pictures(seeing: lmstate.Model, files: list[str], tmp_path: Path) -> None:
    conversation = ChatConversation(seeing, max_new_tokens=6)

    def command(line: str) -> str:
        return run_command(line, COMMANDS, conversation)

    def ask(question: str, talk: ChatConversation = conversation) -> str:
        """The answer, which is the one to the prompt that the session has, pictures in their places included."""
        text = "".join(talk.ask(question))
        record, report = talk.session.record, talk.report
        assert report is not None and text == record.messages[-1]["content"]
        prompt = PicturePrompt(record.tokens[: len(record.tokens) - report.generated], tuple(record.media))
        prompt.place(state := seeing.new_state())
        assert text == seeing.generate(prompt.tokens, state=state, max_new_tokens=6, temperature=0.0)
        rendered = seeing.encode([*talk.messages[:-1]])
        assert [span.media for span in rendered.media] == [span.media for span in prompt.media]
        return text

    one, two = files
    messages: list[dict[str, Any]] = []
    for pictures, question in (([], "hello"), ([one], "what is this?"), ([], "sure?"), ([two, one], "and these?")):
        for index, file in enumerate(pictures, 1):
            assert command(f"/image {file}").startswith(f"{index} picture")
        messages += (
            said(*(Path(file).read_bytes() for file in pictures), question)
            if pictures
            else [{"role": "user", "content": question}]
        )
        text = ask(question)
        messages.append({"role": "assistant", "content": text})
        assert conversation.messages == messages
    assert conversation.report is not None and conversation.report.reused > 16
    assert "> [picture] what is this?" in command("/history")
    command(f"/save {tmp_path / 'talk'}")
    with pytest.raises(AskQuestion) as again:
        command("/regen")
    assert "".join(conversation.edit(again.value.question)) == text and conversation.messages == messages
    other = "".join(conversation.edit("other"))
    assert conversation.messages == [
        *messages[:-2],
        *said(SECOND, FIRST, "other"),
        {"role": "assistant", "content": other},
    ]
    command("/undo 3")
    assert conversation.messages == messages[:2] and not conversation.session.record.media
    command(f"/image {two}")
    ask("else")
    assert conversation.messages[:-1] == [*messages[:2], *said(SECOND, "else")]
    later = ChatConversation(seeing, max_new_tokens=6)
    later.load(tmp_path / "talk")
    assert later.messages == messages and len(later.session.record.media) == 3
    ask("more", later)


def test_a_chat_refuses_what_is_no_picture(seeing: lmstate.Model, files: list[str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no picture")
    lines = ["/image", f"/image {tmp_path / 'none'}", f"/image {tmp_path / 'text'}", f"/image {files[0]}", "hi"]
    result = CliRunner().invoke(
        app, ["chat", "m", "-n", "6", "--no-stats"], input="".join(f"{line}\n" for line in lines)
    )
    assert result.exit_code == 1 and "3 of the questions and commands failed" in result.stderr
    for told in ("/image needs a file name", "no such file", "a picture has another format"):
        assert told in result.stderr
    assert result.stdout.splitlines()[1:] == answer(seeing, said(FIRST, "hi")).splitlines()
    conversation = ChatConversation(seeing, max_new_tokens=6)
    assert complete(f"/image {tmp_path}/fi", COMMANDS, conversation) == [f"/image {files[0]}"]
    conversation.files = [FIRST] * 65
    with pytest.raises(lmstate.StateError, match="64"):
        list(conversation.ask("?"))
    assert conversation.messages == [] == conversation.files
    blind = ChatConversation(scripted())
    with pytest.raises(lmstate.UnsupportedError, match="pictures are read by"):
        run_command(f"/image {files[0]}", COMMANDS, blind)
    assert not blind.files
