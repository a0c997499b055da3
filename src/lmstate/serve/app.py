"""The ASGI application: every route, behind one guard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lmstate.serve import anthropic, replicas, sessions
from lmstate.serve.answer.endpoint import endpoint
from lmstate.serve.answer.handlers import error_response, json_response
from lmstate.serve.answer.paths import Path
from lmstate.serve.answer.pool import ModelPool
from lmstate.serve.conversations import page
from lmstate.serve.conversations import routes as conversations
from lmstate.serve.conversations.keeper import Keeper
from lmstate.serve.guard import Guard
from lmstate.serve.ollama import answers as ollama_answers
from lmstate.serve.ollama import models as ollama_models
from lmstate.serve.openai import chat, completions, embeddings, models, rerank, tokens, transcriptions
from lmstate.serve.openai.responses import compact, stored
from lmstate.serve.openai.responses import conversations as stored_conversations
from lmstate.serve.openai.responses import routes as responses
from lmstate.serve.openai.responses.kept import KeptResponses
from lmstate.serve.openapi import document
from lmstate.serve.settings import Settings
from lmstate.serve.wire.access_log import AccessLog
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.large_bodies import LargeBodies
from lmstate.serve.wire.linger import Linger
from lmstate.serve.wire.owned_records import OwnedRecords
from lmstate.serve.wire.request_id import RequestIds
from lmstate.serve.wire.schema.chat import ChatBody, DetokenizeBody, PromptBody, TokenizeBody
from lmstate.serve.wire.schema.completions import CompletionBody, EmbeddingBody, RerankBody
from lmstate.serve.wire.schema.messages import CountBody, MessagesBody
from lmstate.serve.wire.schema.ollama import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaPullBody,
    OllamaShowBody,
)
from lmstate.serve.wire.schema.responses import ConversationBody, ItemsBody, MetadataBody, ResponseBody
from lmstate.serve.wire.schema.sessions import DrainBody, RewindBody, SendBody, SessionBody
from lmstate.serve.wire.schema.transcriptions import TranscriptionBody, TranslationBody

if TYPE_CHECKING:
    from lmstate.engine.serving import ServingEngine


async def _openapi(pool: ModelPool, request: Request) -> ASGIApp:
    return json_response(document(PATHS))


PATHS = (
    Path("GET", "/health", models.health, summary="Whether the server takes requests", whole=True),
    Path("GET", "/metrics", models.metrics, both=False, summary="Prometheus metrics", whole=True),
    Path("GET", "/v1/models", models.list_models, summary="The models that are served", whole=True),
    Path("GET", "/v1/models/{model:path}", models.get_model, summary="One model", whole=True),
    Path(
        "POST",
        "/v1/chat/completions",
        chat.chat_completions,
        summary="OpenAI chat completions",
        body=ChatBody,
        streams=True,
    ),
    Path(
        "POST",
        "/v1/chat/completions/input_tokens",
        tokens.count_input,
        summary="Tokens of a chat's prompt",
        body=ChatBody,
    ),
    Path(
        "POST",
        "/v1/completions",
        completions.completions,
        summary="OpenAI completions",
        body=CompletionBody,
        streams=True,
    ),
    Path(
        "POST", "/v1/responses", responses.create_response, summary="OpenAI responses", body=ResponseBody, streams=True
    ),
    Path(
        "POST",
        "/v1/responses/input_tokens",
        responses.count_input,
        summary="Tokens of a response's prompt",
        body=ResponseBody,
    ),
    Path(
        "POST",
        "/v1/responses/compact",
        compact.compact,
        summary="A summary in place of a conversation",
        body=ResponseBody,
    ),
    Path("GET", "/v1/responses/{id}", stored.get_response, summary="A stored response"),
    Path("DELETE", "/v1/responses/{id}", stored.delete_response, summary="Forget a stored response"),
    Path(
        "GET",
        "/v1/responses/{id}/input_items",
        stored.list_input,
        summary="The input of a stored response",
    ),
    Path(
        "POST",
        "/v1/responses/{id}/cancel",
        stored.cancel_response,
        summary="Cancel a background response",
    ),
    Path(
        "POST",
        "/v1/conversations",
        stored_conversations.create_conversation,
        summary="A new conversation",
        body=ConversationBody,
    ),
    Path("GET", "/v1/conversations/{id}", stored_conversations.get_conversation, summary="A conversation"),
    Path(
        "POST",
        "/v1/conversations/{id}",
        stored_conversations.change_conversation,
        summary="Change its metadata",
        body=MetadataBody,
    ),
    Path("DELETE", "/v1/conversations/{id}", stored_conversations.delete_conversation, summary="Delete a conversation"),
    Path("GET", "/v1/conversations/{id}/items", stored_conversations.list_items, summary="A conversation's items"),
    Path(
        "POST",
        "/v1/conversations/{id}/items",
        stored_conversations.add_items,
        summary="Add items to it",
        body=ItemsBody,
    ),
    Path("GET", "/v1/conversations/{id}/items/{item}", stored_conversations.get_item, summary="One of its items"),
    Path("DELETE", "/v1/conversations/{id}/items/{item}", stored_conversations.delete_item, summary="Forget an item"),
    Path("POST", "/v1/messages", anthropic.messages, summary="Anthropic messages", body=MessagesBody, streams=True),
    Path(
        "POST",
        "/v1/messages/count_tokens",
        anthropic.count_tokens,
        summary="Tokens of a message's prompt",
        body=CountBody,
    ),
    Path("POST", "/v1/embeddings", embeddings.embeddings, summary="OpenAI embeddings", body=EmbeddingBody),
    Path(
        "POST",
        "/v1/audio/transcriptions",
        transcriptions.transcriptions,
        summary="What is said in a sound",
        body=TranscriptionBody,
        form=True,
        streams=True,
    ),
    Path(
        "POST",
        "/v1/audio/translations",
        transcriptions.translations,
        summary="The same in English",
        body=TranslationBody,
        form=True,
        streams=True,
    ),
    Path("POST", "/v1/rerank", rerank.rerank, summary="Documents by how well they answer a query", body=RerankBody),
    Path("POST", "/v2/rerank", rerank.rerank, both=False, summary="The same, where Cohere has it", body=RerankBody),
    Path("GET", "/v1/sessions", sessions.list_sessions, summary="The sessions"),
    Path("POST", "/v1/sessions", sessions.create, summary="A new session", body=SessionBody),
    Path("GET", "/v1/sessions/{name}", sessions.get, summary="A session's text and tokens"),
    Path("DELETE", "/v1/sessions/{name}", sessions.delete, summary="Forget a session"),
    Path(
        "POST", "/v1/sessions/{name}/send", sessions.send, summary="Go on with a session", body=SendBody, streams=True
    ),
    Path("POST", "/v1/sessions/{name}/rewind", sessions.rewind, summary="Go back to a position", body=RewindBody),
    Path("POST", "/v1/sessions/{name}/mark", sessions.mark, summary="Keep what going back to here needs"),
    Path("POST", "/v1/sessions/{name}/undo", sessions.undo, summary="Forget the last turn"),
    Path("POST", "/v1/sessions/{name}/fork", sessions.fork, summary="Another session from here", body=SessionBody),
    Path("POST", "/v1/sessions/{name}/save", sessions.save, summary="Save into the server's folder"),
    Path("GET", "/v1/sessions/{name}/snapshot", sessions.download, summary="A session and its state as a file"),
    Path("PUT", "/v1/sessions/{name}/snapshot", sessions.upload, summary="A session from such a file"),
    Path("GET", "/v1/replicas", replicas.list_replicas, summary="The engines behind the server"),
    Path(
        "POST",
        "/v1/replicas/drain",
        replicas.drain,
        summary="End the answers of a replica, or hand them on",
        body=DrainBody,
    ),
    Path("GET", "/v1/cache/tree", sessions.tree, summary="The prefixes that are kept"),
    Path(
        "POST",
        "/v1/cache/explain",
        sessions.explain,
        summary="What of a prompt would be reused, and why not more",
        body=PromptBody,
    ),
    Path("POST", "/reset_prefix_cache", sessions.reset, summary="Forget the prefixes that no session needs"),
    Path("POST", "/tokenize", tokens.tokenize, summary="Text or messages to token ids", body=TokenizeBody),
    Path("POST", "/detokenize", tokens.detokenize, summary="Token ids to text", body=DetokenizeBody),
    Path("GET", "/tokenizer_info", tokens.tokenizer_info, summary="The tokenizer's special tokens and template"),
    Path("GET", "/props", models.props, summary="The server's properties, as llama-server gives them"),
    Path("GET", "/slots", models.slots, summary="The engine's rows, as llama-server gives its slots"),
    Path("GET", "/api/version", ollama_models.version, both=False, summary="The version of Ollama's API", whole=True),
    Path("GET", "/api/tags", ollama_models.tags, both=False, summary="The models, as Ollama lists them", whole=True),
    Path(
        "GET", "/api/ps", ollama_models.ps, both=False, summary="The models in memory, as Ollama lists them", whole=True
    ),
    Path(
        "POST",
        "/api/show",
        ollama_models.show,
        both=False,
        summary="One model, as Ollama shows it",
        body=OllamaShowBody,
        whole=True,
    ),
    Path(
        "POST",
        "/api/pull",
        ollama_models.pull,
        both=False,
        summary="Whether a model is there to be asked",
        body=OllamaPullBody,
        whole=True,
    ),
    Path("POST", "/api/chat", ollama_answers.chat, both=False, summary="Ollama chat", body=OllamaChatBody),
    Path(
        "POST",
        "/api/generate",
        ollama_answers.generate,
        both=False,
        summary="Ollama completions",
        body=OllamaGenerateBody,
    ),
    Path("POST", "/api/embed", ollama_models.embed, both=False, summary="Ollama embeddings", body=OllamaEmbedBody),
    Path(
        "POST",
        "/api/embeddings",
        ollama_models.embeddings,
        both=False,
        summary="One embedding, as Ollama gave it before",
        body=OllamaEmbeddingsBody,
    ),
    Path("GET", "/openapi.json", _openapi, both=False, summary="This document", whole=True),
    Path("POST", "/apply-template", tokens.apply_template, summary="Messages to the text of the prompt", body=ChatBody),
)


def create_app(models: ServingEngine | ModelPool, settings: Settings, *, close_engine: bool = True) -> Starlette:
    """The server of an engine, or of a pool of models, for any ASGI server.

    At its shutdown the engines are closed unless told otherwise.
    """
    pool = models if isinstance(models, ModelPool) else ModelPool.of(models, settings)
    records = OwnedRecords.open(pool.records, settings.folder)
    kept = KeptResponses(records, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(pool.watch())
        yield
        watching.cancel()
        pool.drain()
        pool.cancel_all()
        await kept.close()
        await pool.close(close_engine)
        records.close()

    pool.attach(lambda service: Keeper(service, records))
    routes = [
        Route(path, endpoint(one), methods=[one.method])
        for one in (*PATHS, *conversations.PATHS, *page.PATHS)
        for path in one.paths
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Linger, seconds=settings.body_timeout),
            Middleware(RequestIds),
            Middleware(AccessLog),
            Middleware(Guard, settings=settings, open_paths=page.OPEN_PATHS),
            Middleware(LargeBodies, most=max(settings.max_bodies, settings.max_body, settings.max_sound)),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _failed},
        lifespan=lifespan,
    )
    app.state.pool, app.state.responses, app.state.records = pool, kept, records
    return app


async def _http_error(request: Request, error: Any) -> Response:
    message = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} has no {request.method}"}
    api = ApiError(message.get(error.status_code, error.detail), error.status_code)
    response = error_response(api, request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)
