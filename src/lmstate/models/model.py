"""The model: an embedding, a stack of blocks, a head. It holds no state and is never told a position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from lmstate.errors import StateError, UnsupportedError
from lmstate.generation import generate, stream
from lmstate.generation.conversation import chat
from lmstate.generation.transcription import transcribe
from lmstate.language_model import Logits
from lmstate.models.alignment import cross_weights
from lmstate.models.block import Block as Block  # families name the two together
from lmstate.models.compiled import device_logits
from lmstate.models.embeddings import embeddings
from lmstate.models.forward import Forward, Head, Keep, Run
from lmstate.models.graphs import widest_run
from lmstate.models.heads.ahead import DraftedAhead, planned_draft, run_draft
from lmstate.models.network import in_blocks
from lmstate.models.stack import run_eager, run_tapped
from lmstate.models.states import ModelStates
from lmstate.models.tokens import Tokens, last_counts, token_rows
from lmstate.models.trace import OnSublayer, Traced, traced_blocks
from lmstate.ops.dispatch import giving_way
from lmstate.speculation.heads_drafter import AheadDraft
from lmstate.state import Layout, State, Step
from lmstate.state.inference_mode import ordinary_tensors
from lmstate.state.tree import grow
from lmstate.state.validate import flag, flags, whole_number


@dataclass(eq=False, repr=False)
class Model(ModelStates):
    """A language model: `model(tokens, state)` -> logits. Made by `lmstate.load`."""

    # ---- forward

    @overload
    def __call__(
        self,
        tokens: Tokens,
        state: State | None = None,
        logits: Literal["last", "all"] | Sequence[int] | None = None,
        commit: bool = True,
        parents: Sequence[Sequence[int]] | None = None,
        rewindable: bool | Sequence[bool] = True,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        tokens: Tokens,
        state: State | None = None,
        logits: Logits | None = None,
        commit: bool = True,
        parents: Sequence[Sequence[int]] | None = None,
        rewindable: bool | Sequence[bool] = True,
    ) -> Tensor | None: ...

    def __call__(
        self,
        tokens: Tokens,
        state: State | None = None,
        logits: Logits | None = None,
        commit: bool = True,
        parents: Sequence[Sequence[int]] | None = None,
        rewindable: bool | Sequence[bool] = True,
    ) -> Tensor | None:
        """Extend the state by `tokens`, and return float32 logits.

        tokens: int64 `[rows, T]`, or one list of ids a row (ragged; an empty list is an idle row).
        logits: `"last"` -> `[rows, V]` at each row's last token (an idle row repeats its last logits, NaN if it has
        none yet); `"all"` -> `[rows, T, V]`, right-padded with zeros; `"none"` -> None. A number k for each row ->
        `[rows, max(k), V]` at the last k tokens of each, right-padded with zeros. Default: `"last"`, or `"all"` without
        a state.
        commit=False leaves the tokens pending until `state.commit` or `state.discard`; do not write into the logits
        until then.
        parents: the tokens of each row are a tree; for each the index of its parent among them, -1 for one that follows
        the row's last token. With `commit=False`; the logits are of all nodes, and `state.commit_path` is the verdict.
        rewindable=False: to go back into these tokens costs computing them again, inside the state's rewind window too:
        recurrent layers read them in one go, without a stop for a checkpoint. One for all rows, or one for each.
        Without a state: the plain forward over whole sequences, of a model without an encoder. Raises `StateError` on
        bad tokens and on the state of another model, `CapacityError`, `PendingError`; no error changes the state.
        """
        if isinstance(logits, str) and logits not in ("last", "all", "none"):
            raise StateError(f'logits={logits!r} was asked for; there are "last", "all", "none", and a number a row')
        if parents is not None:
            return self._tree(token_rows(tokens, self.config.ids), state, logits or "all", commit, parents)
        return self._extend(tokens, state, logits, commit, self._run, self.logits, rewindable)

    def hidden(
        self,
        tokens: Tokens,
        state: State | None = None,
        *,
        commit: bool = True,
        start: int = 0,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Features without the head: the stream after the last block, float32 `[rows, T, E]`, zero at padding.

        tokens, state, commit, errors: as of a call. `model.logits(hidden)` gives the logits; `lmstate.ops.norm(hidden,
        model.norm)` what transformers calls the last hidden state.

        inputs: float32 `[rows, T, E]`, the stream in front of block `start` (a traced output of the block before, say),
        which replaces what the tokens' embeddings would have become; `start` may be the number of blocks. A state
        is then only read, and nothing is left pending: the blocks before `start` have not seen these tokens. A block
        that shares the keys of an earlier one (Gemma 3n, Gemma 4) cannot go without it: StateError.
        """
        if inputs is None:
            if start:
                raise StateError(f"hidden(start={start}) was asked for without inputs; give the stream in front of it")
            return self._features(tokens, state, commit, self._run)
        start, ids = whole_number(start, "start"), token_rows(tokens, self.config.ids)
        if not 0 <= start <= len(self.blocks):
            raise StateError(f"hidden(start={start}) was asked for; the model has blocks 0 to {len(self.blocks) - 1}")
        for reader, block in enumerate(self.blocks[start:], start):
            if block.reads is not None and block.reads < start:
                raise StateError(
                    f"hidden(start={start}) was asked for, but block {reader} reads the keys of block {block.reads}, "
                    f"which would not see these tokens; start at {block.reads} or before"
                )
        length, offset = max(map(len, ids)), 0

        def run(part: Tensor, step: Step, state: State, keep: Keep) -> Tensor:
            nonlocal offset
            x = self.network.embedded(part, step)  # also what blocks read beside the stream
            expected = [x.shape[0], length, x.shape[2]]
            if list(inputs.shape) != expected or inputs.dtype != torch.float32:
                raise StateError(
                    f"inputs are {inputs.dtype} {list(inputs.shape)}; the stream of these tokens is float32 {expected}"
                )
            x, offset = inputs[:, offset : offset + step.width].to(x.device), offset + step.width
            blocks = self.network.blocks_of(step)
            x = run_eager(blocks[start:], x, step, state.layers[start:]).to(self.output_device)
            return x if self.network.exit is None else self.network.exit(x)

        out = self._features(ids, state, False, run)
        if state is not None:
            state.discard()
        return out

    def trace(self, tokens: Tokens, state: State | None = None, *, on: OnSublayer, commit: bool = True) -> Tensor:
        """A call with `logits="all"` that runs block by block, and tells what every sublayer reads and gives.

        `on(name, input, output)` is called with `embed` (the tokens, their stream), for each block with its parts
        `blocks.3.mixer`, `blocks.3.mlp` and then itself, `blocks.3`; last with `exit`, where there is one, and `head`
        (the stream, the logits). A mixer or feed-forward part reads the stream, and gives it with its own contribution
        added, unless the block adds that itself. A step longer than the state's chunk comes in several parts. An
        exception in `on` is one in the forward: nothing happened.
        """

        if self.network.offloaded:
            raise UnsupportedError(
                "trace was asked for of a model with weights in host memory: load it without offload"
            )

        def run(ids: Tensor, step: Step, state: State, keep: Keep) -> Tensor:
            network, ids = self.network, ids.to(self.device)
            blocks, x = traced_blocks(network.blocks_of(step), on), network.embedded(ids, step)
            on("embed", ids, x)
            taps = network.heads[0].taps if network.heads else ()
            x, tapped = run_tapped(blocks, x, step, state.layers, None, taps)
            x = x if network.exit is None else Traced(network.exit, "exit", on)(x)
            network.have_heads_read(x, ids, step, state.layers, tapped)
            return x

        out = self._extend(tokens, state, "all", commit, run, Traced(self.logits, "head", on))
        assert out is not None
        return out

    def cross_weights(self, tokens: Sequence[int], state: State, heads: Sequence[tuple[int, int]] = ()) -> Tensor:
        """Read tokens into the row of a state, and tell how each attends to the row's source: float32 `[A, T, S]`.

        heads: pairs of a layer, counted among those that attend to a source, and a head; none are all heads of the
        later half of these layers. Raises `ModelError` for those that the decoder lacks; other errors as `trace`.
        """
        return cross_weights(self, tokens, state, heads)

    def _features(self, tokens: Tokens, state: State | None, commit: bool, run: Run) -> Tensor:
        out = self._extend(tokens, state, "all", commit, run, None)
        assert out is not None
        return out

    def _run(self, tokens: Tensor, step: Step, state: State, keep: Keep) -> Tensor:
        return self.network.stream(tokens, step, state.layers, state, keep)

    @ordinary_tensors
    def _extend(
        self,
        tokens: Tokens,
        state: State | None,
        logits: Logits | None,
        commit: bool,
        run: Run,
        head: Head | None,
        rewindable: bool | Sequence[bool] = True,
    ) -> Tensor | None:
        """The transaction of a call; without a head, what it gives is not logits but hidden states."""
        ids, commit = token_rows(tokens, self.config.ids), flag(commit, "commit")
        kept = None if logits is None or isinstance(logits, str) else last_counts(logits, ids)
        lasting = flags(rewindable, len(ids), "rewindable")
        if state is None:
            if self.encoder is not None:
                raise StateError(
                    "the tokens of this model read a source: make a state with new_state, give each row its source "
                    "with state.condition(row, source), and call the model with that state"
                )
            # Whole sequences are one step of a state that is not kept; in one part, so that gradients can follow.
            width = max(map(len, ids), default=0)
            width = self.opening_length + max(width, 1)
            layout = Layout(
                len(ids), self.device, self.dtype, width, rewind=0, chunk=width, max_positions=self.max_positions
            )
            return self._extend(ids, self._new_state(layout), logits or "all", False, run, head)
        self._refuse_other(state)
        self._catch_up(state, ids, logits or "last")
        step = state.plan(ids, speculative=not commit, rewindable=lasting)
        try:
            with giving_way() as give_way:
                out = self._forward(run, head, give_way)(ids, step, state, kept or logits or "last")
                state.record_logits(None if head is None else out, kept)
                if commit:
                    state.commit()
        except BaseException:
            state.discard()
            raise
        return out

    @ordinary_tensors
    def _tree(
        self, ids: list[list[int]], state: State | None, logits: Logits, commit: bool, parents: Sequence[Sequence[int]]
    ) -> Tensor:
        if state is None or commit or logits != "all":
            raise StateError(
                'a tree of tokens takes a state, commit=False and logits="all"; commit_path is its verdict'
            )
        self._refuse_other(state)
        if state.layout.static:
            raise UnsupportedError("a static state keeps its rows, and a tree forks them; use a chain of tokens")
        self._catch_up(state, [[] for _ in ids], "none")
        tree = grow(state, ids, parents)
        out = self(tree.tokens(ids), tree.state, logits="all", commit=False)
        assert out is not None
        state.record_tree(tree)
        return tree.gather(out)

    def _catch_up(self, state: State, ids: list[list[int]], logits: Logits) -> None:
        """Compute what the state's layers miss of its tokens, after a rewind far back say."""
        counts = [len(row) for row in ids]
        backlog = state.backlog(counts, logits=logits == "last")
        if any(backlog):
            step = state.plan_backlog(backlog, counts)
            try:
                idle = any(not count and late for count, late in zip(counts, backlog))
                with giving_way() as give_way:
                    forward = self._forward(self._run, self.logits, give_way)
                    last = forward(backlog, step, state, "last" if idle else "none")
                    state.commit_backlog(last)
            except BaseException:
                state.discard()
                raise

    def _forward(self, run: Run, head: Head | None, give_way: Callable[[], None]) -> Forward:
        features = self.config.hidden_size if head is None else self.config.vocab_size
        return Forward(run, head, features, self.output_device, self.on_part, give_way)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Hidden states `[..., E]` -> float32 logits `[..., V]`; in `out`, of that shape, without gradients."""
        return in_blocks(self._head, hidden, out)

    def _head(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`[n, E]` -> `[n, V]`."""
        return self.network.logits(hidden, out)

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
        if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype != torch.int64:
            raise StateError(f"tokens are {_shown(tokens)}; they must be int64 [rows, T]")
        if tokens.shape[0] != state.rows:
            raise StateError(f"{tokens.shape[0]} rows of tokens were given to a state of {state.rows}")
        if counts is not None and (tuple(counts.shape) != (state.rows,) or counts.dtype != torch.int64):
            raise StateError(f"counts are {_shown(counts)}; they must be int64 [{state.rows}], one for each row")
        if logits not in ("last", "all"):
            raise StateError(f'logits={logits!r} was asked for; there are "last" and "all"')
        self._refuse_other(state)
        step, room = state.device_step(tokens.shape[1], counts)
        network = self.network
        if torch.compiler.is_compiling() and self._traced is not None:
            network = self._traced[1]
        hidden = network.stream(tokens, step, state.layers, state)
        out = device_logits(hidden, partial(in_blocks, network.logits), step, room, logits)
        state.record_device_step(tokens.clone(), None if counts is None else counts.clone(), out)
        return out

    @ordinary_tensors
    def follow(self, tokens: Tokens, state: State, most: int) -> tuple[list[list[int]], Tensor] | None:
        """Extend the state by a token of each row, or none, and by the likeliest tokens after it, in one go.

        Returns the tokens that each row read, T of them, at most `most`, and logits float32 `[rows, T, V]`: those of
        calls with one token after another, bit for bit. They await the verdict of `state.commit`, as a draft does. None
        where no graph of the GPU holds several steps; nothing happened then. Raises the errors of a call.
        """
        ids = token_rows(tokens, self.config.ids)
        most = min(most, widest_run(len(ids), self.config.vocab_size))
        if most < 2 or self.device.type != "cuda" or max(map(len, ids), default=0) != 1 or state.layout.static:
            return None
        self._refuse_other(state)
        self._catch_up(state, ids, "all")
        given = torch.tensor([row or [0] for row in ids], dtype=torch.int64)
        while most > 1:
            most = 1 << (most.bit_length() - 1)  # a graph has a power of two
            step = state.plan([row * most for row in ids], speculative=True)
            try:
                found = self.network.graphs.follow(given, step, state.layers)
                if found is not None:
                    read = [own if row else [] for own, row in zip(found[0], ids)]
                    state.record_logits(found[1], ids=read)
                    return read, found[1]
            except BaseException:
                state.discard()
                raise
            state.discard()
            most //= 2  # a shorter run may end at a checkpoint
        return None

    # ---- drafts of its own heads

    @ordinary_tensors
    def draft_ahead(self, state: State, last: Mapping[int, int], depth: int) -> dict[int, AheadDraft]:
        """Drafts of the heads after each row's next token: for rows of `last` at most `depth` tokens.

        last: by row, the token that comes next and is not in the state yet. The state is as before afterwards. A row
        that holds no tokens, or whose layers miss some of them, gets none. Raises `PendingError` while tokens await a
        verdict, `UnsupportedError` where the state has no layers of heads.
        """
        self._refuse_other(state)
        if not self.has_heads(state):
            raise UnsupportedError(
                "the state has no layers of multi-token prediction heads: load the model with heads=True, and make a "
                "state that is not static and under no policy that evicts"
            )
        drafted = planned_draft(self.heads, state, last, depth, self.output_device)
        if any(drafted.counts):
            self._draft(state, drafted)
        return drafted.drafts()

    def _draft(self, state: State, drafted: DraftedAhead) -> None:
        run_draft(self.heads, state, state.layers[len(self.blocks) :], drafted)

    # ---- generation

    generate = generate
    stream = stream
    transcribe = transcribe
    chat = chat
    embeddings = embeddings


def _shown(value: object) -> str:
    """A tensor by its dtype and shape, anything else as it is, for messages."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
