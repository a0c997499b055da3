"""What a caller may give as a prompt, turned into one list of token ids per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from lmstate.models.tokenizer import Tokenizer
    from lmstate.state import State

SinglePrompt: TypeAlias = "str | Sequence[int]"
Prompt: TypeAlias = "SinglePrompt | Sequence[SinglePrompt]"


def as_token_lists(tokenizer: Tokenizer, prompt: Prompt, state: State | None) -> tuple[list[list[int]], bool]:
    """(one list of ids per row, whether `prompt` was a single one).

    A text or a list of ids is a single prompt; a list of texts or of lists is a batch. Text that continues a row of
    `state` gets no beginning-of-sequence token.
    """
    single = isinstance(prompt, str) or all(isinstance(token, int) for token in prompt)
    prompts = [prompt] if single else list(prompt)
    rows = []
    for row, one in enumerate(prompts):
        if isinstance(one, str):
            fresh = state is None or row >= state.rows or not state.lengths[row]
            rows.append(tokenizer.encode(one) if fresh else tokenizer.encode(one))
        elif isinstance(one, Sequence) and all(isinstance(token, int) for token in one):
            rows.append(list(one))
        else:
            raise ValueError(f"a prompt must be a text or a list of token ids; prompt {row} is {type(one).__name__}")
    return rows, single
