"""Responses, their items, and conversations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from lmstate.serve.wire.schema.chat import MAX_MESSAGES, ChatRole, Content, ThinkingFields
from lmstate.serve.wire.schema.common import ItemId, JsonObject, Positive, ResponseFormat, ShortText, TopLogprobs
from lmstate.serve.wire.schema.tools import AnyTools, ToolChoice

StatusText = Annotated[str, Meta(max_length=20)]


class ItemHead(Struct, kw_only=True):
    """Fields of every item."""

    id: ItemId | None = None
    status: StatusText | None = None


class MessageItem(ItemHead, kw_only=True):
    type: Literal["message"] = "message"
    role: ChatRole
    content: Content


class ReasoningItem(ItemHead, kw_only=True):
    type: Literal["reasoning"]
    content: Content | None = None
    summary: Content | None = None


class FunctionCallItem(ItemHead, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | None = None
    namespace: str | None = None


class CustomCallItem(ItemHead, kw_only=True):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str | None = None


class ShellCallItem(ItemHead, kw_only=True):
    type: Literal["local_shell_call"]
    call_id: str | None = None
    action: JsonObject | None = None


class CallOutputItem(ItemHead, kw_only=True):
    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: str | None = None
    output: Content


class CompactionItem(ItemHead, kw_only=True):
    type: Literal["compaction"]
    encrypted_content: str


class ItemReference(ItemHead, kw_only=True):
    type: Literal["item_reference"] = "item_reference"
    id: ItemId


ITEM_FORMS: dict[str, type[ItemHead]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "custom_tool_call": CustomCallItem,
    "local_shell_call": ShellCallItem,
    **dict.fromkeys(("function_call_output", "custom_tool_call_output", "local_shell_call_output"), CallOutputItem),
    "compaction": CompactionItem,
    "item_reference": ItemReference,
}
_REFERENCES = [{"$ref": f"#/components/schemas/{form.__name__}"} for form in dict.fromkeys(ITEM_FORMS.values())]
# Read by their kinds one by one: those of other servers are let through, and items are listed as they came.
AnyItem = Annotated[dict[str, Any], Meta(extra_json_schema={"anyOf": _REFERENCES})]
AnyItems = Annotated[list[AnyItem], Meta(max_length=MAX_MESSAGES)]
MetadataText = Annotated[str, Meta(max_length=512)]
MetadataName = Annotated[str, Meta(max_length=64)]
Metadata = Annotated[dict[MetadataName, MetadataText], Meta(max_length=16)]
NoPrompt = Annotated[None, Meta(description="no prompt templates are stored, give instructions and input")]


class TextOptions(Struct, kw_only=True):
    """The form of the answer's text."""

    format: ResponseFormat | None = None


class ReasoningOptions(Struct, kw_only=True):
    """Effort of the model's reasoning."""

    effort: ShortText | None = None


class ConversationId(Struct, kw_only=True):
    """A conversation by its id."""

    id: ItemId


class ResponseBody(ThinkingFields, kw_only=True):
    """`/v1/responses`"""

    input: str | AnyItems | None = None
    instructions: str | None = None
    previous_response_id: ItemId | None = None
    conversation: ItemId | ConversationId | None = None
    background: bool | None = None
    store: bool | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: TopLogprobs | None = None
    include: str | Annotated[list[str], Meta(max_length=32)] | None = None
    tools: AnyTools | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    prompt: NoPrompt = None


class ConversationBody(Struct, kw_only=True):
    """`/v1/conversations`"""

    items: AnyItems | None = None
    metadata: Metadata | None = None


class MetadataBody(Struct, kw_only=True):
    """Another metadata of a conversation."""

    metadata: Metadata | None = None


class ItemsBody(Struct, kw_only=True):
    """Items that a conversation gains."""

    items: AnyItems
