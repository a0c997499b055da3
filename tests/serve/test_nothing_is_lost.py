"""Everything that a client says of a conversation is in the prompt, or an error names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmstate.checkpoints.huggingface.directory import tokenizer_files
from lmstate.serve.answer.message_forms import is_written, left_out
from lmstate.serve.answer.messages import Call, Chat, Message
from lmstate.serve.answer.renderer import Renderer
from lmstate.serve.tools import Tool
from lmstate.serve.wire.errors import ApiError
from lmstate.text.replay import Replay
from lmstate.text.tokenizer import Tokenizer
from tests.serve.byte_tokenizer import byte_tokenizer, save_tokenizer

TURN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
TOOLS = "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
# What published templates do: write everything, leave earlier calls out, leave the text beside a call out, strip each
# line, refuse several calls, take one system message at the beginning alone, and write no results of tools.
TEMPLATES = {
    "everything": TOOLS + TURN.replace("{{ m.content }}", "{{ m.content }}" + CALLS),
    "no calls": TOOLS + TURN,
    "calls alone": TOOLS
    + TURN.replace("{{ m.content }}", "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"),
    "stripped": TOOLS + TURN.replace("{{ m.content }}", "{{ m.content | trim | replace('  ', ' ') }}" + CALLS),
    "escaped": TOOLS + TURN.replace("{{ m.content }}", "{{ m.content | tojson }}" + CALLS),
    "one call": TOOLS
    + "{% for m in messages %}{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    + "{% endfor %}"
    + TURN.replace("{{ m.content }}", "{{ m.content }}" + CALLS),
    "first system": TOOLS
    + "{% for m in messages %}{% if loop.first or m.role != 'system' %}{{ m.role }}: {{ m.content }}"
    + CALLS
    + "\n{% endif %}{% endfor %}",
    "no results": TOOLS
    + TURN.replace("{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}" + CALLS + "{% endif %}"),
    "no tools": TURN,
}
BOTH = Message(
    "assistant", "Both at once.", calls=(Call("a", "weather", '{"city": "ROMA"}'), Call("b", "time", '{"zone": "CET"}'))
)
SAID = (
    Message("system", "Be BRIEF."),
    Message("user", "Weather and time?"),
    BOTH,
    Message("tool", "SUNNY\n  and dry", call_id="a"),
    Message("tool", 'Noon "sharp"', call_id="b"),
    Message("assistant", "Sunny, noon."),
    Message("system", "Answer LATE."),
    Message("user", "And now?"),
)
PARTS = (
    "BRIEF", "Weather and time", "Both at once", "ROMA", "CET", "SUNNY", "and dry", "Noon", "sharp", "LATE", "And now"
)  # fmt: skip


def made(folder: Path, template: str) -> Renderer:
    return Renderer(byte_tokenizer(folder, template=template), Replay())


@pytest.mark.parametrize("name", TEMPLATES)
def test_all_of_a_conversation_is_in_the_prompt(tmp_path: Path, name: str) -> None:
    text = made(tmp_path, TEMPLATES[name]).prompt(Chat(SAID, (Tool("weather"), Tool("time")))).text
    assert [part for part in PARTS if part not in text] == []


def test_what_no_form_writes_is_refused_by_its_path(tmp_path: Path) -> None:
    renderer = made(tmp_path, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{# tools #}")
    with pytest.raises(ApiError, match=r"leaves out messages\[1\].content"):
        renderer.prompt(Chat((Message("user", "Q"), Message("assistant", "An answer"), Message("user", "R"))))


def test_thoughts_of_earlier_answers_do_not_count() -> None:
    said = [Message("assistant", "<think>Hm.</think>Four."), Message("assistant", "Five.", reasoning="Hm.")]
    assert left_out("Four. Five.", said) is None
    assert left_out("Four.", said) == "messages[1].content"


@pytest.mark.parametrize("part", ["alpha beta", 'say "hi"\nthere', "tab\tand é", "x < y && z"])
def test_a_part_is_found_as_it_stands_or_escaped(part: str) -> None:
    html = json.dumps(part).replace("<", "\\u003c").replace("&", "\\u0026")
    for text in (part, json.dumps(part), json.dumps(part, ensure_ascii=False), html, part.replace("\n", "\n  ")):
        assert is_written(f"before {text} after", part)
    assert not is_written("before after", part)


THINKING = TURN.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}",
)
FORGETS = TURN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")


@pytest.mark.parametrize("template", [THINKING, FORGETS])
@pytest.mark.parametrize("content", ["The answer is", ""])
def test_a_continued_answer_keeps_its_reasoning(tmp_path: Path, template: str, content: str) -> None:
    last = Message("assistant", content, reasoning="Two and two.")
    text = made(tmp_path, template).prompt(Chat((Message("user", "Q"), last), continued=True)).text
    begun = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\nTwo and two."
    assert text == begun + (f"\n</think>\n\n{content}" if content else "")


def test_reasoning_that_has_no_place_is_refused(tmp_path: Path) -> None:
    last = Message("assistant", "The answer is", reasoning="Two and two.")
    with pytest.raises(ApiError, match="reasoning"):
        made(tmp_path, TURN).prompt(Chat((Message("user", "Q"), last), continued=True))


def test_of_several_templates_the_one_for_tools_is_taken_with_tools(tmp_path: Path) -> None:
    for place in ("config", "files"):
        folder = tmp_path / place
        folder.mkdir()
        save_tokenizer(folder, template=TURN)
        if place == "files":
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATES["everything"])
        else:
            config = folder / "tokenizer_config.json"
            settings = json.loads(config.read_text()) if config.is_file() else {}
            both = {"default": TURN, "tool_use": TEMPLATES["everything"]}
            settings["chat_template"] = [{"name": name, "template": text} for name, text in both.items()]
            config.write_text(json.dumps(settings))
        files = tokenizer_files(folder)
        assert files is not None
        renderer = Renderer(Tokenizer(files), Replay())
        asked = (Message("user", "Q"),)
        assert renderer.prompt(Chat(asked, (Tool("weather"),))).text.startswith("TOOLS")
        assert renderer.prompt(Chat(asked)).text.startswith("<|im_start|>user")
