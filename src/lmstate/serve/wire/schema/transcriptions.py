"""Sounds to be written down: `/v1/audio/transcriptions` and `/v1/audio/translations`, whose bodies are forms."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmstate.serve.wire.schema.common import Whole

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]


class TranslationBody(Struct, kw_only=True):
    """`/v1/audio/translations`"""

    file: bytes
    model: str | None = None
    prompt: Annotated[str, Meta(max_length=2**16)] | None = None
    response_format: Format | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: Whole | None = None
    condition_on_previous_text: bool | None = None
    temperature_fallback: bool | None = None
    stream: bool | None = None


class TranscriptionBody(TranslationBody, kw_only=True):
    """`/v1/audio/transcriptions`"""

    language: Annotated[str, Meta(max_length=64)] | None = None
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    include: list[Literal["logprobs"]] | None = None
