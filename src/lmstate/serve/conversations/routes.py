"""`/page`: what the page at `/` asks of the server. Its own; clients have `/v1/sessions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from math import exp
from time import time
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp

from lmstate.audio.wav import check_wav
from lmstate.engine.session import Session
from lmstate.generation.sampling import FILTERS
from lmstate.serve.answer.handlers import json_response
from lmstate.serve.answer.paths import Path
from lmstate.serve.answer.sampling import check_ids
from lmstate.serve.answer.service import Service
from lmstate.serve.conversations.keeper import Keeper, session_name
from lmstate.serve.conversations.live import Live
from lmstate.serve.conversations.page import HEADERS
from lmstate.serve.conversations.tree import Conversation, MessageNode
from lmstate.serve.sessions import done, received, temporary
from lmstate.serve.wire.body import wrong
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.picture_sources import picture_bytes
from lmstate.serve.wire.schema.sessions import PageConversation, PageFork, PageMessage
from lmstate.serve.wire.sse import EventStream, comment, data
from lmstate.serve.wire.tenants import caller
from lmstate.vision.pictures import read_picture
from lmstate.vision.reader import KINDS, MOST_PICTURES, PLURALS, PicturePrompt, kind_of_file, name_of

MOST_PREFIXES, MOST_BACK = 200, 20  # of the store, and of earlier answers, that the panel of the state tells of
# The first bytes of a picture's file, and its media type.
TYPES = {b"\x89PNG": "image/png", b"\xff\xd8": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
WAIT, LOOK = 5.0, 0.5  # seconds after which a page that hears nothing is told so; between looks for the server's end


def keeper(request: Request) -> Keeper:
    kept: Keeper = request.state.served.attached
    return kept


async def about(service: Service, request: Request) -> ASGIApp:
    """The model, and what its makers suggest."""
    from lmstate.generation import Sampler

    suggested = Sampler.suggested(service.model.defaults)
    return json_response(
        {
            "model": service.settings.model_name,
            "family": service.model.config.family,
            "layers": len(service.model.blocks),
            "context": service.context,
            "max_tokens": service.settings.max_new_tokens,
            "chats": service.engine.chats,
            "pictures": service.sees,
            "sounds": service.takes_sounds,
            "kept": service.settings.lasting_folder is not None or keeper(request).shared,
            "temperature": suggested.temperature,
            "top_p": suggested.top_p,
        }
    )


async def list_conversations(service: Service, request: Request) -> ASGIApp:
    search = request.query_params.get("search", "")[:200]
    return json_response({"data": await asyncio.to_thread(keeper(request).store.list, search)})


async def create(service: Service, request: Request, body: PageConversation) -> ASGIApp:
    kept = keeper(request)
    settings = settings_of(body) or {}
    kept.params(settings)
    return json_response({"id": (await kept.create(title_of(body) or "", settings)).conversation.id}, 201)


async def change(service: Service, request: Request, body: PageConversation) -> ASGIApp:
    """Another `title`, other `settings`."""
    live = await opened(request)
    await keeper(request).change(live, title_of(body), settings_of(body))
    return json_response({"id": live.conversation.id})


async def delete(service: Service, request: Request) -> ASGIApp:
    """`empty=1`: only if it has no message."""
    live = await opened(request)
    await keeper(request).delete(live, only_empty=request.query_params.get("empty") == "1")
    return json_response({"deleted": True})


async def events(service: Service, request: Request) -> ASGIApp:
    """The conversation, and all that changes in it. `since` and `epoch`: what the page has already."""
    live, kept = await opened(request), keeper(request)
    seen = request.query_params.get("since", "")
    known = request.query_params.get("epoch") == kept.epoch and seen.isascii() and seen.isdigit() and len(seen) < 16
    settings = service.settings
    stream = changes(kept, live, int(seen) if known else 0)
    return EventStream(stream, lambda: comment("ping"), settings.ping_interval, settings.write_timeout, {})


async def changes(kept: Keeper, live: Live, seen: int) -> AsyncIterator[bytes]:
    live.watchers += 1
    try:
        if seen > live.version:  # of a time when the conversation was open longer
            seen = 0
        whole = seen == 0
        await live.render()
        while not live.deleted:
            told = live.since(seen)
            seen = told["version"]  # not what it is once this is sent: changes happen meanwhile
            yield data({"epoch": kept.epoch, "whole": whole, **told})
            whole = False
            for _ in range(int(WAIT / LOOK)):
                if kept.service.draining:
                    return  # the page finds the next server
                await kept.look(live)
                if await live.wait(seen, LOOK):
                    break
                if reading := live.reading():
                    live.touch(*reading)
        yield data({"deleted": True})
    finally:
        live.watchers -= 1


async def say(service: Service, request: Request, body: PageMessage) -> ASGIApp:
    """`text` and `pictures` below the answer `parent` (null: it begins the conversation); neither: another answer."""
    live = await opened(request)
    parent = node_of(live, body.parent)
    if body.text is not None or body.pictures:
        text = body.text or ""
        if not text.strip() and not body.pictures:
            raise wrong("text", "a message that is not empty", body.text)
        names, new = await asyncio.to_thread(read_pictures, live.conversation, body.pictures)
        user, answer = await keeper(request).say(live, parent, text, names, new)
        return json_response({"user": user.id, "answer": answer.id}, 201)
    if parent is None:
        raise wrong("parent", "a message to be answered", None)
    return json_response({"answer": (await keeper(request).answer(live, parent)).id}, 201)


def read_pictures(conversation: Conversation, given: Sequence[str]) -> tuple[list[str], dict[str, bytes]]:
    """(the names of pictures, the files of those that are new to the conversation). Raises `ApiError`."""
    names, new = list[str](), dict[str, bytes]()
    for index, one in enumerate(given):
        if not conversation.has_picture(one):
            if one[:5].lower() != "data:":
                raise wrong(f"pictures[{index}]", "a data URL, or the SHA-256 of a picture of the conversation", one)
            content = picture_bytes(one, ())
            one = name_of(content)
            if not conversation.has_picture(one):
                new[one] = content
        names.append(one)
    return names, new


async def picture(service: Service, request: Request) -> ASGIApp:
    """The file of a picture, for those who may see the conversation."""
    live, name = await opened(request), request.path_params["name"]
    if not live.conversation.has_picture(name):
        raise ApiError(f"the conversation has no picture {name[:100]!r}", 404)
    content = await asyncio.to_thread(keeper(request).branches.picture, live.conversation, name)
    kind = next((kind for start, kind in TYPES.items() if content.startswith(start)), "application/octet-stream")
    if kind_of_file(content) == "audio":
        kind = "audio/wav"
    return Response(content, headers={**HEADERS, "cache-control": "no-store"}, media_type=kind)


async def go_on(service: Service, request: Request) -> ASGIApp:
    live, answer = await found(request)
    return json_response({"answer": (await keeper(request).go_on(live, answer)).id})


async def stop(service: Service, request: Request) -> ASGIApp:
    live, answer = await found(request)
    keeper(request).stop(live, answer)
    return json_response({"answer": answer.id})


async def fork(service: Service, request: Request, body: PageFork) -> ASGIApp:
    """An answer that has `token` in the place of its own token number `at`."""
    live, answer = await found(request)
    (token,) = check_ids([body.token], "token", service.vocab_size)
    return json_response({"answer": (await keeper(request).fork(live, answer, body.at, token)).id}, 201)


async def tokens(service: Service, request: Request) -> ASGIApp:
    """The tokens of an answer, each with its probability and the likeliest others."""
    live, answer = await found(request)
    decode = service.tokenizer.decode
    own = live.conversation.own_tokens(answer)

    def told() -> list[dict[str, Any]]:
        return [
            {
                "id": token,
                "text": decode([token], False),
                "p": exp(logprob),
                "top": [
                    {"id": id, "text": decode([id], False), "p": exp(other), "end": id in service.model.eos_ids}
                    for id, other in top
                ],
            }
            for token, (logprob, top) in zip(own, list(answer.logprobs), strict=False)
        ]

    return json_response({"data": await asyncio.to_thread(told)})


async def state(service: Service, request: Request) -> ASGIApp:
    """State of a branch: bytes, what going on and going back would compute, and the prefixes that are kept."""
    live, node = await found(request)
    answer = node if node.role == "assistant" else live.conversation.answer_before(node)
    if answer is None or not live.conversation.tokens(answer):
        raise ApiError("nothing was computed for this branch yet", 409)
    engine, salt, kept_by = service.engine, caller().salt(), keeper(request)
    held = await asyncio.to_thread(kept_by.branches.prompt, live.conversation, answer)
    kept = await asyncio.to_thread(engine.prefixes, held.identities, salt)
    own = [one for one in kept if one.branch]
    shown = kept if len(kept) <= MOST_PREFIXES else own[-MOST_PREFIXES:]
    return json_response(
        {
            "tokens": len(held),
            "shared": shared(live.conversation, answer),
            "context": service.context,
            "memory": await asyncio.to_thread(engine.held, held, salt),
            "shared_bytes": sum(one.nbytes for one in own if one.shared),
            "own_bytes": sum(one.nbytes for one in own if not one.shared),
            "rewind": await asyncio.to_thread(engine.rewind_window),
            "back": await asyncio.to_thread(back, kept_by, live.conversation, answer, held),
            "reuse": asdict(await asyncio.to_thread(engine.explain, held, salt)),
            "usage": answer.usage,
            "session": session_name(live.conversation.id, answer.id),
            "prefixes": [asdict(one) for one in shown],
            "prefixes_left_out": len(kept) - len(shown),
        }
    )


def back(kept: Keeper, conversation: Conversation, answer: MessageNode, held: PicturePrompt) -> list[dict[str, Any]]:
    """Costs of going back to each earlier answer of a branch: the tokens up to it, and how many are computed again."""
    above = [node for node in conversation.path(answer)[:-1] if node.role == "assistant"][-MOST_BACK:]
    told = []
    for node in reversed(above):
        tokens = conversation.tokens(node)
        if tokens == held.tokens[: len(tokens)]:
            media = tuple(span for span in held.media if span.end <= len(tokens))
        else:
            media = kept.branches.prompt(conversation, node).media
        # With a token after them: their own last logits are not needed to go on.
        asked = PicturePrompt([*tokens, tokens[0]], media)
        reused = min(kept.service.engine.explain(asked, caller().salt()).reused, len(tokens))
        told.append({"id": node.id, "tokens": len(tokens), "computed": len(tokens) - reused})
    return told


def shared(conversation: Conversation, answer: MessageNode | None) -> int:
    """Number of a branch's leading tokens that another branch shares: those before its last fork."""
    path = conversation.path(answer)
    for node in reversed(path):
        if len(conversation.children(node.parent)) > 1:
            if node.role == "assistant":
                return node.start
            above = conversation.answer_before(node)
            return len(conversation.tokens(above))
    return 0


