"""`POST /v1/rerank`: documents by how well they answer a query, as Jina, Cohere and llama-server tell it.

The model is asked about each document whether it does, as Qwen3-Reranker was trained to be (arXiv 2506.05176), and the
score is the probability of "yes" against "no". All questions begin with the same query, which is read once.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import exp
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lmstate.serve.answer.handlers import json_response
from lmstate.serve.answer.messages import Chat, Message
from lmstate.serve.answer.service import Service
from lmstate.serve.openai.completions import queued
from lmstate.serve.openai.fields import token_counts
from lmstate.serve.wire.body import wrong
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.schema.completions import RerankBody, RerankDocument
from lmstate.serve.wire.sse import unless_gone

if TYPE_CHECKING:
    from lmstate.engine import Completion, TokenLogprob
    from lmstate.engine import Request as EngineRequest

TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
LISTED = 1024  # of the likeliest tokens: the less likely of the two answers is nearly always among them
PREFER = 100.0  # on the logits of both answers: no other token is picked, and which of them is does not change


async def rerank(service: Service, request: Request, body: RerankBody) -> ASGIApp:
    if not service.engine.chats:
        raise ApiError("this model has no chat template, by which a document is judged: serve a reranker")
    documents, most = [_text(one) for one in body.documents], service.settings.max_inputs
    if not 0 < len(documents) <= most:
        raise wrong("documents", f"1 to {most} texts, or objects with a text", None)
    yes, no = _answers(service)
    prompts = await asyncio.to_thread(_prompts, service, body, documents)
    params = _params(service, (yes, no))
    requests: list[EngineRequest] = []
    try:
        for prompt in prompts:
            await queued(service, request.receive, requests, prompt, params, 1)
        completions = [await unless_gone(request.receive, one.wait()) for one in requests]
        scores = []
        for prompt, completion in zip(prompts, completions):
            told = _logprobs(completion)
            for missing in {yes, no} - told.keys():
                only = _params(service, (missing,))
                await queued(service, request.receive, requests, prompt, only, 1)
                told |= _logprobs(await unless_gone(request.receive, requests[-1].wait()))
            scores.append(1.0 / (1.0 + exp(min(told[no] - told[yes], 700.0))))
    finally:
        for one in requests:
            one.cancel()
    best = sorted(range(len(documents)), key=lambda index: -scores[index])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    return json_response(
        {
            "id": new_id("rerank-"),
            "object": "list",
            "model": body.model or service.settings.model_name,
            "results": results,
            "usage": token_counts(sum(map(len, prompts)), 0),
            "meta": {"api_version": {"version": "2"}},
        }
    )


def _text(document: str | RerankDocument) -> str:
    return document if isinstance(document, str) else document.text


def _answers(service: Service) -> tuple[int, int]:
    """The tokens that yes and no begin with."""
    yes, no = (service.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
    if yes == no:
        raise ApiError("yes and no begin with the same token of this model: it cannot judge documents")
    return yes, no


def _params(service: Service, answers: tuple[int, ...]) -> Any:
    from lmstate.generation import SamplingParams

    listed = min(LISTED, service.vocab_size)
    return SamplingParams(logprobs=listed, logit_bias=dict.fromkeys(answers, PREFER), ignore_eos=True)


def _prompts(service: Service, body: RerankBody, documents: list[str]) -> list[list[int]]:
    """The question about each document. Raises `ApiError` for one that is longer than the context."""
    head = f"<Instruct>: {body.instruction or INSTRUCTION}\n<Query>: {_text(body.query)}\n<Document>: "
    prompts = []
    for index, text in enumerate(documents):
        if body.max_tokens_per_doc is not None:
            tokens = service.tokenizer.encode(service.beginning(text), add_special_tokens=False)
            text = service.tokenizer.decode(tokens[: body.max_tokens_per_doc])
        chat = Chat((Message("system", TASK), Message("user", head + text)), thinking=False)
        try:
            service.refuse_long(head + text)
            prompts.append(service.renderer.prompt(chat).tokens)
            service.room(len(prompts[-1]))
        except ApiError as error:
            raise replace(error, message=f"documents[{index}]: {error.message}", param="documents") from None
    return prompts


def _logprobs(completion: Completion) -> dict[int, float]:
    """The log probabilities of the tokens that may come first."""
    assert completion.logprobs is not None
    entry: TokenLogprob = completion.logprobs[0][0]
    return {**dict(entry.top), entry.token: entry.logprob}
