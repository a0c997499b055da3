"""The fields of OpenAI's chat protocol: messages, response formats, log probabilities, usage."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from lmstate.serve.answer.answers import Answer, usage_details
from lmstate.serve.answer.messages import Call, Message
from lmstate.serve.answer.pictures import picture_mark
from lmstate.serve.answer.service import Service
from lmstate.serve.tools.custom import arguments_of
from lmstate.serve.wire.body import wrong
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.picture_sources import FRAMES, SOUND, VIDEO
from lmstate.serve.wire.schema.chat import (
    ChatCall,
    ChatMessage,
    Content,
    ContentPart,
    ImageUrl,
    ThinkingFields,
    VideoUrl,
)
from lmstate.serve.wire.schema.common import Generating, ResponseFormat, StructuredOutputs
from lmstate.text.grammars.constraint import Constraint, of_format
from lmstate.text.grammars.lark import json_object, of_words

if TYPE_CHECKING:
    from lmstate.engine import TokenLogprob

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
PICTURE_PARTS = ("image_url", "input_image")
VIDEO_PARTS = ("video_url", "video")
UNTHINKING = ("none", "minimal")  # efforts


def read_messages(given: Sequence[ChatMessage], path: str = "messages") -> tuple[Message, ...]:
    """The `messages` of a chat. Raises `ApiError` for parts that no model here has a use for."""
    return tuple(_read_message(one, f"{path}[{index}]") for index, one in enumerate(given))


def _read_message(given: ChatMessage, path: str) -> Message:
    content, pictures = read_content(given.content, f"{path}.content", given.role)
    calls = tuple(_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(given.tool_calls or ()))
    if given.role == "tool":
        if given.tool_call_id is None:
            raise wrong(f"{path}.tool_call_id", "a string", None)
        return Message("tool", content, call_id=given.tool_call_id, name=given.name, pictures=pictures)
    reasoning = given.reasoning_content or given.reasoning or ""
    if given.content is None and given.role != "assistant":  # whose answer may have been empty
        raise wrong(f"{path}.content", "a string or an array of parts", None)
    return Message(ROLES[given.role], content, reasoning, calls, name=given.name, pictures=pictures)


def read_content(content: Content | None, path: str, role: str = "assistant") -> tuple[str, tuple[str, ...]]:
    """(text, or that of parts: those of an answer go on from each other, others are lines; the URLs of pictures)."""
    if content is None or isinstance(content, str):
        return content or "", ()
    urls = [_picture(part, f"{path}[{index}]") for index, part in enumerate(content)]
    pairs = enumerate(zip(content, urls))
    parts = [_part(part, f"{path}[{index}]") if url is None else picture_mark(url) for index, (part, url) in pairs]
    return ("" if role == "assistant" else "\n").join(parts), tuple(url for url in urls if url is not None)


def _picture(part: ContentPart, path: str) -> str | None:
    """The URL of a picture, of a sound or of a video; None for another part."""
    if part.type == "input_audio":
        if part.input_audio is None:
            raise wrong(f"{path}.input_audio", "an object", None)
        return SOUND + part.input_audio.data
    if part.type in VIDEO_PARTS:
        return _video(part, path)
    if part.type not in PICTURE_PARTS:
        return None
    given = part.image_url
    url = given.url if isinstance(given, ImageUrl) else given
    if url is None:
        if part.file_id is not None:
            raise ApiError(f"{path}.file_id is not supported here: send the picture in a data URL", param=path)
        raise wrong(f"{path}.image_url", "a URL", None)
    return url


def _video(part: ContentPart, path: str) -> str:
    """The data URL of a video, see `video_part`."""
    if part.type == "video":
        if not part.video:
            raise wrong(f"{path}.video", "a list of frames, each a picture in a data URL", None)
        frames = [re.sub(r"^data:image/[^,]*;base64,", "", frame) for frame in part.video]
        if wrongly := [frame for frame in frames if ":" in frame[:60]]:
            raise ApiError(f"{path}.video has {wrongly[0][:60]!r}; a frame is data:image/jpeg;base64,...", param=path)
        return f"data:video/{FRAMES}{_rate(part.fps)};base64,{','.join(frames)}"
    given = part.video_url
    url, fps = (given.url, given.fps) if isinstance(given, VideoUrl) else (given, None)
    if url is None:
        raise wrong(f"{path}.video_url", "a URL", None)
    if (head := VIDEO.match(url)) is None:
        raise ApiError(f"{path}.video_url is {url[:60]!r}; send a video as data:video/mp4;base64,...", param=path)
    at = head.start(3)
    return url[:at] + _rate(fps) + url[at:]


def _rate(fps: float | None) -> str:
    return "" if fps is None else f";fps={fps:g}"


def _part(part: ContentPart, path: str) -> str:
    kind = part.type or "text"
    if kind not in (*TEXT_PARTS, "refusal"):
        raise ApiError(f"{path} is of type {kind!r}; text, pictures, sounds and videos are read here", param=path)
    text, name = (part.refusal, "refusal") if kind == "refusal" else (part.text, "text")
    if text is None:
        raise wrong(f"{path}.{name}", "a string", None)
    return text


def _call(given: ChatCall, path: str) -> Call:
    id = given.id or ""
    if given.custom is not None:
        return Call(id, given.custom.name, arguments_of(given.custom.input or ""))
    if given.function is None:
        raise wrong(f"{path}.function", "an object", None)
    arguments = given.function.arguments
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(id, given.function.name, arguments or "{}")


def read_constraint(
    body: Generating, format: ResponseFormat | None, path: str = "response_format"
) -> Constraint | None:
    """The grammar that an answer must fit: of the fields that local servers share, or of `format`, which is at
    `path` of the body."""
    shared = StructuredOutputs(
        json=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.grammar if body.grammar is not None else body.guided_grammar,
    )
    grammar = "grammar" if body.grammar is not None else "guided_grammar"
    names = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": grammar}
    if (found := _structured(shared, names)) is not None:
        return found
    others = StructuredOutputs(
        json=body.json_schema if body.format in (None, "", "json") else body.format,
        regex=body.regex,
        grammar=body.ebnf,
        json_object=body.format == "json" or None,
    )
    schema = "json_schema" if body.json_schema is not None else "format"
    names = {"json": schema, "regex": "regex", "grammar": "ebnf", "json_object": "format"}
    if (found := _structured(others, names)) is not None:
        return found
    if body.structured_outputs is not None:
        names = {key: f"structured_outputs.{key}" for key in StructuredOutputs.__struct_fields__}
        return _structured(body.structured_outputs, names)
    return None if format is None else of_format(msgspec.to_builtins(format), path)


def _structured(given: StructuredOutputs, names: dict[str, str]) -> Constraint | None:
    """The constraint of whichever field is given; `names` are what errors call them."""
    if given.grammar is not None:
        return Constraint.of_grammar(given.grammar, names["grammar"])
    if given.regex is not None:
        return Constraint.of_pattern(given.regex, names["regex"])
    if given.json is not None:
        return Constraint.of_schema(given.json, names["json"])
    if given.json_object:
        return Constraint(json_object(), names["json_object"])
    if given.choice is not None:
        choices = [given.choice] if isinstance(given.choice, str) else given.choice
        return Constraint(of_words(choices), names["choice"])
    return None


def thinking_of(body: ThinkingFields) -> tuple[bool | None, dict[str, Any]]:
    """(whether to think, other variables of the template), from `reasoning_effort` and `chat_template_kwargs`."""
    effort = body.reasoning_effort
    reserved = ("self", "messages", "tools", "add_generation_prompt")
    variables = {key: value for key, value in (body.chat_template_kwargs or {}).items() if key not in reserved}
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    chosen = variables.pop("enable_thinking", None)
    if chosen is not None and not isinstance(chosen, bool):
        raise wrong("chat_template_kwargs.enable_thinking", "true or false", chosen)
    return (False if effort in UNTHINKING and chosen is None else chosen), variables


@dataclass(frozen=True)
class StreamUsage:
    """Usage in the chunks of a stream: null up to the last one, or with `continuous` the tokens so far."""

    continuous: bool = False

    @staticmethod
    def of(body: Generating) -> StreamUsage | None:
        """None where the client asks for none."""
        options = body.stream_options
        return StreamUsage(bool(options.continuous_usage_stats)) if options and options.include_usage else None

    def shown(self, prompt: int, generated: int) -> dict[str, Any]:
        return {"usage": token_counts(prompt, generated) if self.continuous else None}


def system_fingerprint(service: Service) -> str:
    """A name of the weights and the config that compute the answers."""
    return f"lmstate-{service.model.fingerprint[:16]}"


def token_counts(prompt: int, generated: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def usage_of(completion: Any, answers: list[Answer]) -> dict[str, Any]:
    """OpenAI's usage, with what the engine knows beside it under `lmstate`."""
    usage = completion.usage
    return {
        **token_counts(usage.prompt, usage.generated),
        "prompt_tokens_details": {"cached_tokens": usage.reused, "cache_write_tokens": usage.prompt - usage.reused},
        "completion_tokens_details": {
            "reasoning_tokens": sum(answer.reasoning_tokens for answer in answers),
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
        "lmstate": usage_details(usage),
    }


def timings_of(completion: Any) -> dict[str, Any]:
    """llama-server's `timings`, which its clients read."""
    usage = completion.usage
    computed = usage.prompt - usage.reused

    def rate(count: int, seconds: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    return {
        "cache_n": usage.reused,
        "prompt_n": computed,
        "prompt_ms": usage.prefill * 1000,
        "prompt_per_second": rate(computed, usage.prefill),
        "predicted_n": usage.generated,
        "predicted_ms": usage.decode * 1000,
        "predicted_per_second": rate(usage.generated, usage.decode),
        "draft_n": usage.drafted,
        "draft_n_accepted": usage.accepted,
    }


def finish_reason(answer: Answer, called: bool) -> str:
    """stop, length or tool_calls: a call that a stop string cut is not to be made."""
    if answer.finished in ("eos", "stop"):
        return "tool_calls" if called and all(call.whole for call in answer.calls) else "stop"
    return "length"


def token_logprobs(service: Service, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Chat's form of log probabilities."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = service.grammars.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}

    return [{**one(entry.token, entry.logprob), "top_logprobs": [one(*top) for top in entry.top]} for entry in logprobs]