async def download(service: Service, request: Request) -> ASGIApp:
    """A branch with its state, as a file for any server of the same model."""
    live, answer = await found(request)
    if answer.role != "assistant" or answer.status == "running":
        raise ApiError("a branch is saved at the end of an answer that is no longer written", 409)
    record = await asyncio.to_thread(keeper(request).branches.whole_record, live.conversation, answer)
    path = temporary()
    try:
        await done(lambda: service.engine.save_session(record, path, caller().salt()))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    gone = BackgroundTask(path.unlink, missing_ok=True)
    return FileResponse(path, media_type="application/octet-stream", filename="session.safetensors", background=gone)


async def upload(service: Service, request: Request) -> ASGIApp:
    """A conversation from such a file."""
    kept, name = keeper(request), caller().stored(new_id("upload_"))
    async with received(service, request) as path:
        session = await done(lambda: service.engine.load_session(name, path, caller().salt()))
    try:
        nodes, system, pictures = await asyncio.to_thread(nodes_of, service, session)
    finally:
        await asyncio.to_thread(session.close)
    title = " ".join(nodes[0].text.split())[:60] if nodes else ""
    live = await kept.create(title, {"system": system} if system else {}, nodes, pictures)
    if nodes and nodes[-1].role == "assistant":
        try:
            end = await asyncio.to_thread(kept.branches.prompt, live.conversation, nodes[-1])
            await kept.hold(live.conversation, nodes[-1], end.media)
        except BaseException:  # too large, or the pictures are not those of the messages
            await kept.delete(live)
            raise
    return json_response({"id": live.conversation.id}, 201)


