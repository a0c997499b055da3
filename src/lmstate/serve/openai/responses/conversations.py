"""`/v1/conversations`: what responses of one conversation said, kept by the server under its id."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve.answer.handlers import json_response
from lmstate.serve.answer.service import Service
from lmstate.serve.openai.responses import items
from lmstate.serve.openai.responses.conversation_store import StoredConversation
from lmstate.serve.openai.responses.kept import KeptResponses, kept_responses
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.schema.responses import ConversationBody, ItemsBody, MetadataBody

MAX_ADDED_ITEMS = 20


async def create_conversation(service: Service, request: Request, body: ConversationBody) -> ASGIApp:
    given = await asyncio.to_thread(_read, kept_responses(request), body.items or [])
    made = await asyncio.to_thread(kept_responses(request).conversations.create, body.metadata or {}, given)
    return json_response(made.shown())


async def get_conversation(service: Service, request: Request) -> ASGIApp:
    return json_response((await found(request)).shown())


async def change_conversation(service: Service, request: Request, body: MetadataBody) -> ASGIApp:
    conversation, metadata = await found(request), body.metadata or {}
    await asyncio.to_thread(kept_responses(request).conversations.change, conversation.id, metadata)
    return json_response({**conversation.shown(), "metadata": metadata})


async def delete_conversation(service: Service, request: Request) -> ASGIApp:
    conversation = await found(request)
    await asyncio.to_thread(kept_responses(request).conversations.delete, conversation.id)
    return json_response({"id": conversation.id, "object": "conversation.deleted", "deleted": True})


async def list_items(service: Service, request: Request) -> ASGIApp:
    conversation = await found(request)
    return json_response(items.paged(conversation.items, request.query_params))


async def add_items(service: Service, request: Request, body: ItemsBody) -> ASGIApp:
    conversation = await found(request)
    added = await asyncio.to_thread(_read, kept_responses(request), body.items)
    await asyncio.to_thread(kept_responses(request).conversations.append, conversation.id, added)
    return json_response(items.listing(added))


async def get_item(service: Service, request: Request) -> ASGIApp:
    conversation = await found(request)
    return json_response(_item(conversation, request))


async def delete_item(service: Service, request: Request) -> ASGIApp:
    conversation = await found(request)
    item = _item(conversation, request)
    await asyncio.to_thread(kept_responses(request).conversations.remove_item, conversation.id, item["id"])
    return json_response(conversation.shown())


def _item(conversation: StoredConversation, request: Request) -> dict[str, Any]:
    id = request.path_params["item"]
    item = next((item for item in conversation.items if item["id"] == id), None)
    if item is None:
        raise ApiError(f"the conversation has no item {id[:100]!r}", 404)
    return item


def _read(kept: KeptResponses, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The `items` of a body as they are kept."""
    if len(given) > MAX_ADDED_ITEMS:
        raise ApiError(
            f"items has {len(given)} items; at most {MAX_ADDED_ITEMS} are added at a time: send further requests",
            param="items",
        )
    return items.read_items(given, "items", kept.find_item)[1]


async def found(request: Request) -> StoredConversation:
    return await asyncio.to_thread(conversation_named, kept_responses(request), request.path_params["id"])


def conversation_named(kept: KeptResponses, id: str) -> StoredConversation:
    """The conversation of this id. Raises `ApiError`."""
    conversation = kept.conversations.get(id)
    if conversation is None:
        raise ApiError(f"the conversation {id[:100]!r} is not stored here (any more)", 404, param="conversation")
    return conversation
