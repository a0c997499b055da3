"""Conversion of prompts to one list of token ids per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from torch import Tensor

from lmstate.errors import PendingError, StateError, UnsupportedError
from lmstate.state.sources import SourceFeatures
from lmstate.state.validate import token_ids

if TYPE_CHECKING:
    from lmstate.language_model import DescribedModel, LanguageModel
    from lmstate.state import State
    from lmstate.text.tokenizer import Tokenizer

SinglePrompt: TypeAlias = "str | Sequence[int] | Tensor"
Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
Prompt: TypeAlias = "SinglePrompt | Messages | Sequence[SinglePrompt]"
Sources: TypeAlias = "Prompt | SourceFeatures | Sequence[SourceFeatures]"
"""Texts, ids or sounds that the encoder of a model reads."""


def are_messages(prompt: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(part, Mapping) for part in prompt)


def refuse_no_messages(messages: Any) -> None:
    """Raises ValueError for anything but a list of chat messages."""
    if not are_messages(messages):
        raise ValueError(f"{messages!r:.80} was given; chat messages are a list of dicts with a role and a content")


def as_token_lists(
    tokenizer: Tokenizer | None, prompt: Prompt | None, state: State | None, *, begun: bool = False
) -> tuple[list[list[int]], bool]:
    """(one list of ids per row, whether `prompt` was a single one).

    A text, a list of ids or chat messages are a single prompt; a list of texts or of lists is a batch. Text that
    continues a row of `state` gets no begin token, and no text gets one where the rows have `begun`.
    """
    if state is not None and not hasattr(state, "rows"):
        raise StateError(f"state is {state!r:.80}; give what model.new_state made, or None for a fresh one")
    given: Any = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if not isinstance(given, Sequence):
        raise ValueError(
            f"a prompt must be a text, a list of token ids, or a list of these; {given!r:.80} ({type(given).__name__}) "
            "was given"
        )
    if not isinstance(given, str) and not given and state is None:
        raise ValueError(
            "the prompt is an empty list and has no tokens: give a text, token ids, or a prompt for each row"
        )
    if are_messages(given):
        if tokenizer is None:
            raise ValueError("a prompt is chat messages, and the model has no tokenizer: give token ids")
        if state is not None and any(state.lengths):
            raise ValueError(
                "messages are a whole conversation, and the state holds tokens: model.chat(messages, state) goes on "
                "with it from where they part"
            )
        return [tokenizer.chat(given)], True
    single = isinstance(given, str) or _are_ids(given)
    rows = []
    for row, one in enumerate([given] if single else given):
        one = one.tolist() if isinstance(one, Tensor) else one
        if isinstance(one, str):
            if tokenizer is None:
                raise ValueError("a prompt is a text, and the model has no tokenizer: give token ids")
            fresh = not begun and (state is None or row >= state.rows or not state.lengths[row])
            rows.append(tokenizer.encode(one, add_special_tokens=fresh))
        elif _are_ids(one):
            rows.append(token_ids(one, f"prompt {row}"))
        else:
            raise ValueError(
                f"a prompt must be a text or a list of token ids; prompt {row} is {one!r:.80} ({type(one).__name__})"
            )
    return rows, single


def with_source(
    model: LanguageModel, source: Sources, prompt: Prompt | None, state: State | None
) -> tuple[State, list[list[int]], bool]:
    """A state whose rows are conditioned on their sources, the prompt of each row, and whether there is a single one.

    A prompt begins the answer, after the model's own first token; None: nothing. Raises
    `UnsupportedError` for a model without an encoder.
    """
    sources, prompts, single = read_sources(model, source, prompt)
    state = model.new_state(rows=len(sources)) if state is None else state
    if len(sources) != state.rows:
        raise ValueError(f"{len(sources)} source(s) for a state of {state.rows} row(s): give one for every row")
    for row, ids in enumerate(sources):
        state.condition(row, ids)
    return state, prompts, single


def read_sources(
    model: DescribedModel, source: Sources, prompt: Prompt | None
) -> tuple[list[list[int] | SourceFeatures], list[list[int]], bool]:
    """The sources, a text by its ids, the ids of the prompt of each, and whether there is a single one."""
    tokenizer = model.tokenizer if model.has_tokenizer else None
    if model.start_id is None:
        raise UnsupportedError("a source was given, and the model has no encoder: put its text in the prompt")
    sources, single = _as_sources(tokenizer, source)
    begins: list[list[int]] = [[] for _ in sources]
    if prompt is not None:
        begins, _ = as_token_lists(tokenizer, prompt, None, begun=True)
    if len(begins) != len(sources):
        raise ValueError(f"{len(begins)} prompt(s) for {len(sources)} source(s): give as many, or none")
    return sources, [[model.start_id, *ids] for ids in begins], single


def check_prompts(prompts: Sequence[Sequence[int]], state: State) -> None:
    """Raise `PendingError` where a state awaits a verdict, ValueError for prompts that do not fit its rows."""
    if any(state.pending):
        raise PendingError(
            f"cannot generate: the rows have {state.pending} pending tokens; call commit or discard first"
        )
    if len(prompts) != state.rows:
        raise ValueError(
            f"{len(prompts)} prompt(s) for a state of {state.rows} row(s): give one prompt for every row "
            "(an empty one continues what the row holds)"
        )
    for row, prompt in enumerate(prompts):
        if not prompt and not state.lengths[row]:
            raise ValueError(
                f"the prompt of row {row} is empty and the row holds no tokens: there is nothing to continue"
            )


def _as_sources(tokenizer: Tokenizer | None, source: Sources) -> tuple[list[list[int] | SourceFeatures], bool]:
    """Sounds as they are, texts by their ids, and whether it is a single one."""
    if isinstance(source, SourceFeatures):
        return [source], True
    given: Any = source
    if isinstance(given, Sequence) and any(isinstance(one, SourceFeatures) for one in given):
        if all(isinstance(one, SourceFeatures) for one in given):
            return list(given), False
        raise ValueError("the sources are sounds and texts, and a model reads one kind of them: give one kind")
    texts, single = as_token_lists(tokenizer, given, None)
    return list(texts), single


def _are_ids(value: Any) -> bool:
    if isinstance(value, bytes | bytearray | memoryview):
        raise ValueError(f"a prompt must be a text or a list of token ids; {value!r:.80} is bytes: decode them first")
    return isinstance(value, Sequence) and all(isinstance(token, Integral) for token in value)
