"""Completions and embeddings: texts and token ids without a conversation."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from lmstate.serve.wire.schema.common import Choices, Generating, Positive, Prompts, TopLogprobs, Whole


class CompletionBody(Generating, kw_only=True):
    """`/v1/completions`"""

    prompt: Prompts
    suffix: str | None = None
    n: Choices | None = None
    best_of: Choices | None = None
    echo: bool | None = None
    max_tokens: Whole | None = None
    logprobs: TopLogprobs | None = None


class EmbeddingBody(Struct, kw_only=True):
    """`/v1/embeddings`"""

    input: Prompts
    model: str | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
