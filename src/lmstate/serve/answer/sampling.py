"""Sampling fields, which the protocols and their local extensions share, as `SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmstate.serve.wire.body import wrong
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.schema.common import Sampling, StopTexts

if TYPE_CHECKING:
    from lmstate.generation import SamplingParams

SMALLEST_TOP_P = 1e-9  # for 0, which some clients send: the best token alone


def sampling_params(body: Sampling, vocab_size: int, defaults: dict[str, Any]) -> SamplingParams:
    """Sampling parameters from the fields of a body; its length and stop strings are read by the protocols.

    `defaults` are the checkpoint's own suggestions, used for fields that the client leaves out; without such, the
    answer is greedy. Raises `ApiError` for what no range of a field tells.
    """
    from lmstate.generation import Sampler, SamplingParams

    suggested = Sampler.suggested(defaults)
    if body.seed is not None and not -(2**63) <= body.seed < 2**64:
        raise wrong("seed", "a whole number of 64 bits", body.seed)

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    return SamplingParams(
        temperature=given(body.temperature, suggested.temperature),
        top_k=suggested.top_k if body.top_k is None else (body.top_k if body.top_k > 0 else None),
        top_p=suggested.top_p if body.top_p is None else max(body.top_p, SMALLEST_TOP_P),
        min_p=given(body.min_p, suggested.min_p),
        repetition_penalty=given(body.repetition_penalty, suggested.repetition_penalty),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body, vocab_size),
        seed=body.seed,
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(check_ids(body.stop_token_ids or [], "stop_token_ids", vocab_size)),
        max_thinking_tokens=body.thinking_token_budget,
    )


def stops(given: StopTexts | None) -> tuple[str, ...]:
    """Stop strings. An empty one, which some clients send, stops nothing."""
    texts = [given] if isinstance(given, str) else given or []
    return tuple(text for text in texts if text)


def _logit_bias(body: Sampling, vocab_size: int) -> dict[int, float] | None:
    for key in body.logit_bias or ():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab_size):
            raise ApiError(
                f"logit_bias has {key[:40]!r}; its keys are token ids below {vocab_size}", param="logit_bias"
            )
    return {int(key): value for key, value in body.logit_bias.items()} if body.logit_bias else None


def check_ids(values: list[Any], name: str, vocab_size: int) -> list[int]:
    """Token ids of a body: whole numbers of the vocabulary."""
    if not all(type(value) is int and 0 <= value < vocab_size for value in values):
        raise ApiError(f"{name} must hold token ids from 0 to {vocab_size - 1}", param=name)
    return values
