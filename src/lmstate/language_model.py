"""The interface of a language model for what is below `models`: drafting and generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from lmstate.state import State
    from lmstate.text.grammars.compiler import GrammarCompiler
    from lmstate.text.tokenizer import Tokenizer

Logits = Literal["last", "all", "none"] | Sequence[int]
"""The tokens whose logits are returned: for each row the last one, all, none, or a number of its last ones."""


class DescribedModel(Protocol):
    """The facts of a model that prompts and sampling options are checked against."""

    defaults: dict[str, Any]  # sampling options that the checkpoint's makers suggest

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        ...

    @property
    def start_id(self) -> int | None:
        """The token that every answer to a source begins with; None for a model without an encoder."""
        ...

    @property
    def config(self) -> Any:
        """`vocab_size` is read from it."""
        ...

    @property
    def has_tokenizer(self) -> bool:
        """Whether `tokenizer` can be asked for."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def grammars(self) -> GrammarCompiler:
        """The compiler of constraints on its answers."""
        ...


class LanguageModel(DescribedModel, Protocol):
    """A model that extends a state by tokens; `lmstate.Model` is one."""

    def new_state(self, rows: int = 1, capacity: int | None = None, rewind: int = 16) -> State:
        """An empty state of that many sequences."""
        ...

    def __call__(
        self, tokens: Any, state: State | None = None, logits: Logits | None = None, commit: bool = True
    ) -> Tensor | None:
        """Extend the state by one list of tokens a row -> float32 `[rows, V]` at each row's last token.

        logits="all" gives those of every token, "none" none, numbers those of that many last tokens of each row;
        commit=False leaves the tokens pending.
        """
        ...

    def follow(self, tokens: Any, state: State, most: int) -> tuple[list[list[int]], Tensor] | None:
        """Extend the state by one token of a row, or none, and the likeliest ones after it, `most` in all: pending.

        Returns what each row read and logits float32 `[rows, T, V]`; None where that is not faster, and nothing
        happened.
        """
        ...
