"""The members of a language model that generation needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from lmstate.state import State
    from lmstate.text.tokenizer import Tokenizer


class LanguageModel(Protocol):
    """A model that extends a state by tokens; `lmstate.Model` is one."""

    defaults: dict[str, Any]  # sampling options that the checkpoint's makers suggest

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def new_state(self, rows: int = 1) -> State:
        """An empty state of that many sequences."""
        ...

    def __call__(
        self, tokens: Sequence[Sequence[int]], state: State, logits: Literal["last", "all", "none"] = "last"
    ) -> Tensor | None:
        """Extend the state by one list of tokens a row -> float32 `[rows, V]` at each row's last token.

        logits="none": nothing is returned.
        """
        ...
