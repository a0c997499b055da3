"""Thinking sections: how a chat template marks what a model thinks before it answers."""

from __future__ import annotations

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


KNOWN = (
    ThinkingMarkers("<think>", "</think>"),
    ThinkingMarkers("[THINK]", "[/THINK]"),
    ThinkingMarkers("<seed:think>", "</seed:think>"),
    ThinkingMarkers("<|channel>thought", "<channel|>", "<|channel>"),
)


def thinking_markers(template: str | None) -> ThinkingMarkers | None:
    """The markers that a chat template writes; None if the model does not think aloud."""
    return next((known for known in KNOWN if template and known.end in template), None)


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
