"""Tool calls: how a model writes them, recognized from its chat template, never from its name."""

from __future__ import annotations

from lmstate.serve.tools.base import Rules, ToolFormat
from lmstate.serve.tools.events import CallArguments, CallStart, Event, Reasoning, Text, Tool
from lmstate.serve.tools.json_calls import JsonCalls
from lmstate.serve.tools.literal_calls import BracedCalls, PythonCalls
from lmstate.serve.tools.marked_calls import DeepSeekCalls, HarmonyCalls, KimiCalls, LlamaCalls, MistralCalls
from lmstate.serve.tools.xml_calls import PairedCalls, TaggedCalls

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

# In the order of asking: a format that shares a marker with another comes before it.
FORMATS: tuple[ToolFormat, ...] = (
    HarmonyCalls(),
    KimiCalls(),
    TaggedCalls(
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
    ),
    DeepSeekCalls("deepseek_v3", fenced=True),
    DeepSeekCalls("deepseek"),
    TaggedCalls(
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
    ),
    PairedCalls(),
    TaggedCalls(
        "qwen_xml",
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
        ">",
        hints=("<function=", "<parameter="),
    ),
    BracedCalls("gemma", ("<|tool_call>", "<tool_call|>", '<|"|>')),
    BracedCalls("function_gemma", ("<start_function_call>", "<end_function_call>", "<escape>")),
    PythonCalls(),
    MistralCalls("mistral"),
    MistralCalls("mistral_list", listed=True),
    JsonCalls("phi", "<|tool_call|>", "<|/tool_call|>", listed=True, hints=("<|/tool_call|>",)),
    JsonCalls("granite", "<|tool_call|>", "", listed=True),
    JsonCalls("jamba", "<tool_calls>", "</tool_calls>", listed=True),
    JsonCalls("nemotron", "<TOOLCALL>", "</TOOLCALL>", listed=True),
    HERMES,
    LlamaCalls(),
)


def format_of(template: str | None) -> ToolFormat | None:
    """The format that a chat template writes calls in; None if it knows none."""
    return next((known for known in FORMATS if template and known.matches(template)), None)
