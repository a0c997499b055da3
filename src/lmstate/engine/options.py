"""Options of a request, checked before it is queued."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard

from lmstate.engine.thinking import ThinkingFormat
from lmstate.generation.grammar import Grammar, check_grammar
from lmstate.generation.prompts import as_token_lists
from lmstate.generation.sampling import Sampler
from lmstate.generation.stopping import as_stops
from lmstate.state.validate import flag, real_number, token_ids, whole_number

if TYPE_CHECKING:
    from lmstate.models.model import Model
    from lmstate.text.replay import Replay

MOST_TOP_LOGPROBS = 1024
MOST_PRIORITY = 2**31


class SubmitOptions(TypedDict, total=False):
    """The options of `Engine.submit`, which says what they are."""

    max_new_tokens: int
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: Grammar | None
    priority: int
    deadline: float | None
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    include_stop_str_in_output: bool
    stop_token_ids: Sequence[int]
    min_tokens: int
    ignore_eos: bool
    max_thinking_tokens: int | None


@dataclass(frozen=True)
class Options:
    """Generation settings of the answers to one prompt."""

    sampler: Sampler
    max_new_tokens: int
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: Grammar | None
    priority: int
    deadline: float | None
    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    stop_token_ids: frozenset[int]
    min_tokens: int
    ignore_eos: bool
    max_thinking_tokens: int | None
    thinking: ThinkingFormat | None  # of the model, where it is needed


def options(
    model: Model,
    *,
    max_new_tokens: int,
    n: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
    priority: int,
    deadline: float | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: Mapping[int, float] | None,
    seed: int | None,
    stop: str | Sequence[str],
    include_stop_str_in_output: bool,
    stop_token_ids: Sequence[int],
    min_tokens: int,
    ignore_eos: bool,
    max_thinking_tokens: int | None,
) -> Options:
    """The options of `Engine.submit`. Raises ValueError for one out of range."""
    vocab = model.config.vocab_size
    if not isinstance(logit_bias, Mapping | None):
        raise ValueError(f"logit_bias is {logit_bias!r:.80}; it must be a dict of what is added to each token's logit")
    bias = tuple(
        (_token(token, "logit_bias", vocab), real_number(value, f"the logit_bias of token {token}"))
        for token, value in (logit_bias or {}).items()
    )
    sampler = Sampler(
        temperature, top_k, top_p, min_p, repetition_penalty, seed, presence_penalty, frequency_penalty, bias
    )
    stops = as_stops(stop)
    if stops and not model.has_tokenizer:
        raise ValueError("stop strings were given, and this model has no tokenizer: give stop_token_ids")
    if grammar is not None:
        check_grammar(grammar)
    longest, least = _count("max_new_tokens", max_new_tokens), _count("min_tokens", min_tokens)
    if least > longest:
        raise ValueError(f"min_tokens is {least}, more than max_new_tokens, which is {longest}")
    if deadline is not None and not 0 < real_number(deadline, "deadline") < math.inf:
        raise ValueError(f"deadline is {deadline!r}; it must be a number of seconds above 0, or None")
    return Options(
        sampler,
        longest,
        _count("n", n, least=1),
        None if logprobs is None else _count("logprobs", logprobs, most=MOST_TOP_LOGPROBS),
        None if prompt_logprobs is None else _count("prompt_logprobs", prompt_logprobs, most=MOST_TOP_LOGPROBS),
        grammar,
        _count("priority", priority, least=-MOST_PRIORITY, most=MOST_PRIORITY),
        deadline,
        stops,
        flag(include_stop_str_in_output, "include_stop_str_in_output"),
        frozenset(token_ids(stop_token_ids, "stop_token_ids", vocab)),
        least,
        flag(ignore_eos, "ignore_eos"),
        None if max_thinking_tokens is None else _count("max_thinking_tokens", max_thinking_tokens),
        None if max_thinking_tokens is None else ThinkingFormat.of(model.tokenizer),
    )


def are_messages(prompt: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(part, Mapping) for part in prompt)


def refuse_no_messages(messages: Any) -> None:
    """Raises ValueError for what is no list of chat messages."""
    if not are_messages(messages):
        raise ValueError(f"{messages!r:.80} was given; chat messages are a list of dicts with a role and a content")


def prompt_ids(model: Model, prompt: Any, replay: Replay) -> list[int]:
    """The ids of a prompt: a text, ids, or chat messages; `(text,)` follows another text, and gets no begin token.

    Raises ValueError if it is none of these.
    """
    if are_messages(prompt):
        ids = replay.encode(model.tokenizer, prompt)
    elif isinstance(prompt, str):
        ids = model.tokenizer.encode(prompt)
    elif isinstance(prompt, tuple) and len(prompt) == 1 and isinstance(prompt[0], str):
        ids = model.tokenizer.encode(prompt[0], add_special_tokens=False)
    else:
        rows, single = as_token_lists(model._tokenizer, prompt, None)
        if not single:
            raise ValueError(f"submit takes one prompt, and this is a list of {len(rows)}: submit each by itself")
        ids = rows[0]
    for token in ids:
        _token(token, "the prompt", model.config.vocab_size)
    return ids


def check_length(model: Model, ids: Sequence[int]) -> None:
    """Raises ValueError for a text that the model cannot continue."""
    if not ids:
        raise ValueError("the prompt has no tokens: there is nothing to continue")
    most = model.max_positions
    if most is not None and len(ids) > most:
        raise ValueError(f"the prompt has {len(ids)} tokens; the model has learned {most} positions: shorten it")


def as_bytes(size: int | str) -> int:
    """A number of bytes, or a text like "4GiB" or "500 MB"."""
    if isinstance(size, str):
        number = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(i?)B?\s*", size, re.IGNORECASE)
        if number is None or number[1].count(".") > 1 or not number[1].strip("."):
            raise ValueError(f"{size!r} is no size; give bytes, or a text like '4GiB' or '500MB'")
        power = "KMGT".find(number[2].upper()) + 1 if number[2] else 0
        size = int(float(number[1]) * (1024 if number[3] else 1000) ** power)
    if whole_number(size, "a number of bytes") < 0:
        raise ValueError(f"{size} bytes were asked for; give 0 or more")
    return int(size)


def _count(name: str, value: int, least: int = 0, most: int | None = None) -> int:
    number = whole_number(value, name)
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} is {number}; it must be {least} or more" + (f", at most {most}" if most else ""))
    return number


def _token(token: int, where: str, vocab: int) -> int:
    number = whole_number(token, f"a token of {where}")
    if not 0 <= number < vocab:
        raise ValueError(f"{where} has token {number}; this model's are 0 to {vocab - 1}")
    return number
