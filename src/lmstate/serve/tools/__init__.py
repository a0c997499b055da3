"""Tool calls: how a model writes them, recognized from its chat template, never from its name."""

from __future__ import annotations

from dataclasses import replace

from lmstate.serve.tools.base import Rules, ToolFormat
from lmstate.serve.tools.channel_calls import CohereCalls, HarmonyCalls, InklingCalls, MuseCalls, SolarCalls
from lmstate.serve.tools.events import CallArguments, CallStart, Event, Reasoning, Text, Tool
from lmstate.serve.tools.json_calls import JsonCalls, KeyedCalls
from lmstate.serve.tools.literal_calls import JSON_WORDS, BracedCalls, PythonCalls
from lmstate.serve.tools.marked_calls import DeepSeekCalls, KimiCalls, LlamaCalls, MistralCalls
from lmstate.serve.tools.nested_calls import NestedCalls
from lmstate.serve.tools.xml_calls import PairedCalls, TaggedCalls
from lmstate.text.thinking import spelled_out

__all__ = [
    "FORMATS",
    "HERMES",
    "CallArguments",
    "CallStart",
    "Event",
    "Reasoning",
    "Rules",
    "Text",
    "Tool",
    "ToolFormat",
    "format_of",
]

HERMES = JsonCalls("hermes", "<tool_call>", "</tool_call>")

DSML = TaggedCalls(
    "dsml",
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    '<｜DSML｜invoke name="',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="',
    "</｜DSML｜parameter>",
    '">',
    several=True,
    lines=False,
    hints=("｜DSML｜",),
)
MINIMAX = TaggedCalls(
    "minimax",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    '<invoke name="',
    "</invoke>",
    '<parameter name="',
    "</parameter>",
    '">',
    several=True,
    lines=False,
    hints=("minimax:tool_call",),
)
QWEN_XML = TaggedCalls(
    "qwen_xml",
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    ">",
    hints=("<function=", "<parameter="),
)

# In the order of asking: a format that shares a marker with another comes before it.
FORMATS: tuple[ToolFormat, ...] = (
    MuseCalls(),
    SolarCalls(),
    HarmonyCalls(),
    InklingCalls(),
    CohereCalls("cohere_text", "TEXT"),
    CohereCalls("cohere", "RESPONSE"),
    KimiCalls(),
    replace(
        DSML,
        name="dsml_calls",
        begin="<｜DSML｜tool_calls>",
        end="</｜DSML｜tool_calls>",
        hints=("｜DSML｜", "tool_calls>"),
    ),
    DSML,
    DeepSeekCalls("deepseek_v3", fenced=True),
    DeepSeekCalls("deepseek"),
    NestedCalls(),
    MINIMAX,
    replace(
        MINIMAX,
        name="dots",
        begin="<dots_function_call>",
        end="</dots_function_call>",
        hints=("<dots_function_call>",),
    ),
    PairedCalls("hy_v3", "<tool_sep>", separator="<tool_sep>", outer=True),
    PairedCalls(
        "hy_v3_suffixed",
        "<tool_sep:opensource>",
        separator="<tool_sep:opensource>",
        outer=True,
        suffix=":opensource",
    ),
    PairedCalls("hy_v4", "<arg_key:opensource>", line="", outer=True, suffix=":opensource"),
    PairedCalls("glm_4_7", "</arg_key><arg_value>", line=""),
    PairedCalls("glm", "<arg_key>"),
    replace(
        QWEN_XML,
        name="seed",
        begin="<seed:tool_call>",
        end="</seed:tool_call>",
        lines=False,
        hints=("<seed:tool_call>",),
    ),
    QWEN_XML,
    BracedCalls("gemma", ("<|tool_call>", "<tool_call|>", '<|"|>')),
    BracedCalls("function_gemma", ("<start_function_call>", "<end_function_call>", "<escape>")),
    PythonCalls(
        "lfm2",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        ("<|tool_call_start|>", "<|tool_list_start|>"),
    ),
    PythonCalls(
        "olmo3",
        ("<function_calls>", "</function_calls>"),
        ("<function_calls>",),
        ("", "\n", ""),
        JSON_WORDS,
    ),
    MistralCalls("mistral"),
    MistralCalls("mistral_list", listed=True),
    KeyedCalls(),
    JsonCalls("phi", "<|tool_call|>", "<|/tool_call|>", listed=True, hints=("<|/tool_call|>",)),
    JsonCalls("granite", "<|tool_call|>", "", listed=True),
    JsonCalls(
        "minimax_m1",
        "<tool_calls>",
        "</tool_calls>",
        listed=True,
        hints=("<tool_calls>", "<beginning_of_sentence>"),
        marks=("\n", "\n", "\n"),
    ),
    JsonCalls("jamba", "<tool_calls>", "</tool_calls>", listed=True),
    JsonCalls("functools", "functools[", "", listed=True, marks=("", ", ", "]")),
    JsonCalls("granite_20b", "<function_call>", "", around=(" ", ""), between=" "),
    JsonCalls(
        "internlm",
        "<|action_start|>",
        "<|action_end|>",
        hints=("<|action_start|>", "<|plugin|>"),
        around=("\n", ""),
        lead="<|plugin|>",
        key="parameters",
    ),
    JsonCalls("nemotron", "<TOOLCALL>", "</TOOLCALL>", listed=True),
    JsonCalls("longcat", "<longcat_tool_call>", "</longcat_tool_call>", between=""),
    replace(
        HERMES, name="ernie", hints=("<tool_call>", "<response>"), tags=("<response>", "\n</response>", "</response>")
    ),
    HERMES,
    LlamaCalls(),
)


def format_of(template: str | None) -> ToolFormat | None:
    """The format that a chat template writes calls in; None if it knows none."""
    spelled = spelled_out(template or "")
    return next((known for known in FORMATS if spelled and known.matches(spelled)), None)
