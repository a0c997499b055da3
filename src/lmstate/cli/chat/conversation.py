"""A conversation on a session of an engine; its branches are forks of that session."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from lmstate.audio.wav import sound_file
from lmstate.cli.chat.branches import FIRST
from lmstate.cli.chat.messages import Message, asked, messages_of, question_of
from lmstate.cli.output import Interrupt
from lmstate.cli.progress import PromptProgress, warn_of_length
from lmstate.engine import Completion, Engine, Piece, Request, Session
from lmstate.engine.session_record import Moment, Record
from lmstate.generation import Report, Sampler, SamplingParams
from lmstate.generation.params import sampling_params
from lmstate.generation.sampling import FILTERS
from lmstate.speculation import DraftReport
from lmstate.state import Snapshot
from lmstate.vision.pictures import picture_file
from lmstate.vision.reader import PicturePrompt, pictures_of

if TYPE_CHECKING:
    from lmstate.models.model import Model
    from lmstate.speculation import DraftChoice


MEMORY = 2**50  # bytes, of which there are none as many: what a conversation holds is bounded by the machine
LOOK_SECONDS = 0.1  # between two looks at how much of a prompt is read, and at Ctrl-C
MAX_UNREAD = 64  # pieces of an answer that a terminal may be behind
LOADED = ""  # session of a file, which no branch is called
SETTINGS = {
    name: name
    for name in (
        "temperature", *FILTERS, "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    )
} | {"max_tokens": "max_new_tokens"}  # fmt: skip


@dataclass(frozen=True)
class Replaced:
    """A conversation as it was before `what` took its place: the records of its branches, and the one it was on."""

    what: str
    records: dict[str, Record]
    current: str


class ChatConversation:
    """A conversation with one user: an engine of its own, and a session for each branch.

    The session holds the tokens as they were read and sampled, and each answer computes only what is new. A template
    that rewrites what it is given has the engine go back to where the two part.
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
        carries: int = 32,
    ) -> None:
        self.model = model
        self.system = system
        self.params = sampling_params(sampler, {"max_new_tokens": max_new_tokens})
        self.report: Report | None = None  # of the last answer
        self.files: list[bytes] = []  # pictures and sounds that go with the next question
        model.on_part = None  # the engine reads prompts in parts of its own, on its thread
        self.engine = Engine(model, rows=1, memory=MEMORY, draft=draft, kv=kv, carries=carries)
        self.branches: dict[str, Session] = {}
        self._request: Request | None = None
        self._replaced: Replaced | None = None
        self._begin({FIRST: self._empty()}, FIRST)

    def close(self) -> None:
        self.engine.close()

    @property
    def session(self) -> Session:
        """The session of the branch that the conversation is on."""
        return self.branches[self.current]

    @property
    def messages(self) -> list[Message]:
        return self.session.messages

    @property
    def held(self) -> int:
        """Tokens of the conversation."""
        return len(self.session.tokens)

    def memory(self) -> dict[str, int]:
        """Bytes that its state holds, by layer kind."""
        return self.engine.held(self.session.record.prompt) if self.held else {}

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

    def set_system(self, text: str) -> None:
        """Put a system message at the beginning, in the place of one that is there. The next answer reads all again."""
        self.system = text
        messages = self.messages
        rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
        self.session.restore(Record(messages=[{"role": "system", "content": text}, *rest]))

    def last_question(self) -> str:
        """The last question. Raises ValueError if nothing was."""
        for message in reversed(self.messages):
            if message["role"] == "user":
                return asked(message)
        raise ValueError("nothing was asked yet")

    def attach(self, path: Path, kind: str) -> None:
        """Have a picture ("image") or a sound ("audio") go with the next question.

        Raises what `picture_file` and `sound_file` do, and `UnsupportedError` for a model that does not read such ones.
        """
        content = picture_file(path) if kind == "image" else sound_file(path)
        self.model.pictures().refuse_others([kind])
        self.files.append(content)

    # ---- answers

    def ask(self, question: str) -> Generator[str]:
        """The answer, piece by piece. The pieces given out are kept, also if the iterator is closed. A question without
        any answer leaves no trace, and neither do its files; nor does one whose answer an error ends.
        """
        self.engine.clear_prefixes()  # of answers that were taken back
        self.session.mark()  # an /undo of this turn comes back here
        before, message = self.session.record, question_of(question, self.files)
        self.files = []
        request = self._request = self.session.send([*before.messages, message], params=self.params)
        request.max_unread = MAX_UNREAD
        warn_of_length(self.model, len(before.tokens), len(request.prompt))
        given: list[Piece] = []
        try:
            _wait(request)
            for piece in request:
                given.append(piece)
                yield piece.text
        finally:
            self._end(request, before, given)

    def stop(self) -> None:
        """End the answer that is being made: no pieces follow but those that it has already."""
        if self._request is not None:
            self._request.cancel()

    def _end(self, request: Request, before: Record, given: list[Piece]) -> None:
        """End a request, and have the session keep what was given of its answer."""
        self._request = self.report = None
        request.cancel()
        try:
            completion = _ended(request)
        except Exception:  # the iterator has raised it
            return
        (tokens,), usage, count = completion.tokens, completion.usage, sum(len(piece.tokens) for piece in given)
        if count < len(tokens):
            if count:
                self.session.cut(len(request.prompt) + count, "".join(given))
            else:
                self.session.restore(before)
        if self.messages != before.messages:
            self._replaced = None
        why = completion.finished[0]
        self.report = Report(
            fed=usage.prompt - usage.reused,
            reused=usage.reused,
            generated=count,
            prefill_seconds=usage.queued + usage.prefill,
            decode_seconds=usage.decode,
            decoded=max(0, count - 1),
            finished=(None if why == "cancelled" else why,),
            draft=DraftReport(usage.drafted, usage.accepted),
        )

    def edit(self, question: str) -> Generator[str]:
        """`ask` in the place of the last question, with its files. It stays with its answer where no other comes."""
        record = self.session.record
        self.undo(1)
        before = self.messages
        self.files = [*pictures_of(record.messages[len(before) :][:1]), *self.files]
        try:
            yield from self.ask(question)
        finally:
            if self.messages == before:
                self.session.restore(record)

    # ---- going back, and elsewhere

    def undo(self, turns: int) -> int:
        """Take back the last turns. Returns the tokens that the next answer must recompute because of it."""
        record = self.session.record.copy()
        begins = [index for index, message in enumerate(record.messages) if message["role"] == "user"]
        if not 1 <= turns <= len(begins):
            raise ValueError(
                f"{turns} turn{'s' * (turns != 1)} cannot be taken back; "
                f"there {'is' if len(begins) == 1 else 'are'} {len(begins)}"
            )
        count = begins[-turns]
        # A file may not tell where its turns begin: then the messages that are left are read again.
        record.back(next((turn for turn in record.turns if turn.messages == count), Moment(0, count)))
        self.session.restore(record)
        return self.cost()

    def cost(self) -> int:
        """Tokens that the next answer must recompute."""
        if not (prompt := self.session.record.prompt).tokens:
            spoken = any(message["role"] == "assistant" for message in self.messages)
            return len(self.model.encode(self.messages, add_generation_prompt=False)) if spoken else 0
        following = PicturePrompt([*prompt.tokens, 0], prompt.media)  # any token that is new
        return self.engine.explain(following).computed - 1

    def clear(self) -> None:
        """Begin again with the system message alone; `undo_replacement` brings back all that was."""
        if self.held or self.messages != self._empty().messages or len(self.branches) > 1:
            self._remember("the clearing")
        self._begin({FIRST: self._empty()}, FIRST)

    def undo_replacement(self) -> str | None:
        """Bring back what `clear` or `load` replaced, if nothing was answered since. Returns its name, or None."""
        if (before := self._replaced) is None:
            return None
        self._begin(before.records, before.current)
        self._replaced = None
        return before.what

    def fork(self, name: str) -> None:
        """Begin a branch here and go on in it. Raises ValueError for a name that is taken or empty."""
        if not name or name in self.branches:
            raise ValueError(f"there is a branch {name!r} already" if name else "a branch needs a name: /fork NAME")
        self.branches[name] = self.session.fork(name)
        self.current = name

    def switch(self, name: str) -> int:
        """Go to another branch. Returns the tokens that its next answer must recompute. Raises ValueError if there is
        none of this name."""
        if name not in self.branches:
            raise ValueError(f"there is no branch {name!r}; there are {', '.join(self.branches)}")
        if name == self.current:
            raise ValueError(f"the conversation is on {name!r} already")
        self.current = name
        return self.cost()

    # ---- files

    def save(self, path: Path, force: bool = False) -> None:
        """Write the state and the messages of the current branch.

        Raises OSError where the file cannot be written, FileExistsError where there is one and `force` does not ask to
        replace it.
        """
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory; name a file in it")
        if path.exists() and not force:
            raise FileExistsError(f"{path} exists; /save --force {path} replaces it")
        self.session.save(path)

    def load(self, path: Path) -> int:
        """Go on from a saved conversation in the place of this one, which `undo_replacement` brings back. Returns the
        tokens that the next answer must recompute.

        Raises `SnapshotError` (a ValueError) for files that are damaged or of another model, ValueError for a snapshot
        that no chat wrote; the conversation is then as it was.
        """
        snapshot = Snapshot.load(path)
        if (messages := messages_of(snapshot)) is None or (snapshot.tokens and not messages):
            raise ValueError(f"{path} is a snapshot of a text, not of a conversation: it has no messages")
        loaded = self.engine.load_session(LOADED, snapshot)
        try:
            self._remember(f"the load of {path}")
            self.session.restore(loaded.record)
        finally:
            loaded.close()
        return self.cost()

    # ---- the parts of it

    def _empty(self) -> Record:
        return Record(messages=[] if self.system is None else [{"role": "system", "content": self.system}])

    def _begin(self, records: dict[str, Record], current: str) -> None:
        for session in self.branches.values():
            session.close()
        self.branches = {name: self.engine.new_session(name, record) for name, record in records.items()}
        self.current, self.files = current, []

    def _remember(self, what: str) -> None:
        self._replaced = Replaced(what, {name: each.record for name, each in self.branches.items()}, self.current)


def _ended(request: Request) -> Completion:
    """The outcome of a cancelled request. Ctrl-C waits for it too: until the step ends the session takes nothing."""
    while True:
        with suppress(KeyboardInterrupt):
            return request.result()


def _wait(request: Request) -> None:
    """Wait until its answer begins, and tell how far its prompt is read. Raises KeyboardInterrupt after Ctrl-C."""
    begun = Event()
    request.follow(lambda pieces, outcome: begun.set() if pieces or outcome is not None else None)
    progress = PromptProgress()
    while not begun.wait(LOOK_SECONDS):
        Interrupt.check()
        progress(*request.progress)
    progress(len(request.prompt), len(request.prompt))
