"""Bodies of Ollama's API, see https://docs.ollama.com/api."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmstate.serve.wire.schema.chat import MAX_MESSAGES, ChatCall
from lmstate.serve.wire.schema.common import Draws, JsonSchema, Positive, StopTexts, TokenIds, TopLogprobs
from lmstate.serve.wire.schema.tools import AnyTools

NoTemplate = Annotated[Literal[""] | None, Meta(description="prompts are rendered by the model's own template")]
KeepAlive = str | float


class OllamaOptions(Draws, kw_only=True):
    """Sampling. A field that is left out is as the model's makers suggest; fields of a runner (num_ctx) are ignored."""

    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31)] | None = None  # negative: up to the server's limit
    stop: StopTexts | None = None


class OllamaAsked(Struct, kw_only=True):
    """Fields of every body that names a model."""

    model: str
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaAnswered(OllamaAsked, kw_only=True):
    """Fields of `/api/chat` and `/api/generate`."""

    stream: bool | None = None  # true unless it says otherwise
    format: Literal["json", ""] | JsonSchema | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class OllamaMessage(Struct, kw_only=True):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[str], Meta(max_length=64)] | None = None
    tool_calls: Annotated[list[ChatCall], Meta(max_length=1000)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaAnswered, kw_only=True):
    """`/api/chat`; without messages the model is loaded."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: AnyTools | None = None


class OllamaGenerateBody(OllamaAnswered, kw_only=True):
    """`/api/generate`; without a prompt the model is loaded."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: NoTemplate = None
    raw: bool | None = None
    context: TokenIds | None = None
    images: Annotated[list[str], Meta(max_length=64)] | None = None


class OllamaEmbedBody(OllamaAsked, kw_only=True):
    """`/api/embed`"""

    input: str | list[str]
    truncate: bool | None = None
    dimensions: Positive | None = None


class OllamaEmbeddingsBody(OllamaAsked, kw_only=True):
    """`/api/embeddings`, which `/api/embed` replaces."""

    prompt: str


class OllamaShowBody(Struct, kw_only=True):
    """`/api/show`"""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaPullBody(Struct, kw_only=True):
    """`/api/pull`"""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
