"""`/v1/sessions` and `/v1/cache`: conversations that the server keeps, and why a prompt is computed or is not."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.types import ASGIApp

from lmstate.engine.results import EngineError
from lmstate.engine.session_record import Record
from lmstate.errors import StateError
from lmstate.files.private import private_folder
from lmstate.serve.answer.answers import usage_details
from lmstate.serve.answer.handlers import idempotency_key, json_response, log
from lmstate.serve.answer.messages import Chat
from lmstate.serve.answer.sampling import check_ids, sampling_params, stops
from lmstate.serve.answer.service import Service
from lmstate.serve.openai.chat import read_chat
from lmstate.serve.openai.completions import prompt_ids
from lmstate.serve.openai.fields import read_constraint, read_messages
from lmstate.serve.wire.errors import ApiError, as_api_error
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.schema.chat import PromptBody
from lmstate.serve.wire.schema.sessions import RewindBody, SendBody, SessionBody
from lmstate.serve.wire.sse import DONE, EventStream, comment, data, unless_gone
from lmstate.serve.wire.tenants import caller
from lmstate.vision.stored import to_json

if TYPE_CHECKING:
    from lmstate.engine import Completion, Session
    from lmstate.engine import Request as EngineRequest

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
MOST_SESSIONS = 100_000


async def create(service: Service, request: Request, body: SessionBody) -> ASGIApp:
    """Create a session; without a `name` it gets a random one."""
    name = checked_name(body.name or new_id("session_", 16))
    known = await asyncio.to_thread(names, service)
    if len(known) >= MOST_SESSIONS:
        raise ApiError(f"there are {len(known)} sessions: delete some", 429, retry_after=60)
    new, owner = service.engine.new_session, caller()
    session = await begun(service, name, lambda: new(owner.stored(name), Record(), owner.salt()))
    return json_response(shown(session), 201)


async def list_sessions(service: Service, request: Request) -> ASGIApp:
    known = await asyncio.to_thread(names, service)
    return json_response({"object": "list", "data": [{"object": "session", "name": name} for name in known]})


async def get(service: Service, request: Request) -> ASGIApp:
    session = await found(service, request)
    text = await asyncio.to_thread(service.tokenizer.decode, session.tokens, False)
    messages = await asyncio.to_thread(shown_messages, session)
    return json_response({**shown(session), "messages": messages, "tokens": session.tokens, "text": text})


async def delete(service: Service, request: Request) -> ASGIApp:
    session = await found(service, request)
    await done(session.close)
    return json_response({"object": "session", "name": name_of(session), "deleted": True})


async def rewind(service: Service, request: Request, body: RewindBody) -> ASGIApp:
    """Rewind a session to position `to`, in tokens."""
    session = await found(service, request)
    await done(lambda: session.rewind(body.to))
    return json_response(shown(session))


async def mark(service: Service, request: Request) -> ASGIApp:
    session = await found(service, request)
    position = await done(session.mark)
    return json_response({**shown(session), "position": position})


async def undo(service: Service, request: Request) -> ASGIApp:
    session = await found(service, request)
    await done(session.undo)
    return json_response(shown(session))


async def fork(service: Service, request: Request, body: SessionBody) -> ASGIApp:
    """Fork a session under a new `name`; both share all that was computed."""
    session = await found(service, request)
    name = checked_name(body.name or new_id("session_", 16))
    return json_response(shown(await begun(service, name, lambda: session.fork(caller().stored(name)))), 201)


async def save(service: Service, request: Request) -> ASGIApp:
    """Write the session into the server's own folder, under its name."""
    session = await found(service, request)
    if (lasting := service.settings.lasting_folder) is None:
        raise ApiError("there is no folder to save in: start the server with --store FOLDER, or GET /snapshot", 409)
    folder = private_folder(lasting / "saved")
    path = folder / f"{session.name}.safetensors"
    await done(lambda: session.save(path))
    return json_response({**shown(session), "bytes": path.stat().st_size})


async def download(service: Service, request: Request) -> ASGIApp:
    """The session with its state, as a file for any server of the same model."""
    session = await found(service, request)
    path = temporary()
    try:
        await done(lambda: session.save(path))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    name = f"{name_of(session)}.safetensors"
    gone = BackgroundTask(path.unlink, missing_ok=True)
    return FileResponse(path, media_type="application/octet-stream", filename=name, background=gone)


