"""Bytes that rows take, and answers whose rows were taken back for want of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmstate.engine.job import Job
from lmstate.errors import CapacityError
from lmstate.generation.row import AnswerRow
from lmstate.ops.types.block_table import BLOCK_TOKENS
from lmstate.state import State

if TYPE_CHECKING:
    from lmstate.models.model import Model

CHECK_EVERY = 16  # steps between two looks at the bytes of rows that are far from the budget


@dataclass(frozen=True)
class RowCost:
    """Bytes of a row: `fixed` ones (carries, logits), and those of each token (keys, values, latents), in blocks."""

    fixed: int
    per_token: float

    @staticmethod
    def of(model: Model, new_state: Callable[[], State]) -> RowCost:
        """Of a model's states; `new_state` makes one of one row."""

        def reserved(tokens: int) -> int:
            state = new_state()
            state.plan([[0] * tokens])
            return nbytes(state) + sum(layer.nbytes_to_come() for layer in state.layers)

        shorter, longer = reserved(BLOCK_TOKENS), reserved(2 * BLOCK_TOKENS)
        per_token = (longer - shorter) / BLOCK_TOKENS
        return RowCost(int(shorter - BLOCK_TOKENS * per_token) + 4 * model.config.vocab_size, per_token)

    def __call__(self, tokens: int) -> int:
        return self.fixed + int(self.per_token * BLOCK_TOKENS * -(-tokens // BLOCK_TOKENS))

    def refuse_too_little(self, memory: int) -> None:
        """Raises CapacityError for memory that not even the shortest prompt would have room in."""
        if (need := self(1)) > memory:
            raise CapacityError(
                f"{memory:,} bytes of memory were asked for; a row of {BLOCK_TOKENS} tokens, the least that a request "
                f"takes, needs about {need:,} with this model: give more memory"
            )

    def refuse_too_long(self, tokens: int, memory: int, beside: int = 0) -> None:
        """Raises CapacityError for a prompt, with `beside` bytes of pictures, that could not be read by itself."""
        if (need := self(tokens) + beside) > memory:
            raise too_large(tokens, need, memory)


def too_large(tokens: int, need: int, memory: int) -> CapacityError:
    return CapacityError(
        f"a row of {tokens} tokens takes about {need:,} bytes, and the engine was made with memory={memory:,} for all "
        "of its rows: shorten the prompt, or make the engine with more memory"
    )


def nbytes(state: State) -> int:
    return sum(state.memory().values())


@dataclass(eq=False)
class Preempted:
    """Answer without a row, which goes on where it was once its text was read again."""

    job: Job
    choice: AnswerRow
    text: list[int]  # prompt and answer, as far as the row had read them
    echo: bool = False  # whether log probabilities of the answer's tokens are taken on the way
    state: State | None = None  # of one row, until the text has a row in which it is read
    reading: bool = False
    at: int = 0
    rank: tuple[int, int, int] = field(init=False)  # those with the smallest go on first

    def __post_init__(self) -> None:
        self.rank = (-self.job.priority, self.job.order, self.choice.index)

    def left(self) -> int:
        """Number of tokens to read."""
        return len(self.text) - self.at

    def set_aside(self) -> None:
        """Its row is taken back once more."""
        self.state, self.reading, self.at = None, False, 0

    @staticmethod
    def of(job: Job, choice: AnswerRow, echo: bool = False) -> Preempted:
        answered = choice.tokens
        return Preempted(job, choice, [*job.prompt, *answered[: len(answered) - len(choice.feed)]], echo)
