"""Chat completions, and what tells of a chat's prompt."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmstate.serve.wire.schema.common import Choices, Generating, JsonObject, Prompts, TokenIds, TopLogprobs, Whole
from lmstate.serve.wire.schema.tools import AnyTools, ToolChoice

MAX_MESSAGES = 20_000
ChatRole = Literal["system", "developer", "user", "assistant", "tool"]
NoTemplate = Annotated[
    None, Meta(description="conversations are rendered by the model's own template, see chat_template_kwargs")
]


class ImageUrl(Struct, kw_only=True):
    """Address of a picture: a data URL, or one of a host that the server allows."""

    url: str
    detail: str | None = None  # how closely it is looked at; models here have one way


class VideoUrl(Struct, kw_only=True):
    """A video: a data URL with an MP4, MOV, MKV or WebM file, or with frames that are parted by commas."""

    url: str
    fps: Annotated[float, Meta(ge=0.001, le=1000)] | None = None  # frames for each second


class InputAudio(Struct, kw_only=True):
    """A sound: a file in base64, and its kind."""

    data: str
    format: Literal["wav"]


class ContentPart(Struct, kw_only=True):
    """A part of a message: text, a picture, a sound, or a video."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    input_audio: InputAudio | None = None
    video_url: str | VideoUrl | None = None
    video: list[str] | None = None  # frames, each a picture in a data URL
    fps: Annotated[float, Meta(ge=0.001, le=1000)] | None = None  # of `video`
    file_id: str | None = None


Content = str | list[ContentPart]


class CalledFunction(Struct, kw_only=True):
    """A call of a function; some clients keep the arguments as the object that they are."""

    name: str
    arguments: str | JsonObject | None = None


class CalledCustom(Struct, kw_only=True):
    """A call of a tool whose input is a text."""

    name: str
    input: str | None = None


class ChatCall(Struct, kw_only=True):
    """A call in a message of the assistant."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class ChatMessage(Struct, kw_only=True):
    """One message."""

    role: ChatRole
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ChatCall], Meta(max_length=1000)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


ChatMessages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ThinkingFields(Generating, kw_only=True):
    """Whether and how a model thinks, as variables of its template."""

    reasoning_effort: str | None = None
    chat_template_kwargs: JsonObject | None = None
    chat_template: NoTemplate = None
    control_tokens: bool | None = None


class ChatFields(ThinkingFields, kw_only=True):
    """A conversation without its messages."""

    tools: AnyTools | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class ChatBody(ChatFields, kw_only=True):
    """`/v1/chat/completions`"""

    messages: ChatMessages
    n: Choices | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class PromptBody(ChatFields, kw_only=True):
    """A prompt, or the messages of one."""

    model: str | None = None
    prompt: Prompts | None = None
    messages: ChatMessages | None = None


class TokenizeBody(ChatFields, kw_only=True):
    """`/tokenize`"""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: ChatMessages | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    """`/detokenize`"""

    model: str | None = None
    tokens: TokenIds
