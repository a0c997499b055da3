"""Thinking sections: how a chat template marks what a model thinks before it answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmstate.errors import ModelError

if TYPE_CHECKING:
    from lmstate.text.tokenizer import Tokenizer

_THOUGHT, _SAID = "\ue000thought\ue001", "\ue000said\ue001"  # private characters, which no text means anything by


@dataclass(frozen=True)
class ThinkingMarkers:
    """Texts around a thinking section. `token`: the control token in `start`, if text follows it."""

    start: str
    end: str
    token: str = ""

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt already begins the section, as some templates do."""
        return prompt.rstrip().endswith(self.start)

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt holds the section, empty, since none is wanted."""
        return prompt.rstrip().endswith(self.end)


CONSTANT = re.compile(r"""\bset\s+(\w+)\s*=\s*(['"])([^'"{}]{0,64})\2\s*-?%\}""")  # of a template: its name and text
FORMATTED = re.compile(r"""(['"])([^'"{}]{0,64})\{\}([^'"{}]{0,64})\1\.format\((\w+)\)""")

KNOWN = (
    ThinkingMarkers("<think>", "</think>"),
    ThinkingMarkers("[THINK]", "[/THINK]"),
    ThinkingMarkers("<seed:think>", "</seed:think>"),
    ThinkingMarkers("<|channel>thought", "<channel|>", "<|channel>"),
    ThinkingMarkers("<mm:think>", "</mm:think>"),
    ThinkingMarkers("<think:opensource>", "</think:opensource>"),
    ThinkingMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
)


def thinking_markers(template: str | None) -> ThinkingMarkers | None:
    """The markers that a chat template writes; None if the model does not think aloud."""
    spelled = spelled_out(template or "")
    return next((known for known in KNOWN if known.end in spelled), None)


def spelled_out(template: str) -> str:
    """The source of a chat template, markers that it makes of constants spelled out: `'<think{}>'.format(SUFFIX)`."""
    constants = {name: text for name, _, text in CONSTANT.findall(template)}

    def spelled(found: re.Match[str]) -> str:
        quote, before, after, name = found.groups()
        return f"{quote}{before}{constants[name]}{after}{quote}" if name in constants else found[0]

    return FORMATTED.sub(spelled, template)


def closing_text(tokenizer: Tokenizer, markers: ThinkingMarkers) -> str:
    """Text of the template between a thought and the answer: the end marker, with its line breaks."""
    messages = [{"role": "user", "content": "?"}]
    messages.append({"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT, "thinking": _THOUGHT})
    try:
        text = tokenizer.chat_text(messages, add_generation_prompt=False)
    except ModelError:
        return markers.end
    between = text.partition(_THOUGHT)[2].partition(_SAID)[0]
    return between if markers.end in between and _SAID in text else markers.end
