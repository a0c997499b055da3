"""The output items of a response as they grow, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmstate.serve.openai.responses import items
from lmstate.serve.tools import CallArguments, CallStart, Event, Reasoning, Text, Tool
from lmstate.serve.tools.base import tool_named
from lmstate.serve.tools.custom import input_of
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.sse import event


@dataclass
class Output:
    """The output items of a response as they grow, and the events of each step."""

    tools: Sequence[Tool] = ()  # that may be called
    items: list[dict[str, Any]] = field(default_factory=list)
    sequence: int = 0
    open: str = ""
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)  # of the open message

    def event(self, kind: str, **values: Any) -> bytes:
        number, self.sequence = self.sequence, self.sequence + 1
        return event(kind, {"type": kind, "sequence_number": number, **values})

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _part(self) -> dict[str, Any]:
        return {**self._where, "content_index": 0}

    def take(self, found: Event, logprobs: list[Any]) -> list[bytes]:
        """The protocol's events for one of ours. `logprobs`: of its tokens, in the form of the protocol."""
        if isinstance(found, Text) and found.text:
            events = [] if self.open == "message" else self.begin_message()
            self.text += found.text
            self.logprobs += logprobs
            return [
                *events,
                self.event("response.output_text.delta", **self._part, delta=found.text, logprobs=logprobs),
            ]
        if isinstance(found, Reasoning) and found.text:
            events = [] if self.open == "reasoning" else self._begin_reasoning()
            self.text += found.text
            return [*events, self.event("response.reasoning_text.delta", **self._part, delta=found.text)]
        if isinstance(found, CallStart):
            tool = tool_named(self.tools, found.name)
            item = items.call_item(found.id or new_id("call_"), found.name, "", "in_progress", tool)
            return self._begin("custom" if item["type"] == "custom_tool_call" else "call", item)
        if isinstance(found, CallArguments) and found.text:
            self.text += found.text
            if self.open == "custom":  # its input is known when the JSON around it is
                return []
            return [self.event("response.function_call_arguments.delta", **self._where, delta=found.text)]
        return []

    def _begin(self, kind: str, item: dict[str, Any]) -> list[bytes]:
        events = self.close("completed")
        self.open, self.text, self.logprobs = kind, "", []
        self.items.append(item)
        added = self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)
        return [*events, added]

    def begin_message(self) -> list[bytes]:
        events = self._begin("message", items.message_item(new_id("msg_"), [], "in_progress"))
        return [*events, self.event("response.content_part.added", **self._part, part=items.text_part(""))]

    def _begin_reasoning(self) -> list[bytes]:
        events = self._begin("reasoning", items.reasoning_item(new_id("rs_"), "", "in_progress"))
        part = {"type": "reasoning_text", "text": ""}
        return [*events, self.event("response.content_part.added", **self._part, part=part)]

    def close(self, status: str) -> list[bytes]:
        """End the open item."""
        kind, self.open = self.open, ""
        if not kind:
            return []
        item = self.items[-1]
        if kind == "message":
            part = items.text_part(self.text, self.logprobs)
            events = [
                self.event("response.output_text.done", **self._part, text=self.text, logprobs=self.logprobs),
                self.event("response.content_part.done", **self._part, part=part),
            ]
            item["content"] = [part]
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": self.text}
            events = [
                self.event("response.reasoning_text.done", **self._part, text=self.text),
                self.event("response.content_part.done", **self._part, part=part),
            ]
            item["content"] = [part]
        elif kind == "custom":
            item["input"] = input_of(self.text)
            told = {"delta": item["input"]}, {"input": item["input"]}
            kinds = ("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done")
            events = [self.event(kind, **self._where, **values) for kind, values in zip(kinds, told)]
        else:
            item["arguments"] = self.text
            done = {"name": item["name"], "arguments": self.text}
            events = [self.event("response.function_call_arguments.done", **self._where, **done)]
        item["status"] = status
        return [*events, self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)]
