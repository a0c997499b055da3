"""The model: an embedding, a stack of blocks, a head. It holds no state and is never told a position."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lmstate import ops
from lmstate.errors import StateError
from lmstate.models.block import Block, new_layers, run_blocks
from lmstate.models.entry import Entry, Exit, LearnedPositions
from lmstate.models.fingerprint import fingerprint
from lmstate.models.plain import plain
from lmstate.models.rope import Rope
from lmstate.models.static import STATIC_CHUNK, check_static, device_logits, hold_still
from lmstate.ops import Norm, Weight
from lmstate.state import LayerState, Layout, State, Step
from lmstate.state.integers import token_ids, whole_number
from lmstate.state.kv.per_layer import Policies, policy_of
from lmstate.state.snapshot import differences

if TYPE_CHECKING:
    from lmstate.generation.prompts import Prompt
    from lmstate.models.tokenizer import Tokenizer

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Logits = Literal["last", "all", "none"]
Tokens = Tensor | Sequence[Sequence[int]]


@dataclass(frozen=True)
class ModelConfig:
    """What does not depend on a layer."""

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int | None = None  # tokens that the model was made for; longer texts run, and are the caller's risk
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None


@dataclass(eq=False)
class Model:
    """A language model: `model(tokens, state)` -> logits. Made by `lmstate.load`."""

    config: ModelConfig
    embed: Weight  # [V, E]
    blocks: list[Block]
    norm: Norm
    head: Weight  # [V, E]; the embedding itself where they are tied
    head_bias: Tensor | None = None
    entry: Entry | None = None
    exit: Exit | None = None
    dtype: torch.dtype = torch.float32  # of stored keys and values, and of large matrix products
    name: str = ""
    eos_ids: frozenset[int] = frozenset()
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling that the checkpoint's makers suggest
    _tokenizer: Tokenizer | None = None
    _fingerprint: str | None = None
    _traced: Model | None = field(default=None, init=False, repr=False)  # what compiled graphs hold

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise StateError(f"{self.name or 'this model'} has no tokenizer; give token ids, or add a tokenizer.json")
        return self._tokenizer

    @property
    def parts(self) -> tuple[Any, ...]:
        """All that has weights."""
        return self.embed, self.blocks, self.norm, self.head, self.head_bias, self.entry, self.exit

    @property
    def fingerprint(self) -> str:
        """A hash of the config and of a sample of every weight: what a snapshot must agree with."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.config, self.parts)
        return self._fingerprint

    def new_state(
        self,
        rows: int = 1,
        capacity: int | None = None,
        rewind: int = 16,
        kv: torch.dtype | Policies | None = None,
        static: bool = False,
    ) -> State:
        """An empty state of `rows` sequences.

        `capacity`: tokens that a row may hold, reserved at once (None: grows). `rewind`: how many tokens back a rewind
        recomputes nothing. `kv`: how keys and values are stored and which are forgotten: a policy of `lmstate.kv`, one
        for each layer (`kv.PerLayer`, or a function of the layer's number), or a dtype; by default all, in the model's.
        `static`: everything is made at once and stays where it is, for `decode_step` in a compiled graph; it needs a
        `capacity`, keeps its number of rows, and takes no policies.
        """
        rows, rewind = whole_number(rows, "rows"), whole_number(rewind, "rewind")
        capacity = None if capacity is None else whole_number(capacity, "capacity")
        for name, value, least in (("rows", rows, 1), ("capacity", capacity, 1), ("rewind", rewind, 0)):
            if value is not None and value < least:
                raise StateError(f"new_state({name}={value}) was asked for; {name} is at least {least}")
        if isinstance(kv, torch.dtype) and kv not in KV_DTYPES:
            known = ", ".join(map(str, KV_DTYPES))
            raise StateError(f"new_state(kv={kv}) was asked for; keys and values are stored in {known}")
        if static:
            check_static(self, capacity, kv)
        dtype = kv if isinstance(kv, torch.dtype) else self.dtype
        chunk = STATIC_CHUNK if static else Layout.chunk
        layout = Layout(
            rows, self.device, dtype, capacity, rewind, chunk, max_positions=self.max_positions, static=static
        )
        state = self._new_state(layout, None if isinstance(kv, torch.dtype) else kv)
        if static:
            if self._traced is None and (traced := plain(self)) is not self:
                self._traced = traced
            hold_still(self._traced or self, state)
        return state

    def _new_state(self, layout: Layout, kv: Policies | None = None) -> State:
        count = len(self.blocks)
        layouts = [layout if kv is None else replace(layout, kv=policy_of(kv, layer)) for layer in range(count)]
        return State(
            new_layers(self.blocks, layouts),
            layout,
            vocab_size=self.config.vocab_size,
            fingerprint=lambda: self.fingerprint,
            user=weakref.ref(self),
            regime=lambda horizon: self._regime(horizon),
        )

    def _refuse_other(self, state: State) -> None:
        """Refuse the state of another model, whose layers may have the shapes of this one's.

        One with the same fingerprint is no other: a copy, or the same checkpoint loaded again.
        """
        if not isinstance(state, State):
            raise StateError(f"{state!r:.80} is no state of lmstate; make one with new_state")
        if state.user() is self:
            return
        if different := differences(state.fingerprint, self.fingerprint):
            raise StateError(
                f"the state is of another model: {different}; use the model that made it, or make a state with "
                "this model's new_state"
            )
        state.user = weakref.ref(self)

    @property
    def max_positions(self) -> int | None:
        """How many positions the model has learned, each by itself; None: it knows any."""
        return self.entry.count if isinstance(self.entry, LearnedPositions) else None

    def _regime(self, horizon: int) -> int:
        return max((rope.regime(horizon) for rope in self._stretching), default=0)

    @cached_property
    def _stretching(self) -> list[Rope]:
        """The ropes whose frequencies depend on the length of the text."""
        ropes = [getattr(block.mixer, "rope", None) for block in self.blocks]
        return [rope for rope in ropes if isinstance(rope, Rope) and rope.native is not None]

    # ---- forward

    def __call__(
        self, tokens: Tokens, state: State | None = None, logits: Logits | None = None, commit: bool = True
    ) -> Tensor | None:
        """Extend the state by `tokens`, and return float32 logits.

        tokens: int64 `[rows, T]`, or one list of ids a row (ragged; an empty list is an idle row).
        logits: `"last"` -> `[rows, V]` at each row's last token (an idle row repeats its last logits, NaN if it has
        none yet); `"all"` -> `[rows, T, V]`, right-padded with zeros; `"none"` -> None. Default: `"last"`, or `"all"`
        without a state.
        commit=False leaves the tokens pending until `state.commit` or `state.discard`; do not write into the logits
        until then.
        Without a state: the plain forward over whole sequences. Raises `StateError` on bad tokens and on the state of
        another model, `CapacityError`, `PendingError`; no error changes the state.
        """
        if logits not in (None, "last", "all", "none"):
            raise StateError(f'logits={logits!r} was asked for; there are "last", "all" and "none"')
        ids = self._ids(tokens)
        if state is None:
            # Whole sequences are one step of a state that nobody keeps; in one part, so that gradients can follow.
            width = max(map(len, ids), default=0)
            width = max(width, 1)
            layout = Layout(
                len(ids), self.device, self.dtype, width, rewind=0, chunk=width, max_positions=self.max_positions
            )
            return self(ids, self._new_state(layout), logits or "all", commit=False)
        self._refuse_other(state)
        self._catch_up(state, ids, logits or "last")
        step = state.plan(ids, tentative=not commit)
        try:
            out = self._forward(ids, step, state, logits or "last")
            state.ran(out)
            if commit:
                state.commit()
        except BaseException:
            state.discard()
            raise
        return out

    def _catch_up(self, state: State, ids: list[list[int]], logits: Logits) -> None:
        """Compute what the state's layers miss of its tokens, after a rewind far back say."""
        counts = [len(row) for row in ids]
        backlog = state.backlog(counts, logits=logits == "last")
        if any(backlog):
            step = state.plan_backlog(backlog, counts)
            try:
                idle = any(not count and late for count, late in zip(counts, backlog))
                last = self._forward(backlog, step, state, "last" if idle else "none")
                state.commit_backlog(last)
            except BaseException:
                state.discard()
                raise

    def _forward(self, ids: list[list[int]], step: Step, state: State, want: Logits) -> Tensor | None:
        if want == "none":
            for _ in self._parts(ids, step, state):
                pass
            return None
        if want == "all":
            pieces = [self.logits(hidden) for _, _, hidden in self._parts(ids, step, state)]
            none = torch.zeros(step.rows, 0, self.config.vocab_size, dtype=torch.float32, device=self.device)
            whole = torch.cat(pieces, dim=1) if pieces else none
            if not step.uniform:
                padding = torch.arange(step.width, device=self.device) >= step.counts_t[:, None]
                whole = whole.masked_fill(padding[..., None], 0.0)
            return whole
        rows: list[int] = []
        last: list[Tensor] = []  # [n, E] hidden at the last tokens of the next n of `rows`
        for offset, part, hidden in self._parts(ids, step, state):
            ends = {row: n - 1 - offset for row, n in enumerate(step.counts) if 0 <= n - 1 - offset < part.width}
            if ends:
                together = len(ends) == step.rows and len(set(ends.values())) == 1
                last.append(hidden[:, ends[0]] if together else hidden[list(ends), list(ends.values())])
                rows += ends
        if rows == list(range(step.rows)):
            return self.logits(last[0] if len(last) == 1 else torch.cat(last))
        out = torch.full((step.rows, self.config.vocab_size), float("nan"), dtype=torch.float32, device=self.device)
        for row, logits in enumerate(state.last_logits()):
            if logits is not None:
                out[row] = logits
        if rows:
            out[rows] = self.logits(torch.cat(last))
        return out

    def _parts(self, ids: list[list[int]], step: Step, state: State) -> Iterator[tuple[int, Step, Tensor]]:
        """Run the blocks over a step, part by part: (offset, part, hidden float32 `[R, t, E]`)."""
        if not step.width:
            return
        for offset, part in step.parts():
            width = part.width
            rows = [row[offset : offset + width] for row in ids]
            padded = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.device)
            yield offset, part, self.hidden(padded, part, state.layers)

    def hidden(self, tokens: Tensor, step: Step, layers: Sequence[LayerState]) -> Tensor:
        """Run the blocks: tokens int64 `[R, T]` -> float32 `[R, T, E]`."""
        x = self.embed.rows(tokens)
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        if self.entry is not None:
            x = self.entry(x, tokens, step)
        x = run_blocks(self.blocks, x, step, layers)
        return x if self.exit is None else self.exit(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states `[..., E]` -> float32 logits `[..., V]`."""
        # By blocks of few rows, so that compiled graphs and references do not need as much memory again.
        rows = hidden.flatten(0, -2).split(ops.FEW)
        blocks = [ops.linear(block, self.head, self.head_bias, norm=self.norm) for block in rows]
        logits = (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).unflatten(0, hidden.shape[:-1])
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if (cap := self.config.logit_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def decode_step(
        self, tokens: Tensor, state: State, counts: Tensor | None = None, logits: Literal["last", "all"] = "last"
    ) -> Tensor:
        """One step of a static state on tensors alone: what to give to `torch.compile`.

            step = torch.compile(model.decode_step, fullgraph=True)
            logits = step(tokens, state)
            state.commit()

        tokens: int64 `[R, T]`. counts: int64 `[R]`, how many of a row's tokens are real (the rest, any ids, is
        padding); None: all. logits: `"last"` -> float32 `[R, V]` at each row's last token, NaN for an idle row;
        `"all"` -> `[R, T, V]`, zero at padding. The tokens are pending until `state.commit` or `state.discard`.

        The device cannot raise: a row without room is left alone and has NaN for logits, and `commit` raises its
        `CapacityError`. Raises `PendingError`, `UnsupportedError` if the state is not static, `CapacityError` for a T
        that never fits.
        """
        if tokens.shape[0] != state.rows:
            raise StateError(f"{tokens.shape[0]} rows of tokens were given to a state of {state.rows}")
        self._refuse_other(state)
        step, room = state.device_step(tokens.shape[1], counts)
        model = self._traced if torch.compiler.is_compiling() and self._traced is not None else self
        out = device_logits(model, tokens, step, room, state.layers, logits)
        state.left(tokens.clone(), None if counts is None else counts.clone(), out)
        return out

    def _ids(self, tokens: Tokens) -> list[list[int]]:
        if isinstance(tokens, Tensor):
            if tokens.ndim != 2 or tokens.is_floating_point():
                raise StateError(f"tokens are {tokens.dtype} {list(tokens.shape)}; they must be int64 [rows, T]")
            tokens = tokens.tolist()
        if not isinstance(tokens, Iterable):
            raise StateError(f"tokens are {tokens!r:.80}; they must be int64 [rows, T], or a list of ids for each row")
        ids = [token_ids(row, f"row {index}", self.config.vocab_size) for index, row in enumerate(tokens)]
        if not ids:
            raise StateError("no rows of tokens were given; a batch has at least one, idle rows are empty lists")
        return ids

    # ---- generation

    def generate(
        self,
        prompt: Prompt,
        state: State | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
    ) -> str | list[str]:
        """The text that continues a prompt, or each of a list of prompts; see `lmstate.generation.generate`."""
        from lmstate.generation import generate

        return generate(
            self, prompt, state, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop, seed
        )

    def stream(
        self,
        prompt: Prompt,
        state: State | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
    ) -> Iterator[str]:
        """The same for one prompt, piece by piece; see `lmstate.generation.stream`."""
        from lmstate.generation import stream

        return stream(
            self, prompt, state, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop, seed
        )
