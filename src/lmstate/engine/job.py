"""Bookkeeping of a request in work."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lmstate.engine.options import check_salt
from lmstate.engine.request import Request
from lmstate.engine.results import Completion, Piece, Reuse, Usage
from lmstate.generation.logprobs import TokenLogprob, logprob
from lmstate.generation.params import SamplingParams
from lmstate.generation.row import AnswerRow
from lmstate.state.validate import real_number, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from lmstate.engine.session import Session
    from lmstate.engine.tiers.fetch import Fetch, Lookup
    from lmstate.models.model import Model
    from lmstate.state import Snapshot, State
    from lmstate.vision.reader import PicturePrompt


AGING = 10.0  # seconds since it was submitted that are worth one step of priority
HEAD_START = 100.0  # seconds that one whose answers began elsewhere goes before others
MAX_PRIORITY = 2**31

Rank: TypeAlias = tuple[float, int]


@dataclass(frozen=True)
class Terms:
    """The demands of a request: its answers' parameters, its priority, its deadline in seconds, the most milliseconds
    between two of its tokens while others' prompts are read, its idempotency key, the salt of its prefixes, and its
    sender."""

    params: SamplingParams
    priority: int = 0
    deadline: float | None = None
    itl: float | None = None
    key: str | None = None
    salt: str = ""
    sender: str = ""

    def __post_init__(self) -> None:
        check_salt(self.salt)
        if not isinstance(self.sender, str):
            raise ValueError(f"sender is {self.sender!r:.80}; it must be a text")
        priority, deadline = whole_number(self.priority, "priority"), self.deadline
        if abs(priority) > MAX_PRIORITY:
            raise ValueError(f"priority is {priority}; it must be {-MAX_PRIORITY} or more, at most {MAX_PRIORITY}")
        if deadline is not None and not 0 < real_number(deadline, "deadline") < math.inf:
            raise ValueError(f"deadline is {deadline!r}; it must be a number of seconds above 0, or None")
        if self.key is not None and not (isinstance(self.key, str) and self.key):
            raise ValueError(f"idempotency_key is {self.key!r:.80}; it must be a text that is not empty, or None")
        if self.itl is not None and not 0 < real_number(self.itl, "itl") < math.inf:
            raise ValueError(f"itl is {self.itl!r}; it must be a number of milliseconds above 0, or None")


class Job:
    """A request from its queue to its end: waiting, then its prompt is read, then its answers are made."""

    def __init__(
        self,
        request: Request,
        terms: Terms,
        order: int,
        prompt: PicturePrompt,
        messages: Sequence[Mapping[str, Any]] = (),
        session: Session | None = None,
        answered: Sequence[Sequence[int]] = (),
    ) -> None:
        """`answered`: the tokens that each answer began with elsewhere; () if none did."""
        self.request = request
        self.prompt = request.prompt
        self.pictured = prompt  # the same, with its pictures
        self.text = array("q", prompt.identities)  # the same, to be compared
        self.params, self.priority, self.deadline = terms.params, terms.priority, terms.deadline
        self.itl = None if terms.itl is None else terms.itl / 1000  # seconds
        self.key, self.salt, self.sender = terms.key, terms.salt, terms.sender
        self.order = order
        self.messages = messages  # that the prompt was made of, if it was
        self.session = session
        self.answered = answered
        self.seed = int(torch.randint(2**62, ())) if self.params.seed is None else self.params.seed
        self.choices: list[AnswerRow] = []
        self.state: State | None = None  # of one row, until the prompt has a row in which it is read
        self.cuts: set[int] = set()  # positions at which a chunk has to end, and a snapshot is kept
        self.logits: Tensor | None = None  # float32 `[V]` after the prompt, which is read, until its answers begin
        self.unkept = False  # the prompt was read, and what was computed of it is not kept yet
        self.source: State | Snapshot | None = None  # what answers without a row begin from
        self.follows: tuple[Job, int] | None = None  # who reads the same prefix now, up to where
        self.lookup: Lookup | None = None  # a look in a tier, for texts that were not seen here
        self.fetch: Fetch | None = None  # what is read from a tier for it
        self.unseated: list[AnswerRow] = []
        self.reuse = Reuse(0, len(self.prompt))
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.error: BaseException | None = None  # why it failed
        self._times = [perf_counter()]  # submitted, started, first token
        # When it was submitted, or one of its sender's ended while it waited; earlier for one that was begun elsewhere.
        self.since = self._times[0] - (HEAD_START if any(answered) else 0.0)
        self.rank: Rank = self.rank_since  # its place among its sender's, smaller ones first; `turns` has that of all
        self._read = 0.0  # when its prompt was read

    @property
    def at(self) -> int:
        """Tokens of the prompt that are computed or reused."""
        return self.request.computed

    @property
    def rank_since(self) -> Rank:
        """The rank of a request that was submitted at `since`."""
        return self.since / AGING - self.priority, self.order

    @property
    def overdue(self) -> bool:
        return self.deadline is not None and perf_counter() - self._times[0] > self.deadline

    @property
    def job(self) -> Job:
        """Itself: see `Preempted.job`."""
        return self

    @property
    def echo(self) -> bool:
        """Whether log probabilities of the prompt's tokens are wanted."""
        return self.params.prompt_logprobs is not None

    def passed(self) -> None:
        """The next phase begins: its prompt is read, or its answers are made."""
        self._times.append(perf_counter())

    def has_read(self, logits: Tensor) -> None:
        self.logits, self._read = logits, perf_counter()

    def waited_to_answer(self) -> float:
        """Seconds since its prompt was read."""
        return perf_counter() - self._read

    def left(self) -> int:
        """Number of tokens to read up to the next cut, or to the end of the prompt."""
        return min(cut for cut in (*self.cuts, len(self.prompt)) if cut > self.at) - self.at

    def coming(self, size: int) -> list[int]:
        """The next tokens to read."""
        return self.prompt[self.at : self.at + size]

    def take_logprobs(self, logits: Tensor) -> None:
        """Log probabilities of the prompt's tokens after each of a chunk's. logits float32 `[T, V]`."""
        top = self.params.prompt_logprobs
        assert top is not None
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(None)
        for one, token in zip(logits, self.prompt[self.at + 1 :]):
            self.prompt_logprobs.append(logprob(one, token, top))

    def begin_again(self) -> None:
        """Its prompt is to be read once more, from what is kept of it: the row was taken back."""
        self.state = self.fetch = self.follows = self.logits = None
        self.unkept = False
        self.request.computed = 0
        self.prompt_logprobs = []
        del self._times[1:]

    def begin_answers(self, model: Model) -> None:
        """Make its answers, each as far as it was answered before."""
        begun = [self._begun(model, index, self.told(index)) for index in range(self.params.n)]
        if any(self.answered):
            self.request.beginning = [
                Piece(one.text, index, list(one.tokens), certain=one.certain()) for index, one in enumerate(begun)
            ]
        # One that is over is not read again. For its log probabilities it is: its last token is chosen once more.
        again = self.params.logprobs is not None
        self.choices = [
            self._begun(model, index, one.tokens[:-1]) if one.over and again else one for index, one in enumerate(begun)
        ]

    def _begun(self, model: Model, index: int, tokens: Sequence[int]) -> AnswerRow:
        choice = AnswerRow(model, self.params, self.prompt, index, self.seed)
        choice.replay(tokens)
        return choice

    def told(self, index: int) -> Sequence[int]:
        """The tokens of an answer that its sender has already."""
        return self.answered[index] if self.answered else ()

    def completion(self) -> Completion:
        times = [*self._times, perf_counter()]
        spent = [end - start for start, end in pairwise(times)] + [0.0, 0.0]
        choices = self.choices
        return Completion(
            texts=[choice.text for choice in choices],
            tokens=[list(choice.tokens) for choice in choices],
            certain=[choice.certain() for choice in choices],
            logprobs=None if self.params.logprobs is None else [choice.logprobs for choice in choices],
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            finished=[choice.finished or "cancelled" for choice in choices],
            stopped_by=[choice.stopped_by for choice in choices],
            usage=Usage(
                prompt=len(self.prompt),
                reused=self.reuse.reused,
                generated=sum(len(choice.tokens) for choice in choices),
                drafted=sum(choice.drafted for choice in choices),
                accepted=sum(choice.accepted for choice in choices),
                queued=spent[0],
                pictures=self.pictured.seconds,
                prefill=spent[1],
                decode=spent[2],
                reuse=self.reuse,
            ),
        )


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

    @property
    def index(self) -> int:
        return self.choice.index

    def left(self) -> int:
        """Number of tokens to read."""
        return len(self.text) - self.at

    def coming(self, size: int) -> list[int]:
        """The next tokens to read."""
        return self.text[self.at : self.at + size]

    def take_logprobs(self, logits: Tensor) -> None:
        """Log probabilities of its tokens after each of a chunk's. logits float32 `[T, V]`."""
        choice = self.choice
        for at, one in enumerate(logits, self.at + 1 - len(self.job.prompt)):
            if 0 < at < len(choice.tokens):
                choice.logprobs[at] = choice.scored(at, one)

    def set_aside(self) -> None:
        """Its row is taken back once more."""
        self.state, self.reading, self.at = None, False, 0

    @staticmethod
    def of(job: Job, choice: AnswerRow, echo: bool = False) -> Preempted:
        answered = choice.tokens
        return Preempted(job, choice, [*job.prompt, *answered[: len(answered) - len(choice.feed)]], echo)


Reader = Job | Preempted
"""A text that is read into a row: a prompt, or that of an answer which had a row before."""
