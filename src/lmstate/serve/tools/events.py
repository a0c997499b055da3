"""The parts that an answer is made of, as a parser finds them in the model's text, and the tools that it may call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmstate.engine import TokenLogprob


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema; `strict` asks for calls that fit it.

    `custom`: its client knows it as a tool whose input is a text. `own`: (namespace, name in it) as its client knows a
    tool of a namespace. `param`: where the request has its schema.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    custom: bool = False
    own: tuple[str, str] | None = None
    param: str = "tools"

    def described(self) -> dict[str, Any]:
        """The tool in the form that chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}

    @property
    def schema(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Text:
    """More of the answer's text, with the log probabilities of its tokens where they were asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; its arguments follow. `id` is the model's own, for formats that have one."""

    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON arguments of the last call that began."""

    text: str


Event = Text | Reasoning | CallStart | CallArguments
