"""`/tokenize`, `/detokenize`, `/tokenizer_info`, `/apply-template`: what the tokenizer does, in the shapes of vLLM and
llama-server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve.answer.handlers import json_response
from lmstate.serve.answer.messages import Prompt
from lmstate.serve.answer.sampling import check_ids
from lmstate.serve.answer.service import Service
from lmstate.serve.openai.chat import read_chat
from lmstate.serve.wire.body import wrong
from lmstate.serve.wire.schema.chat import ChatBody, ChatFields, ChatMessage, DetokenizeBody, TokenizeBody


async def tokenize(service: Service, request: Request, body: TokenizeBody) -> ASGIApp:
    """`prompt` (or `content`), or `messages` -> `tokens`: ids, with `with_pieces` objects of an id and its piece."""
    if body.messages is not None:
        tokens = (await rendered(service, body, body.messages)).tokens
    else:
        text = body.content if body.prompt is None else body.prompt
        if text is None:
            raise wrong("prompt", "a string, or messages must be given", None)
        special = body.add_special_tokens if body.add_special is None else body.add_special
        tokens = await asyncio.to_thread(service.tokenizer.encode, text, special is not False)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.context, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = await asyncio.to_thread(texts_of, service, tokens)
    if body.with_pieces:
        answer["tokens"] = await asyncio.to_thread(pieces_of, service, tokens)
    return await asyncio.to_thread(json_response, answer)  # megabytes of ids, say


async def rendered(service: Service, body: ChatFields, messages: Sequence[ChatMessage]) -> Prompt:
    """The prompt of `messages`; unless `add_generation_prompt`, without the beginning of an answer."""
    chat, _ = read_chat(body, messages)
    chat = replace(chat, generation=body.add_generation_prompt is not False)
    return await asyncio.to_thread(service.renderer.prompt, chat)


def texts_of(service: Service, tokens: list[int]) -> list[str]:
    """Each token's text by itself; half a character is shown as U+FFFD."""
    return [service.grammars.token_bytes(token).decode("utf-8", "replace") for token in tokens]


def pieces_of(service: Service, tokens: list[int]) -> list[dict[str, Any]]:
    """Each token with its text, as llama-server has them: a token that is not UTF-8 by itself is an array of bytes."""

    def piece(raw: bytes) -> str | list[int]:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return list(raw)

    return [{"id": token, "piece": piece(service.grammars.token_bytes(token))} for token in tokens]


async def detokenize(service: Service, request: Request, body: DetokenizeBody) -> ASGIApp:
    """`tokens` -> `prompt` (and `content`)."""
    tokens = check_ids(body.tokens, "tokens", service.model.config.ids)
    text = await asyncio.to_thread(service.tokenizer.decode, tokens, False)
    return await asyncio.to_thread(json_response, {"prompt": text, "content": text})


async def tokenizer_info(service: Service, request: Request) -> ASGIApp:
    tokenizer = service.tokenizer

    def text(id: int | None) -> str | None:
        return None if id is None else tokenizer.decode([id], skip_special_tokens=False)

    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": text(min(tokenizer.eos_ids, default=None)),
            "eos_token_ids": sorted(tokenizer.eos_ids),
            "bos_token": text(tokenizer.bos_id),
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": service.context,
            "chat_template": tokenizer.template_source,
        }
    )


async def apply_template(service: Service, request: Request, body: ChatBody) -> ASGIApp:
    """`messages` -> `prompt`, the text that the model reads."""
    prompt = await rendered(service, body, body.messages)
    return json_response({"prompt": prompt.text})


async def count_input(service: Service, request: Request, body: ChatBody) -> ASGIApp:
    """Count the tokens of a chat's prompt."""
    chat, _ = read_chat(body, body.messages)
    prompt = await asyncio.to_thread(service.renderer.prompt, chat)
    return json_response({"object": "chat.completion.input_tokens", "input_tokens": len(prompt.tokens)})