async def upload(service: Service, request: Request) -> ASGIApp:
    """A session from such a file; the path names it."""
    name = checked_name(request.path_params["name"])
    load, owner = service.engine.load_session, caller()
    async with received(service, request) as path:
        session = await begun(service, name, lambda: load(owner.stored(name), path, owner.salt()))
    return json_response(shown(session), 201)


async def tree(service: Service, request: Request) -> ASGIApp:
    """The caller's prefixes that are kept, as text."""
    tree = await asyncio.to_thread(service.engine.tree, caller().salt())
    return json_response({"object": "cache.tree", "tree": tree})


async def reset(service: Service, request: Request) -> ASGIApp:
    """Forget what was computed for the caller and no session needs; of all, where names have no owners."""
    await asyncio.to_thread(service.engine.clear_prefixes, caller().salt() or None)
    return json_response({"object": "cache.reset"})


async def explain(service: Service, request: Request, body: PromptBody) -> ASGIApp:
    """Explain how much of a prompt would be reused, and why not more: `prompt` or `messages`, as elsewhere."""
    if body.messages is not None:
        chat, _ = read_chat(body, body.messages)
        await asyncio.to_thread(service.refuse_long_chat, chat)
        tokens = (await asyncio.to_thread(service.renderer.prompt, chat)).tokens
    else:
        tokens = await asyncio.to_thread(prompt_ids, service, body.prompt, "prompt")
    service.room(len(tokens))
    reuse = await asyncio.to_thread(service.engine.explain, tokens, caller().salt(body.cache_salt))
    return json_response({"object": "cache.explanation", "prompt_tokens": len(tokens), **asdict(reuse)})


async def send(service: Service, request: Request, body: SendBody) -> ASGIApp:
    """Go on with `text`, `messages` or `tokens`; streamed if asked."""
    session = await found(service, request)
    prompt, count = await asyncio.to_thread(read_prompt, service, body)
    params = sampling_params(body, service.vocab_size, service.model.defaults)
    constraint, grammar = read_constraint(body, body.response_format), None
    if constraint is not None:
        grammar = await unless_gone(
            request.receive, service.grammars.compile_checked(constraint.lark, constraint.param)
        )
    key = idempotency_key(request, body)
    started = await submitted(
        partial(
            service.submit,
            prompt,
            replace(params, stop=stops(body.stop), grammar=grammar),
            max_new_tokens=body.max_tokens,
            priority=body.priority or 0,
            session=session,
            length=0 if key is not None and session.answered(key) else len(session.tokens) + count,
            idempotency_key=key,
        )
    )
    # A client that gave a key asks again: it finds the turn then.
    leave = started.cancel if key is None else nothing
    if body.stream:
        settings = service.settings
        return EventStream(
            pieces(session, started, leave),
            lambda: comment("prompt {}/{}".format(*started.progress)),
            settings.ping_interval,
            settings.write_timeout,
            {},
            closed=leave,
        )
    try:
        completion = await unless_gone(request.receive, started.wait())
    finally:
        leave()
    return json_response(answered(session, completion))


def nothing() -> None:
    """Do nothing when a client that gave an idempotency key leaves."""


async def pieces(session: Session, request: EngineRequest, leave: Callable[[], None]) -> AsyncIterator[bytes]:
    """The stream of an answer: text and tokens as they come, then the whole. `leave` is called at its end."""
    try:
        async for piece in request:
            yield data({"object": "session.piece", "text": piece.text, "tokens": piece.tokens})
        yield data(answered(session, await request.wait()))
        yield DONE
    except Exception as error:
        if not isinstance(error, EngineError):
            log.error("a stream failed", exc_info=error)
        yield data(as_api_error(error).openai())
    finally:
        leave()


