"""The model of rank 0: it tells the others to run what it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NoReturn

import torch
from torch import Tensor

from lmstate.distributed.carries import round_apart
from lmstate.distributed.cuts import LayerCuts
from lmstate.distributed.matrices import ParallelMode
from lmstate.distributed.mirror import Link, MirroredState
from lmstate.distributed.ranks import Ranks
from lmstate.errors import StateError, UnsupportedError
from lmstate.models.forward import Keep
from lmstate.models.heads.ahead import DraftedAhead
from lmstate.models.model import Model
from lmstate.models.tokens import Tokens
from lmstate.models.trace import OnSublayer
from lmstate.state import Layout, State, Step
from lmstate.state.blocks import BlockPool
from lmstate.state.kv.policies.per_layer import Policies
from lmstate.state.kv.policies.storage import Quantized

ELSEWHERE = "load it without parallel"


@dataclass(eq=False, repr=False)
class ParallelModel(Model):
    """A model whose weights and states are on several ranks. Made by `lmstate.load(parallel=...)`."""

    state_type: ClassVar[type[State]] = MirroredState
    no_word_times = f"a model over several processes does not tell when words are said: {ELSEWHERE}"
    no_pictures = f"a model over several processes reads no pictures, and no sounds in conversations: {ELSEWHERE}"

    ranks: Ranks | None = None
    cuts: LayerCuts = ()
    mode: ParallelMode = "exact"

    def __repr__(self) -> str:
        layers, split = len(self.cuts), sum(map(bool, self.cuts))
        how = ", whose products are added" if self.mode == "sum" else ""
        part = f"the part of 1 of {self._group.count} processes{how}"
        return f"{super().__repr__()[:-1]}\n  {part}; {split} of {layers} layers split their state by heads)"

    @property
    def _group(self) -> Ranks:
        assert self.ranks is not None
        return self.ranks

    def close(self) -> None:
        """End the other processes. The model and its states are of no use afterwards."""
        with self._group.lock:
            self._group.failure = self._group.failure or "the model over several processes was closed; load it again"
            self._group.close()

    def check(self) -> None:
        self._group.check()

    def new_state(
        self,
        rows: int = 1,
        capacity: int | None = None,
        rewind: int = 16,
        kv: torch.dtype | Policies | None = None,
        static: bool = False,
        pool: BlockPool | None = None,
        carries: int = 32,
    ) -> State:
        if static:
            raise UnsupportedError(f"a model over several processes has no static states: {ELSEWHERE}")
        if not isinstance(kv, torch.dtype | Quantized | None):
            raise UnsupportedError(
                f"kv={kv} was asked for; over several processes it is a dtype, or Quantized for all layers: {ELSEWHERE}"
            )
        return super().new_state(rows, capacity, rewind, kv, pool=pool, carries=carries)

    def _new_state(self, layout: Layout, kv: Policies | None = None, heads: bool = False) -> State:
        ranks = self._group
        with ranks.turn():
            state = super()._new_state(layout, kv, heads)
            assert isinstance(state, MirroredState)
            cuts = self.cuts[: len(state.layers)]
            round_apart(state, cuts, ranks.group.rank)
            state.link = Link(ranks, cuts, next(ranks.ids))
            dtype, bits = str(layout.dtype).removeprefix("torch."), kv.bits if isinstance(kv, Quantized) else None
            ranks.tell(
                "new", state.link.number, layout.rows, dtype, bits, layout.capacity, layout.rewind, layout.chunk,
                layout.carries, heads,
            )  # fmt: skip
        return state

    def _refuse_other(self, state: State) -> None:
        super()._refuse_other(state)
        assert isinstance(state, MirroredState)
        if state.link.ranks is not self.ranks:
            raise StateError("the state is of a model over other processes: move its rows by snapshots")

    def _run(self, tokens: Tensor, step: Step, state: State, keep: Keep) -> Tensor:
        assert isinstance(state, MirroredState)
        ranks = self._group
        with ranks.turn():
            offset = max(part - whole for part, whole in zip(step.starts, state.planned.step.starts))
            ranks.tell("run", state.link.number, offset, keep)
            with ranks.together():
                return super()._run(tokens, step, state, keep)

    def _head(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        ranks = self._group
        with ranks.turn():
            hidden = hidden.contiguous()
            ranks.tell("head", list(hidden.shape))
            with ranks.together():
                ranks.group.broadcast(hidden)
                return super()._head(hidden, out)

    def _draft(self, state: State, drafted: DraftedAhead) -> None:
        """As of one process. Every rank drafts with its parts of the heads, and goes by what rank 0 decides."""
        assert isinstance(state, MirroredState)
        ranks = self._group
        with ranks.turn():
            ranks.tell("draft", state.link.number, *drafted.told())
            with ranks.together():
                drafted.decide = ranks.group.broadcast
                super()._draft(state, drafted)

    # ---- what is not built

    def hidden(
        self,
        tokens: Tokens,
        state: State | None = None,
        *,
        commit: bool = True,
        start: int = 0,
        inputs: Tensor | None = None,
    ) -> Tensor:
        if inputs is not None:
            raise UnsupportedError(f"a model over several processes takes no inputs of its blocks: {ELSEWHERE}")
        return super().hidden(tokens, state, commit=commit, start=start)

    def trace(self, tokens: Tokens, state: State | None = None, *, on: OnSublayer, commit: bool = True) -> NoReturn:
        raise UnsupportedError(f"a model over several processes is not traced: {ELSEWHERE}")

    def decode_step(
        self, tokens: Tensor, state: State, counts: Tensor | None = None, logits: Literal["last", "all"] = "last"
    ) -> NoReturn:
        raise UnsupportedError(f"a model over several processes has no static states: {ELSEWHERE}")
