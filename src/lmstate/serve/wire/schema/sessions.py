"""Sessions, and the conversations of the page."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from lmstate.serve.wire.schema.chat import ChatMessages
from lmstate.serve.wire.schema.common import Generating, JsonObject, Positive, Sampling, TokenId, TokenIds, Whole
from lmstate.vision.reader import MOST_PICTURES


class SessionBody(Struct, kw_only=True):
    """`/v1/sessions`, `/v1/sessions/{name}/fork`"""

    model: str | None = None
    name: str | None = None


class RewindBody(Struct, kw_only=True):
    """`/v1/sessions/{name}/rewind`: a position in tokens."""

    to: Whole


class DrainBody(Struct, kw_only=True):
    """`/v1/replicas/drain`: the rank of a replica, and the seconds that its answers may take."""

    rank: Whole
    seconds: Annotated[float, Meta(ge=0, le=600)] = 0.0
    model: str | None = None


class SendBody(Generating, kw_only=True):
    """`/v1/sessions/{name}/send`: one of text, messages and tokens."""

    text: str | None = None
    messages: ChatMessages | None = None
    tokens: Annotated[TokenIds, Meta(min_length=1)] | None = None
    max_tokens: Whole | None = None


class PageSettings(Sampling, kw_only=True):
    """Settings of a conversation of the page."""

    system: Annotated[str, Meta(max_length=100_000)] | None = None
    max_tokens: Positive | None = None


class PageConversation(Struct, kw_only=True):
    """A conversation of the page; settings that the page does not know are left out."""

    title: Annotated[str, Meta(max_length=200)] | None = None
    settings: JsonObject | None = None


class PageMessage(Struct, kw_only=True):
    """A message below an answer; without a text, another answer.

    A picture is a data URL, or the SHA-256 of one that the conversation has.
    """

    parent: str | None = None
    text: str | None = None
    pictures: Annotated[list[str], Meta(max_length=MOST_PICTURES)] = []


class PageFork(Struct, kw_only=True):
    """Another token in the place of one of an answer."""

    at: Whole
    token: TokenId
