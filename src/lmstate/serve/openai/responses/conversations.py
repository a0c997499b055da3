"""`/v1/conversations`: what responses of one conversation said, kept by the server under its id."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve.answer.handlers import json_response, read_body
from lmstate.serve.answer.service import Service
from lmstate.serve.openai.responses import items
from lmstate.serve.openai.responses.conversation_store import StoredConversation
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.fields import Fields

MOST_ITEMS, MOST_METADATA = 20, 16


async def create_conversation(service: Service, request: Request) -> ASGIApp:
    body = await read_body(service, request)
    given = await asyncio.to_thread(_read, service, body) if body.has("items") else []
    made = await asyncio.to_thread(service.conversations.create, metadata_of(body), given)
    return json_response(made.shown())


async def get_conversation(service: Service, request: Request) -> ASGIApp:
    return json_response((await found(service, request)).shown())


async def change_conversation(service: Service, request: Request) -> ASGIApp:
    conversation, body = await found(service, request), await read_body(service, request)
    metadata = metadata_of(body)
    await asyncio.to_thread(service.conversations.change, conversation.id, metadata)
    return json_response({**conversation.shown(), "metadata": metadata})


async def delete_conversation(service: Service, request: Request) -> ASGIApp:
    conversation = await found(service, request)
    await asyncio.to_thread(service.conversations.delete, conversation.id)
    return json_response({"id": conversation.id, "object": "conversation.deleted", "deleted": True})


async def list_items(service: Service, request: Request) -> ASGIApp:
    conversation = await found(service, request)
    return json_response(items.paged(conversation.items, request.query_params))


async def add_items(service: Service, request: Request) -> ASGIApp:
    conversation, body = await found(service, request), await read_body(service, request)
    added = await asyncio.to_thread(_read, service, body)
    await asyncio.to_thread(service.conversations.append, conversation.id, added)
    return json_response(items.listing(added))


async def get_item(service: Service, request: Request) -> ASGIApp:
    conversation = await found(service, request)
    return json_response(_item(conversation, request))


async def delete_item(service: Service, request: Request) -> ASGIApp:
    conversation = await found(service, request)
    item = _item(conversation, request)
    await asyncio.to_thread(service.conversations.remove_item, conversation.id, item["id"])
    return json_response(conversation.shown())


def _item(conversation: StoredConversation, request: Request) -> dict[str, Any]:
    id = request.path_params["item"]
    item = next((item for item in conversation.items if item["id"] == id), None)
    if item is None:
        raise ApiError(f"the conversation has no item {id[:100]!r}", 404)
    return item


def _read(service: Service, body: Fields) -> list[dict[str, Any]]:
    """The `items` of a body as they are kept."""
    if len(body.items("items")) > MOST_ITEMS:
        raise body.wrong("items", f"an array of at most {MOST_ITEMS} items: add the others with further requests")
    return items.read_items(body, "items", service.find_item)[1]


def metadata_of(body: Fields) -> dict[str, Any]:
    """`metadata`: up to 16 texts by name."""
    given = body.inner("metadata")
    values = {} if given is None else given.values
    if len(values) > MOST_METADATA or any(
        not isinstance(value, str) or len(value) > 512 or len(key) > 64 for key, value in values.items()
    ):
        raise body.wrong(
            "metadata", f"an object of at most {MOST_METADATA} strings (names of 64 characters, values 512)"
        )
    return values


async def found(service: Service, request: Request) -> StoredConversation:
    return await asyncio.to_thread(conversation_named, service, request.path_params["id"])


def conversation_named(service: Service, id: str) -> StoredConversation:
    """The conversation of this id. Raises `ApiError`."""
    conversation = service.conversations.get(id)
    if conversation is None:
        raise ApiError(f"the conversation {id[:100]!r} is not stored here (any more)", 404, param="conversation")
    return conversation
