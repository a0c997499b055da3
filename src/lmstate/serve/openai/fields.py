"""The fields of OpenAI's chat protocol: messages, response formats, log probabilities, usage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmstate.serve.answer.answers import Answer, usage_details
from lmstate.serve.answer.grammar import Grammars
from lmstate.serve.answer.messages import Call, Message
from lmstate.serve.answer.service import Constraint, Service
from lmstate.serve.tools.custom import arguments_of
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.fields import Fields

if TYPE_CHECKING:
    from lmstate.engine import TokenLogprob

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MOST_MESSAGES = 20_000


def read_messages(body: Fields) -> tuple[Message, ...]:
    """The `messages` of a chat. Raises `ApiError` for roles and parts that no text model has a use for."""
    given = body.items("messages", MOST_MESSAGES)
    if not given:
        raise body.wrong("messages", "an array of at least one message")
    return tuple(map(read_message, given))


def read_message(given: Fields) -> Message:
    role = given.choice("role", tuple(ROLES))
    if role is None:
        raise given.wrong("role", f"one of {', '.join(ROLES)}")
    content = read_content(given, "content", role)
    calls = tuple(map(_call, given.items("tool_calls", 1000)))
    if role == "tool":
        return Message("tool", content, call_id=given.need_text("tool_call_id"), name=given.text("name"))
    reasoning = given.text("reasoning_content") or given.text("reasoning") or ""
    if not given.has("content") and role != "assistant":  # whose answer may have been empty
        raise given.wrong("content", "a string or an array of parts")
    return Message(ROLES[role], content, reasoning, calls, name=given.text("name"))


def read_content(given: Fields, key: str, role: str = "assistant") -> str:
    """Text, or the text of parts: those of an answer go on from each other, others are lines of their own."""
    value = given.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise given.wrong(key, "a string or an array of parts")
    return ("" if role == "assistant" else "\n").join(map(_part, given.items(key)))


def _part(part: Fields) -> str:
    kind = part.text("type", "text")
    if kind in ("text", "input_text", "output_text", "summary_text", "reasoning_text"):
        return part.need_text("text")
    if kind == "refusal":
        return part.need_text("refusal")
    raise ApiError(f"{part.path} is of type {kind!r}; this model reads text only", param=part.path)


def _call(given: Fields) -> Call:
    if (custom := given.inner("custom")) is not None:
        return Call(given.text("id") or "", custom.need_text("name"), arguments_of(custom.text("input") or ""))
    function = given.inner("function")
    if function is None:
        raise given.wrong("function", "an object")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # some clients keep the object
        return Call(given.text("id") or "", function.need_text("name"), json.dumps(arguments, ensure_ascii=False))
    return Call(given.text("id") or "", function.need_text("name"), function.text("arguments") or "{}")


def read_constraint(body: Fields, grammars: Grammars, key: str = "response_format") -> Constraint | None:
    """`response_format` (or responses' `text.format`), and the grammars that local servers share."""
    for name in ("grammar", "guided_grammar"):
        if (text := body.text(name)) is not None:
            return Constraint(lark_of(text, name), name)
    if (pattern := body.text("guided_regex")) is not None:
        return Constraint(grammars.regex(pattern), "guided_regex")
    if body.has("guided_json"):
        return Constraint(grammars.json_schema(_schema(body, "guided_json"), "guided_json"), "guided_json")
    if choices := body.choices("guided_choice", 1000):
        return Constraint(grammars.words(choices), "guided_choice")
    if (structured := body.inner("structured_outputs")) is not None:
        return _structured(structured, grammars)
    given = body.inner(key)
    if given is None:
        return None
    kind = given.choice("type", ("text", "json_object", "json_schema", "grammar", "regex"))
    if kind is None:
        raise given.wrong("type", "text, json_object or json_schema")
    if kind == "text":
        return None
    if kind == "json_object" and not given.has("schema"):
        return Constraint(grammars.json_object(), given.path)
    if kind == "grammar":
        return Constraint(lark_of(given.need_text("grammar"), given.path), given.path)
    if kind == "regex":
        return Constraint(grammars.regex(given.need_text("pattern")), given.path)
    holder = given.inner("json_schema") or given
    if not holder.has("schema"):
        raise holder.wrong("schema", "a JSON schema")
    name = holder.name("schema")
    return Constraint(grammars.json_schema(holder.get("schema"), name, holder.flag("strict")), name)


def _structured(given: Fields, grammars: Grammars) -> Constraint | None:
    if given.has("json"):
        return Constraint(grammars.json_schema(_schema(given, "json"), given.name("json")), given.name("json"))
    if given.flag("json_object"):
        return Constraint(grammars.json_object(), given.name("json_object"))
    if (pattern := given.text("regex")) is not None:
        return Constraint(grammars.regex(pattern), given.name("regex"))
    if choices := given.choices("choice", 1000):
        return Constraint(grammars.words(choices), given.name("choice"))
    if (text := given.text("grammar")) is not None:
        return Constraint(lark_of(text, given.name("grammar")), given.name("grammar"))
    return None


def _schema(given: Fields, key: str) -> Any:
    """A JSON schema, or the text of one."""
    schema = given.get(key)
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise given.wrong(key, "a JSON schema") from None


def lark_of(text: str, param: str) -> str:
    """A grammar in Lark, or in GBNF (told by `::=`), within one of ours: its rules may have any names. Raises
    `ApiError`.
    """
    if "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as error:  # the converter raises bare Exception
            raise ApiError(f"{param} is no GBNF grammar: {str(error)[:300]}", param=param) from None
    return f"start: %lark {{\n{text}\n}}"


def thinking_of(body: Fields) -> tuple[bool | None, dict[str, Any]]:
    """(whether to think, other variables of the template), from `reasoning_effort` and `chat_template_kwargs`."""
    body.refuse("chat_template", "conversations are rendered by the model's own, see chat_template_kwargs")
    effort = body.text("reasoning_effort")
    kwargs = body.inner("chat_template_kwargs")
    variables = dict(kwargs.values) if kwargs is not None else {}
    variables = {key: value for key, value in variables.items() if key not in ("self", "messages", "tools")}
    variables.pop("add_generation_prompt", None)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    chosen = variables.pop("enable_thinking", None)
    if chosen is not None and not isinstance(chosen, bool):
        raise ApiError("chat_template_kwargs.enable_thinking must be true or false", param="chat_template_kwargs")
    return (False if effort in ("none", "minimal") and chosen is None else chosen), variables


def usage_of(completion: Any, answers: list[Answer]) -> dict[str, Any]:
    """OpenAI's usage, with what the engine knows beside it under `lmstate`."""
    usage = completion.usage
    generated = usage.generated
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": generated,
        "total_tokens": usage.prompt + generated,
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
