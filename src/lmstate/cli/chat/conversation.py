"""A conversation whose state goes on from turn to turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lmstate.cli.chat.branches import Branches, load
from lmstate.cli.chat.messages import Message, asked, question_of
from lmstate.cli.progress import warn_of_length
from lmstate.generation import Generation, Report, Sampler, SamplingParams
from lmstate.generation.conversation import align, common_prefix
from lmstate.generation.params import sampling_params
from lmstate.speculation import Speculator, make_drafter
from lmstate.state.media import identities
from lmstate.vision.pictures import picture_file
from lmstate.vision.reader import pictures_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from lmstate.generation import RowPiece
    from lmstate.models.model import Model
    from lmstate.speculation import DraftChoice
    from lmstate.state import Snapshot, State


SETTINGS = {
    name: name
    for name in (
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    )
} | {"max_tokens": "max_new_tokens"}  # fmt: skip


@dataclass(frozen=True)
class Replaced:
    """A conversation as it was before `what` took its place."""

    what: str
    messages: list[Message]
    state: State
    branches: Branches


class ChatConversation:
    """Messages, and a state that holds as many of their tokens as the model has seen.

    The state ought to hold the rendered template of all messages. Before each answer the two are compared token
    by token: the state is rewound to where they part, and the rest is fed. That is right for every template, also one
    that rewrites earlier turns, and costs nothing for one that only appends.
    """

    def __init__(
        self,
        model: Model,
        system: str | None = None,
        *,
        sampler: Sampler | None = None,
        max_new_tokens: int = 512,
        draft: DraftChoice = "auto",
        kv: Any = None,
    ) -> None:
        self.model = model
        self._kv = kv
        self.system = system
        self.params = sampling_params(sampler, {"max_new_tokens": max_new_tokens})
        self._draft = draft
        self.draft = self._make_drafter()
        self.report: Report | None = None  # of the last answer
        self.messages: list[Message] = []
        self.pictures: list[bytes] = []  # that go with the next question
        self._replaced: Replaced | None = None
        self._begin()

    def _make_drafter(self) -> DraftChoice:
        """The drafter that is asked for; of a model one that holds a state, so that the model reads each turn once."""
        if self._draft is None or isinstance(self._draft, str | Speculator):
            return self._draft
        return make_drafter(self._draft, self.model, 1, self.params, self.params.seed)

    def settings(self) -> dict[str, Any]:
        """The settings of sampling, by the names that `set` takes."""
        return {name: getattr(self.params, field) for name, field in SETTINGS.items()}

    def set(self, name: str, value: float | None) -> None:
        """Change a setting; None: its default. Raises ValueError for unknown names and values out of range."""
        if name not in SETTINGS:
            raise ValueError(f"unknown setting {name!r}; expected one of {', '.join(SETTINGS)}")
        field = SETTINGS[name]
        changes: dict[str, Any] = {field: getattr(SamplingParams(), field) if value is None else value}
        self.params = replace(self.params, **changes)
        self.draft = self._make_drafter()

    def set_system(self, text: str) -> None:
        """Put a system message at the beginning, in the place of one that is there. The next answer reads all again."""
        self.system = text
        rest = self.messages[1:] if self.messages and self.messages[0]["role"] == "system" else self.messages
        self.messages = [{"role": "system", "content": text}, *rest]

    def last_question(self) -> str:
        """The last question. Raises ValueError if nothing was."""
        for message in reversed(self.messages):
            if message["role"] == "user":
                return asked(message)
        raise ValueError("nothing was asked yet")

    def attach(self, path: Path) -> None:
        """Have a picture go with the next question.

        Raises what `picture_file` does, and `UnsupportedError` for a model whose pictures are not read.
        """
        content = picture_file(path)
        self.model.pictures()
        self.pictures.append(content)

    def clear(self) -> None:
        """Begin again with the system message alone; `undo` brings back all that was."""
        if self.state.lengths[0] or len(self.branches.known) > 1:
            self._remember("the clearing")
        self._begin()

    def load(self, path: Path) -> Snapshot:
        """Go on from a saved conversation in the place of this one, which `undo_replacement` brings back."""
        state = self._empty_state()
        snapshot, messages = load(state, path)
        self._remember(f"the load of {path}")
        self.messages, self.state = messages, state
        return snapshot

    def _begin(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.pictures = []
        self.state = self._empty_state()
        self.branches = Branches()

    def _empty_state(self) -> State:
        return self.model.new_state(rows=1, kv=self._kv)

    def _remember(self, what: str) -> None:
        self._replaced = Replaced(what, self.messages, self.state, self.branches.copy())

    def ask(self, question: str) -> Generator[str]:
        """The answer, piece by piece. The pieces given out are kept, also if the iterator is closed or an error ends
        it. A question without any answer leaves no trace, and neither do its pictures.
        """
        self._replaced = None
        self.state.mark(0)  # an /undo of this turn comes back here
        messages = [*self.messages, question_of(question, self.pictures)]
        self.pictures = []
        prompt = self.model.encode(messages, add_generation_prompt=True)
        warn_of_length(self.model, self.state.lengths[0], len(prompt))
        generation = Generation(
            self.model,
            [align(self.state, prompt)],
            self.state,
            params=self.params,
            draft=self.draft,
        )
        pieces = cast("Generator[RowPiece]", iter(generation))
        try:
            with closing(pieces):
                for piece in pieces:
                    yield piece.text
        finally:
            self.report = generation.report()
            if self.report.generated or self.report.finished[0] is not None:
                self.messages = [*messages, {"role": "assistant", "content": generation.texts[0]}]

    def edit(self, question: str) -> Generator[str]:
        """`ask` in the place of the last question, with its pictures. It stays with its answer where no other comes."""
        messages, snapshot = self.messages, self.state.snapshot(0)
        self.undo(1)
        before = self.messages
        self.pictures = [*pictures_of(messages[len(before) :][:1]), *self.pictures]
        try:
            yield from self.ask(question)
        finally:
            if self.messages is before:
                self.messages = messages
                self.state.restore(0, snapshot)

    def undo_replacement(self) -> str | None:
        """Bring back what `clear` or `load` replaced, if nothing was asked since; returns its name, None if nothing."""
        if (before := self._replaced) is None:
            return None
        self.messages, self.state, self.branches = before.messages, before.state, before.branches
        self._replaced = None
        return before.what

    def undo(self, turns: int) -> int:
        """Take back the last turns. Returns the tokens that the next answer must recompute because of it."""
        begins = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not 1 <= turns <= len(begins):
            raise ValueError(
                f"{turns} turn{'s' * (turns != 1)} cannot be taken back; "
                f"there {'is' if len(begins) == 1 else 'are'} {len(begins)}"
            )
        messages = self.messages[: begins[-turns]]
        kept = self.model.encode(messages, add_generation_prompt=False).identities if messages else []
        to = common_prefix(identities(self.state.tokens(0), self.state.media(0)), kept)
        cost = self.state.rewind_cost(0, to)
        self.state.rewind(0, to)
        self.messages = messages
        return cost


def turns(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """(question, answer) of every turn."""
    spoken = [message["content"] for message in messages if message["role"] != "system"]
    return zip(spoken[::2], spoken[1::2])
