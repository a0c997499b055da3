"""Sampling fields, which the protocols and their local extensions share, as options of the engine."""

from __future__ import annotations

from typing import Any

from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.fields import Fields

STOPS, STOP_LENGTH, BIASES = 64, 1024, 4096


def sampling_options(body: Fields, vocab_size: int, defaults: dict[str, Any]) -> dict[str, Any]:
    """Options of `Engine.submit` from the sampling fields of a body.

    `defaults` is what the checkpoint's makers suggest, used for fields that the client leaves out; without such, the
    answer is greedy. Raises `ApiError` for a field out of range, or one that is not supported.
    """
    from lmstate.generation import Sampler

    body.refuse("prompt_logprobs", "completions score a prompt with echo and logprobs")
    suggested = Sampler.suggested(defaults)
    top_k = body.integer("top_k", -1, 2**31)
    options: dict[str, Any] = {
        "temperature": body.number("temperature", 0.0, 100.0, suggested.temperature),
        "top_k": suggested.top_k if top_k is None else (top_k if top_k > 0 else None),
        "top_p": _top_p(body, suggested.top_p),
        "min_p": body.number("min_p", 0.0, 1.0, suggested.min_p),
        "repetition_penalty": _penalty(body, suggested.repetition_penalty),
        "presence_penalty": body.number("presence_penalty", -2.0, 2.0, 0.0),
        "frequency_penalty": body.number("frequency_penalty", -2.0, 2.0, 0.0),
        "logit_bias": _logit_bias(body, vocab_size),
        "seed": body.integer("seed", -(2**63), 2**64 - 1),
        "ignore_eos": body.flag("ignore_eos"),
        "include_stop_str_in_output": body.flag("include_stop_str_in_output"),
        "min_tokens": body.count("min_tokens", 0, 2**31, 0),
        "stop_token_ids": tuple(_ids(body, "stop_token_ids", vocab_size)),
        "max_thinking_tokens": body.integer("thinking_token_budget", 0, 2**31),
        "priority": body.count("priority", -(2**31), 2**31, 0),
    }
    return options


def stops(body: Fields, key: str = "stop") -> tuple[str, ...]:
    """Stop strings. An empty one, which some clients send, stops nothing."""
    texts = [text for text in body.texts(key, STOPS) if text]
    if any(len(text) > STOP_LENGTH for text in texts):
        raise body.wrong(key, f"strings of at most {STOP_LENGTH} characters")
    return tuple(texts)


def _top_p(body: Fields, default: float | None) -> float | None:
    value = body.number("top_p", 0.0, 1.0)
    return default if value is None else max(value, 1e-9)  # 0, which some clients send, is the best token alone


def _penalty(body: Fields, default: float) -> float:
    value = body.number("repetition_penalty", 0.0, 100.0, default)
    if not value:
        raise body.wrong("repetition_penalty", "a number above 0")
    return value


def _logit_bias(body: Fields, vocab_size: int) -> dict[int, float] | None:
    given = body.inner("logit_bias")
    if given is None or not given.values:
        return None
    if len(given.values) > BIASES:
        raise ApiError(f"logit_bias has {len(given.values)} tokens; at most {BIASES}", param="logit_bias")
    bias = {}
    for key in given.values:
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab_size):
            raise ApiError(
                f"logit_bias has {key[:40]!r}; its keys are token ids below {vocab_size}", param="logit_bias"
            )
        bias[int(key)] = given.number(key, -100.0, 100.0) or 0.0
    return bias


def _ids(body: Fields, key: str, vocab_size: int) -> list[int]:
    value = body.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > BIASES:
        raise body.wrong(key, "an array of token ids")
    return check_ids(value, body.name(key), vocab_size)


def check_ids(values: list[Any], name: str, vocab_size: int) -> list[int]:
    """Token ids of a body: whole numbers of the vocabulary."""
    if not all(type(value) is int and 0 <= value < vocab_size for value in values):
        raise ApiError(f"{name} must hold token ids from 0 to {vocab_size - 1}", param=name)
    return values
