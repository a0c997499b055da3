"""An engine and its model as a server needs them: here, or in other processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Sized
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from lmstate.engine.session import SessionHost
from lmstate.errors import RanksError
from lmstate.language_model import DescribedModel
from lmstate.state import SourceFeatures
from lmstate.vision.reader import SeeingModel

if TYPE_CHECKING:
    from lmstate.audio.listener import Listener
    from lmstate.engine.prefix.picture import Prefix
    from lmstate.engine.request import Request
    from lmstate.engine.results import Load, ReplicaStatus, Reuse
    from lmstate.engine.session import Session
    from lmstate.engine.session_record import Record
    from lmstate.engine.tiers import RecordStore
    from lmstate.generation.params import SamplingParams
    from lmstate.generation.transcript import WordsQuestion
    from lmstate.models.config import ModelConfig
    from lmstate.models.describe import WeightTotals
    from lmstate.speculation import DraftReport
    from lmstate.vision.reader import PicturePrompt


class ServingModel(DescribedModel, SeeingModel, Protocol):
    """A model that computes elsewhere; `lmstate.Model` is one too."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def hears(self) -> bool:
        """Whether its sources are sounds."""
        ...

    @property
    def no_word_times(self) -> str | None:
        """The reason for which it does not tell when words are said; None where it does."""
        ...

    def listener(self) -> Listener:
        """The maker of its features of sounds. Raises `UnsupportedError` where it hears none."""
        ...

    @property
    def blocks(self) -> Sized: ...

    @property
    def max_positions(self) -> int | None:
        """Positions that it has learned; None for any number."""
        ...

    @property
    def context_size(self) -> int | None:
        """Tokens that a text may have; None for any number."""
        ...

    @property
    def weight_totals(self) -> WeightTotals: ...

    @property
    def sees(self) -> bool:
        """Whether it takes pictures, as far as its files tell without reading the vision tower."""
        ...

    @property
    def takes_sounds(self) -> bool:
        """Whether it takes sounds in a conversation, as far as its files tell."""
        ...


class ServingEngine(SessionHost, Protocol):
    """The part of an engine that a server uses: see `Engine`. A front of several replicas is one as well."""

    @property
    def model(self) -> ServingModel: ...

    @property
    def rows(self) -> int: ...

    @property
    def unstored(self) -> int: ...

    @property
    def failure(self) -> RanksError | None:
        """The error that its model was lost with, and all that it holds: nothing is answered any more."""
        ...

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | PicturePrompt | None = None,
        params: SamplingParams | None = None,
        *,
        source: str | Sequence[int] | SourceFeatures | None = None,
        priority: int = 0,
        deadline: float | None = None,
        session: str | Session | None = None,
        itl: float | None = None,
        idempotency_key: str | None = None,
        salt: str = "",
        sender: str = "",
        **changes: Any,
    ) -> Request: ...

    def embed(self, tokens: Sequence[int], pooling: str = "mean") -> Future[Tensor]: ...

    def word_ends(self, question: WordsQuestion) -> Future[list[int]]: ...

    def session(self, name: str, salt: str = "") -> Session: ...

    def find_session(self, name: str, salt: str = "") -> Session | None: ...

    def sessions(self) -> list[str]: ...

    def new_session(self, name: str, record: Record, salt: str = "") -> Session: ...

    def load_session(self, name: str, path: str | os.PathLike[str], salt: str = "") -> Session: ...

    def stored_records(self) -> RecordStore | None: ...

    def explain(
        self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | PicturePrompt, salt: str = ""
    ) -> Reuse: ...

    def held(self, tokens: Sequence[int] | PicturePrompt, salt: str = "") -> dict[str, int]: ...

    def prefixes(self, tokens: Sequence[int] = (), salt: str | None = None) -> list[Prefix]: ...

    def rewind_window(self) -> int | None: ...

    def tree(self, salt: str | None = None) -> str: ...

    def clear_prefixes(self, salt: str | None = None) -> None: ...

    def at_work(self) -> list[int]: ...

    def resident(self) -> list[str]: ...

    def draft_report(self) -> DraftReport: ...

    def load(self) -> Load: ...

    def stats(self) -> dict[str, float]: ...

    def replica_statuses(self) -> list[ReplicaStatus]: ...

    def session_rank(self, name: str, salt: str = "") -> int | None:
        """The rank of the replica that a session was last answered by, as far as is known."""
        ...

    def drain_rank(self, rank: int, seconds: float = 0.0) -> bool:
        """Have a replica end its answers within `seconds`, or hand them on; another one takes its place.

        Returns whether the store took all that was computed. Raises ValueError for an unknown rank, UnsupportedError
        where there is one replica that is not replaced.
        """
        ...

    def drain(self, seconds: float = 0.0) -> bool: ...

    def close(self) -> None: ...
