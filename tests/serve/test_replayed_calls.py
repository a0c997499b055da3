"""Calls that a client sends back in words of its own, in any protocol: the prompt has the very tokens of the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmstate.engine import Piece
from lmstate.serve import anthropic
from lmstate.serve.answer.answers import Answer
from lmstate.serve.answer.messages import Chat, Message
from lmstate.serve.answer.renderer import Renderer
from lmstate.serve.answer.service import ChatTask, Service, ToolUse
from lmstate.serve.openai import chat as openai_chat
from lmstate.serve.openai.responses import items as response_items
from lmstate.serve.tools import CallArguments, CallStart, Event
from lmstate.serve.wire.body import read
from lmstate.serve.wire.schema.chat import ChatBody
from lmstate.serve.wire.schema.messages import CountBody
from lmstate.text.replay import Replay
from tests.serve.byte_tokenizer import END, TEMPLATE, byte_tokenizer
from tests.serve.test_tool_formats import BY_NAME, SAMPLES, TOOLS

# A text that templates of the format have, in a comment.
HINTS = {
    "hermes": "<tool_call>",
    "granite": "<|tool_call|>",
    "jamba": "<tool_calls>",
    "nemotron": "<TOOLCALL>",
    "phi": "<|tool_call|> <|/tool_call|>",
    "qwen_xml": "<tool_call> <function= <parameter=",
    "minimax": "minimax:tool_call",
    "dsml": "｜DSML｜",
    "dsml_calls": "｜DSML｜ tool_calls>",
    "dots": "<dots_function_call>",
    "seed": "<seed:tool_call>",
    "minimax_m3": "]<]minimax[>[",
    "glm_4_7": "</arg_key><arg_value>",
    "hy_v3": "<tool_sep> <arg_key>",
    "hy_v3_suffixed": "<tool_sep:opensource> <arg_key:opensource>",
    "hy_v4": "<arg_key:opensource></arg_key:opensource><arg_value:opensource>",
    "longcat": "<longcat_tool_call>",
    "apertus": "<|tools_prefix|>",
    "cohere": "<|START_ACTION|> <|START_RESPONSE|>",
    "cohere_text": "<|START_ACTION|> <|START_TEXT|>",
    "inkling": "<|content_invoke_tool_json|>",
    "glm": "<arg_key>",
    "deepseek": "<｜tool▁sep｜>",
    "deepseek_v3": "<｜tool▁sep｜> ```json",
    "kimi": "<|tool_call_argument_begin|>",
    "mistral": "[TOOL_CALLS] [ARGS]",
    "mistral_list": "[TOOL_CALLS]",
    "llama": '"parameters": dictionary',
    "harmony": "<|channel|> <|message|>",
    "lfm2": "<|tool_list_start|>",
    "gemma": "<|tool_call>",
    "function_gemma": "<start_function_call>",
    "muse": "<atem:function_calls>",
    "solar": "<|tool_call:begin|>",
    "olmo3": "<function_calls>",
    "ernie": "<tool_call> <response>",
    "minimax_m1": "<tool_calls> <beginning_of_sentence>",
    "functools": "functools[",
    "internlm": "<|action_start|> <|plugin|>",
    "granite_20b": "<function_call>",
}
TOOLS_TEMPLATE = TEMPLATE.replace(
    "<|im_end|>",
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}{{ c.function.arguments | tojson }}){% endfor %}<|im_end|>",
    1,
).replace("{% for", "{{ tools | tojson }}{% for", 1)
QUESTION = Message("user", "What is the weather?")


def made_by(name: str, folder: Path) -> Service:
    """A service without an engine: what renders prompts and remembers answers."""
    format = BY_NAME[name]
    special = [marker for marker in format.markers if marker.startswith(("<", "["))]
    tokenizer = byte_tokenizer(folder, special, "{# " + HINTS[name] + " #}" + TOOLS_TEMPLATE)
    service = Service.__new__(Service)
    service.tokenizer, service.renderer = tokenizer, Renderer(tokenizer, Replay())
    assert service.renderer.format.name == name
    return service


def answered(service: Service, text: str, chat: Chat) -> tuple[list[int], Answer]:
    """(the tokens up to the end of an answer that the model gave, that answer), remembered."""
    prompt = service.renderer.prompt(chat)
    answer = service.maker(prompt, ToolUse(tuple(TOOLS))).answers(1)[0]
    tokens = service.tokenizer.encode(text, add_special_tokens=False)
    end = service.tokenizer.id_of(END)
    answer.push(Piece("", 0, tokens, None, "eos"))
    completion = SimpleNamespace(finished=["eos"], stopped_by=[end])
    service.remember_answers(SimpleNamespace(prompt=prompt, completion=completion, answers=[answer]))  # type: ignore[arg-type]
    return [*prompt.tokens, *tokens, end], answer


def rewritten(value: Any, draw: st.DrawFn) -> Any:
    """The same JSON value as another program holds it: keys in another order, whole numbers as floats."""
    if isinstance(value, dict):
        return {key: rewritten(value[key], draw) for key in draw(st.permutations(sorted(value)))}
    return float(value) if type(value) is int and draw(st.booleans()) else value


@st.composite
def serialized(draw: st.DrawFn, arguments: str) -> str:
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]))
    indent = draw(st.sampled_from([None, 0, 1, 4]))
    value = rewritten(json.loads(arguments), draw)
    return json.dumps(value, ensure_ascii=draw(st.booleans()), separators=separators, indent=indent)


def as_chat(answer: Answer, draw: st.DrawFn) -> list[Message]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": draw(serialized(call.arguments))},
        }
        for call in answer.calls
    ]
    content = draw(st.sampled_from([answer.text, answer.text.strip(), [{"type": "text", "text": answer.text}]]))
    back = {"role": "assistant", "content": content or draw(st.sampled_from([None, ""])), "tool_calls": calls}
    if draw(st.booleans()):
        back["reasoning_content"] = answer.reasoning
    results = [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in answer.calls]
    return [QUESTION, *chat_messages([back, *results])]


def chat_messages(given: list[Any]) -> tuple[Message, ...]:
    body = read({"messages": given}, ChatBody)
    return openai_chat.read_chat(body, body.messages)[0].messages


def as_messages(answer: Answer, draw: st.DrawFn) -> list[Message]:
    blocks: list[Any] = [{"type": "thinking", "thinking": answer.reasoning, "signature": ""}] * draw(st.integers(0, 1))
    blocks += [{"type": "text", "text": answer.text}] * bool(answer.text)
    for call in answer.calls:
        values = json.loads(draw(serialized(call.arguments)))
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": values})
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "21"} for call in answer.calls]
    given = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    return [QUESTION, *anthropic.read_chat(read({"messages": given}, CountBody))[0].messages]


def as_items(answer: Answer, draw: st.DrawFn) -> list[Message]:
    items: list[Any] = []
    if answer.reasoning and draw(st.booleans()):
        items.append({"type": "reasoning", "summary": [], "content": [{"type": "text", "text": answer.reasoning}]})
    if answer.text:
        part = {"type": "output_text", "text": answer.text}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in answer.calls:
        arguments = draw(serialized(call.arguments))
        items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments})
    items += [{"type": "function_call_output", "call_id": call.id, "output": "21"} for call in answer.calls]
    return [QUESTION, *response_items.read_input(items, False, lambda _: None)[0]]


@pytest.mark.parametrize("name", SAMPLES)
def test_calls_sent_back_in_other_words_are_the_tokens_that_were_sampled(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    service = made_by(name, tmp_path_factory.mktemp(name))
    before = "" if name in ("llama", "harmony") else "Let me look.\n"
    if name == "harmony":
        before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    chat = Chat((QUESTION,), tuple(TOOLS))
    sampled, answer = answered(service, before + SAMPLES[name].removesuffix("<|call|>"), chat)
    assert len(answer.calls) == 2

    @settings(max_examples=30, deadline=None, database=None)
    @given(data=st.data())
    def whatever(data: st.DataObject) -> None:
        words = data.draw(st.sampled_from([as_chat, as_messages, as_items]))
        messages = words(answer, data.draw)  # type: ignore[arg-type]
        tokens = service.renderer.prompt(Chat(tuple(messages), tuple(TOOLS))).tokens
        assert tokens[: len(sampled)] == sampled
        rest = service.tokenizer.decode(tokens[len(sampled) :], skip_special_tokens=False)
        assert rest.count("21") == 2
        assert rest.endswith("<|im_start|>assistant\n")

    whatever()


@pytest.mark.parametrize("name", SAMPLES)
def test_where_one_call_is_allowed_the_answer_ends_before_a_second(tmp_path: Path, name: str) -> None:
    service, chat = made_by(name, tmp_path), Chat((QUESTION,), tuple(TOOLS))
    prompt, pushed = service.renderer.prompt(chat), 0

    class Scripted:
        cancelled = False

        async def __aiter__(self) -> AsyncIterator[Piece]:
            nonlocal pushed
            for token in service.tokenizer.encode(SAMPLES[name] + "<|im_end|>", add_special_tokens=False):
                if self.cancelled:
                    break
                pushed += 1
                yield Piece("", 0, [token])
            yield Piece("", 0, [], None, "cancelled" if self.cancelled else "eos")

        async def wait(self) -> Any:
            return SimpleNamespace(finished=["cancelled"], stopped_by=[None])

        def cancel(self) -> None:
            self.cancelled = True

    async def events(parallel: bool) -> tuple[Any, list[Event]]:
        answers = service.maker(prompt, ToolUse(tuple(TOOLS), parallel=parallel)).answers(1)
        task = ChatTask(prompt, Scripted(), answers, None)  # type: ignore[arg-type]
        return task, [event async for _, _, found in task.events() for event in found]

    task, both = asyncio.run(events(True))
    assert [event.name for event in both if isinstance(event, CallStart)] == ["get_weather", "now"]
    whole, pushed = pushed, 0
    task, one = asyncio.run(events(False))
    answer = task.answers[0]
    assert [call.name for call in answer.calls] == ["get_weather"]
    assert json.loads(answer.calls[0].arguments)["days"] == 3
    assert [event for event in both[: len(one)] if isinstance(event, CallArguments)] == [
        event for event in one if isinstance(event, CallArguments)
    ]
    assert answer.finished == "stop"
    assert pushed < whole
    assert service.remember(task, answer, Message("assistant", "", "", ())) is None


def test_a_call_that_was_changed_is_not_the_one_that_was_sampled(tmp_path: Path) -> None:
    service = made_by("hermes", tmp_path)
    sampled, answer = answered(service, SAMPLES["hermes"], Chat((QUESTION,), tuple(TOOLS)))
    answer.calls[0].arguments = '{"city": "Bern", "days": 3}'
    calls = [{"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in answer.calls]
    back = chat_messages([{"role": "assistant", "content": None, "tool_calls": calls}])
    tokens = service.renderer.prompt(Chat((QUESTION, *back, Message("user", "?")), tuple(TOOLS))).tokens
    assert tokens[: len(sampled)] != sampled