def nodes_of(service: Service, session: Session) -> tuple[list[MessageNode], str, dict[str, bytes]]:
    """(one branch of messages, the system prompt, files of pictures by their names).

    Raises `ApiError` for a session that is not a chat, or has pictures that are damaged or that the model cannot see.
    """
    tokens, system, nodes, length = session.tokens, "", list[MessageNode](), 0
    pictures: dict[str, bytes] = {}
    told = session.messages
    if not told:
        raise ApiError("the file holds plain text, no messages: send it to /v1/sessions/NAME/snapshot")
    for index, message in enumerate(told):
        role, (text, files) = message.get("role"), parted_content(message.get("content"))
        if not isinstance(text, str) or role not in ("system", "user", "assistant"):
            raise ApiError("the file's session has messages that are not text of system, user or assistant")
        kinds = set(map(kind_of_file, files))
        taken = {"image": service.sees, "audio": service.takes_sounds}
        if files and (role != "user" or not all(taken[kind] for kind in kinds)):
            told_of = " and ".join(PLURALS[kind] for kind in sorted(kinds))
            raise ApiError(f"the file's session has {told_of}, and this server's model does not read all of them")
        if role == "system":
            system = f"{system}\n\n{text}".strip()
            continue
        if role != ("user" if not nodes or nodes[-1].role == "assistant" else "assistant"):
            raise ApiError("the file's session does not take turns: its messages cannot be shown as a conversation")
        names = [name_of(file) for file in files]
        sounds = [name for name, file in zip(names, files) if kind_of_file(file) == "audio"]
        pictures |= dict(zip(names, files))
        above = nodes[-1].id if nodes else None
        node = MessageNode(new_id("m", 10), above, role, text, names, sounds, created=time(), system=system)
        if role == "assistant":
            start, stop, node.end = place(message.get("lmstate"), length, len(tokens))
            if index == len(told) - 1:
                stop = len(tokens)
            if stop:
                node.base, node.start, node.added = length, start, tokens[length:stop]
                node.status = "done" if node.end is not None or message.get("lmstate") is None else "stopped"
                length = stop
        nodes.append(node)
    if (count := sum(len(node.pictures) for node in nodes)) > MOST_PICTURES:
        raise ApiError(f"the file's session has {count} pictures; a conversation may have {MOST_PICTURES}")
    for content in pictures.values():
        (read_picture if kind_of_file(content) == "image" else check_wav)(content)
    return nodes, system, pictures


