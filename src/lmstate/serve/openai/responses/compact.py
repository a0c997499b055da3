"""`POST /v1/responses/compact`: a conversation as what its user said, and a summary of the rest."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve.answer.handlers import json_response
from lmstate.serve.answer.messages import Message
from lmstate.serve.answer.sampling import sampling_params
from lmstate.serve.answer.service import Service, ToolUse
from lmstate.serve.openai.responses import items
from lmstate.serve.openai.responses.compaction import ASK, BEFORE, compaction_item
from lmstate.serve.openai.responses.kept import kept_responses
from lmstate.serve.openai.responses.routes import exact_tokens, prepare, truncated, usage_of
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.schema.responses import ResponseBody

SUMMARY = 1024  # tokens of a summary at most


async def compact(service: Service, request: Request, body: ResponseBody) -> ASGIApp:
    """Nothing is stored. Where the conversation is too long to be read, its oldest turns are not in the summary."""
    asked = await prepare(service, kept_responses(request), body)
    said = [message.content for message in asked.chat.messages if message.role == "user"]
    asked = replace(asked, chat=replace(asked.chat, messages=(*asked.chat.messages, Message("user", ASK))))
    asked = await asyncio.to_thread(truncated, service, asked)
    task = await service.chat(
        request.receive,
        asked.chat,
        sampling_params(body, service.vocab_size, service.model.defaults),
        use=ToolUse(),
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        max_new_tokens=min(SUMMARY, service.settings.max_new_tokens),
        tokens=await asyncio.to_thread(exact_tokens, service, asked),
    )
    await task.finished()
    output = [
        {**items.message_item(new_id("msg_"), [{"type": "input_text", "text": text}], "completed"), "role": "user"}
        for text in said
        if not text.startswith(BEFORE)
    ]
    return json_response(
        {
            "id": new_id("resp_"),
            "object": "response.compaction",
            "created_at": task.created,
            "output": [*output, compaction_item(task.answers[0].text.strip())],
            "usage": usage_of(task),
        }
    )