async def submitted(submit: Callable[[], EngineRequest]) -> EngineRequest:
    """Submit off the loop, for the store is asked. A request that no client waits for any more is cancelled."""
    submitting = asyncio.ensure_future(asyncio.to_thread(submit))

    def cancel(done: asyncio.Future[EngineRequest]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().cancel()

    try:
        return await asyncio.shield(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(cancel)
        raise


def answered(session: Session, completion: Completion) -> dict[str, Any]:
    usage = completion.usage
    counts = {"prompt_tokens": usage.prompt, "completion_tokens": usage.generated, **usage_details(usage)}
    return {
        **shown(session),
        "object": "session.answer",
        "stored": completion.stored,
        "text": completion.texts[0],
        "tokens": completion.tokens[0],
        "finish_reason": completion.finished[0],
        "usage": counts,
    }


def read_prompt(service: Service, body: SendBody) -> tuple[Any, int]:
    """(what `Session.send` takes, about how many tokens it is)."""
    if sum(one is not None for one in (body.text, body.messages, body.tokens)) != 1:
        raise ApiError("one of text, messages and tokens must be given", param="text")
    if body.tokens is not None:
        return check_ids(body.tokens, "tokens", service.model.config.ids), len(body.tokens)
    if body.text is not None:
        service.refuse_long(body.text)
        return body.text, len(service.tokenizer.encode(body.text, add_special_tokens=False))
    said = read_messages(body.messages or ())
    if any(one.pictures for one in said):
        raise ApiError("a session takes no pictures over HTTP: send the conversation as a chat", param="messages")
    service.refuse_long_chat(Chat(tuple(said)))
    texts = [text for one in said for text in (one.content, *(call.arguments for call in one.calls))]
    return service.renderer.template_messages(said), sum(len(service.tokenizer.encode(text, False)) for text in texts)


def shown(session: Session) -> dict[str, Any]:
    return {
        "object": "session",
        "name": name_of(session),
        "length": len(session.tokens),
        "generation": session.generation,
    }


async def found(service: Service, request: Request) -> Session:
    name = request.path_params["name"]
    # Off the loop: a store, which may be slow to answer, is asked for a session that is not here.
    if (session := await asyncio.to_thread(find, service, name)) is None:
        raise ApiError(f"there is no session {name[:100]!r}", 404)
    return session


def shown_messages(session: Session) -> list[Any]:
    """Messages of a session as JSON has them, the bytes of pictures in base64."""
    messages: list[Any] = json.loads(json.dumps(session.messages, default=to_json))
    return messages


def find(service: Service, name: str) -> Session | None:
    """The caller's session of this name."""
    return service.engine.find_session(caller().stored(name), caller().salt())


def names(service: Service) -> list[str]:
    """The names of the caller's sessions."""
    return [name for stored in service.engine.sessions() if (name := caller().shown(stored)) is not None]


def name_of(session: Session) -> str:
    return caller().shown(session.name) or session.name


def checked_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ApiError("a session's name is 1 to 100 letters, digits and _ . -, the first no dot", param="name")
    return name


async def done(action: Callable[[], T]) -> T:
    """Run an action of a session off the loop. Raises `ApiError` for what it refuses."""
    try:
        return await asyncio.to_thread(action)
    except (EngineError, StateError) as error:
        raise as_api_error(error) from None
    except ValueError as error:
        raise ApiError(str(error)) from None


async def begun(service: Service, name: str, make: Callable[[], Session]) -> Session:
    """A new session of this name. Raises `ApiError` if there is one, be it that another client has just made it."""
    try:
        return await done(make)
    except ApiError as error:
        if error.status != 400 or await asyncio.to_thread(find, service, name) is None:
            raise
        message = f"there is a session {name!r} already: delete it, or take another name"
        raise ApiError(message, 409, param="name") from None


@asynccontextmanager
async def received(service: Service, request: Request) -> AsyncIterator[Path]:
    """The file that a request uploads, for as long as it is read. Raises `ApiError`, which does not name its place."""
    path = temporary()
    try:
        await _receive(service, request, path)
        yield path
    except ApiError as error:
        error.message = error.message.replace(str(path), "the file")
        raise
    finally:
        path.unlink(missing_ok=True)


async def _receive(service: Service, request: Request, path: Path) -> None:
    """The body of a request into a file, within limits: it may take long, as long as more of it comes."""
    size, most, patience = 0, service.settings.max_snapshot, service.settings.body_timeout
    try:
        async with asyncio.timeout(patience) as waiting:
            with path.open("wb") as file:
                async for piece in request.stream():
                    size += len(piece)
                    if size > most:
                        raise ApiError(f"the file has more than {most} bytes", 413, code="body_too_large")
                    await asyncio.to_thread(file.write, piece)
                    waiting.reschedule(asyncio.get_running_loop().time() + patience)
    except TimeoutError:
        raise ApiError("the file did not come in time", 408) from None


def temporary() -> Path:
    """An empty file of our own."""
    handle, name = tempfile.mkstemp(prefix="lmstate-session-", suffix=".safetensors")
    os.close(handle)
    return Path(name)