def parted_content(content: Any) -> tuple[Any, list[bytes]]:
    """(text, files) of a message's content. Anything else than text, pictures and sounds is given back as it is."""
    if not isinstance(content, list):
        return content, []
    filed = [part for part in content if isinstance(part, dict) and part.get("type") in KINDS]
    files: list[Any] = [part.get(part["type"]) for part in filed]
    texts: list[Any] = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    whole = len(files) + len(texts) == len(content)
    if not whole or not all(isinstance(one, bytes) for one in files) or not all(isinstance(one, str) for one in texts):
        return content, []
    return "\n".join(texts), files


def place(told: Any, length: int, most: int) -> tuple[int, int, int | None]:
    """(start, stop, end) of an answer in its session's tokens; (0, 0, None) where that is not known."""
    values = told if isinstance(told, dict) else {}
    start, stop, end = (values.get(key) for key in ("start", "stop", "end"))
    if values.get("whole") is not True or type(start) is not int or type(stop) is not int:
        return most, 0, None
    if not length <= start <= stop <= most or not (end is None or type(end) is int):
        return most, 0, None
    return start, stop, end


async def opened(request: Request) -> Live:
    return await keeper(request).open(request.path_params["id"])


async def found(request: Request) -> tuple[Live, MessageNode]:
    live = await opened(request)
    node = node_of(live, request.path_params["node"])
    assert node is not None
    return live, node


def node_of(live: Live, id: str | None) -> MessageNode | None:
    if id is not None and id not in live.conversation.nodes:
        raise ApiError(f"the conversation has no message {id[:100]!r}", 404)
    return None if id is None else live.conversation.nodes[id]


def title_of(body: PageConversation) -> str | None:
    return None if body.title is None else " ".join(body.title.split())


def settings_of(body: PageConversation) -> dict[str, Any] | None:
    """The settings that the page knows; others are left out."""
    if body.settings is None:
        return None
    names = ("system", "temperature", *FILTERS, "seed", "max_tokens")
    return {name: body.settings[name] for name in names if body.settings.get(name) is not None}


ROOT = "/page/conversations"
PATHS = tuple(
    Path(method, path, handler, both=False, body=body, watches=handler is events)
    for method, path, handler, body in (
        ("GET", "/page/about", about, None),
        ("GET", ROOT, list_conversations, None),
        ("POST", ROOT, create, PageConversation),
        ("POST", "/page/upload", upload, None),
        ("POST", f"{ROOT}/{{id}}", change, PageConversation),
        ("DELETE", f"{ROOT}/{{id}}", delete, None),
        ("GET", f"{ROOT}/{{id}}/events", events, None),
        ("POST", f"{ROOT}/{{id}}/say", say, PageMessage),
        ("POST", f"{ROOT}/{{id}}/{{node}}/continue", go_on, None),
        ("POST", f"{ROOT}/{{id}}/{{node}}/stop", stop, None),
        ("POST", f"{ROOT}/{{id}}/{{node}}/fork", fork, PageFork),
        ("GET", f"{ROOT}/{{id}}/pictures/{{name}}", picture, None),
        ("GET", f"{ROOT}/{{id}}/{{node}}/tokens", tokens, None),
        ("GET", f"{ROOT}/{{id}}/{{node}}/state", state, None),
        ("GET", f"{ROOT}/{{id}}/{{node}}/session", download, None),
    )
)
