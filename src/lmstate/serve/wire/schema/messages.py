"""Anthropic's messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from lmstate.serve.wire.schema.chat import MAX_MESSAGES
from lmstate.serve.wire.schema.common import JsonObject, JsonSchema, Sampling, ShortText, StopTexts, Whole

_BLOCK: dict[str, Any] = {"properties": {"type": {"type": "string"}}}
# Read by their kinds one by one: blocks that a provider made itself are let through.
AnyBlock = Annotated[dict[str, Any], Meta(extra_json_schema=_BLOCK)]
BlockContent = str | list[AnyBlock]


class TextBlock(Struct, kw_only=True):
    text: str


class ToolReferenceBlock(Struct, kw_only=True):
    tool_name: str


class SearchResultBlock(Struct, kw_only=True):
    title: str
    source: str
    content: list[AnyBlock] | None = None


class DocumentSource(Struct, kw_only=True):
    type: str | None = None
    data: str | None = None


class DocumentBlock(Struct, kw_only=True):
    source: DocumentSource | None = None
    title: str | None = None
    context: str | None = None


class ImageSource(Struct, kw_only=True):
    """A picture: its data in base64, or where it is."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Struct, kw_only=True):
    source: ImageSource


class ThinkingBlock(Struct, kw_only=True):
    thinking: str | None = None


class ToolUseBlock(Struct, kw_only=True):
    id: str
    name: str
    input: JsonObject | None = None


class ToolResultBlock(Struct, kw_only=True):
    tool_use_id: str
    content: BlockContent | None = None


class AnthropicMessage(Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: BlockContent


class AnthropicTool(Struct, kw_only=True):
    """A tool of the client's own."""

    name: str
    input_schema: JsonObject
    description: str | None = None
    strict: bool | None = None


class AnthropicToolChoice(Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"] | None = None
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"] | None = None
    budget_tokens: Whole | None = None


class OutputFormat(Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: JsonSchema


class OutputConfig(Struct, kw_only=True):
    effort: ShortText | None = None
    format: OutputFormat | None = None


class CountBody(Sampling, kw_only=True):
    """`/v1/messages/count_tokens`"""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: BlockContent | None = None
    tools: Annotated[list[AnyBlock], Meta(max_length=512)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    control_tokens: bool | None = None


class MessagesBody(CountBody, kw_only=True):
    """`/v1/messages`"""

    model: str
    max_tokens: Whole
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    thread: JsonObject | None = None  # refused, so that clients send the whole conversation
