"""Completions, embeddings and reranking: texts and token ids without a conversation."""

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


class RerankDocument(Struct, kw_only=True):
    """A document as an object, whose other fields are the client's own."""

    text: str


class RerankBody(Struct, kw_only=True):
    """`/v1/rerank`"""

    query: str | RerankDocument
    documents: list[str | RerankDocument]
    model: str | None = None
    top_n: Positive | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Positive | None = None
    instruction: str | None = None


class EmbeddingBody(Struct, kw_only=True):
    """`/v1/embeddings`"""

    input: Prompts
    model: str | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
