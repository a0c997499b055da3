"""The model: an embedding, a stack of blocks, a head. It holds no state and is never told a position."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from lmstate.checkpoints.hub import served_name
from lmstate.errors import StateError, UnsupportedError
from lmstate.generation import generate, stream
from lmstate.generation.conversation import chat
from lmstate.generation.transcription import transcribe
from lmstate.language_model import Logits
from lmstate.models.block import Block, new_layers
from lmstate.models.compiled import STATIC_CHUNK, check_static, device_logits, mark_static, traceable
from lmstate.models.config import ModelConfig
from lmstate.models.describe import WeightTotals, describe
from lmstate.models.embeddings import embeddings
from lmstate.models.encoder import Encoder
from lmstate.models.fingerprint import fingerprint
from lmstate.models.forward import Forward, Head, Keep, Run
from lmstate.models.heads.ahead import draft_ahead
from lmstate.models.heads.head import DraftHead
from lmstate.models.network import Network, in_blocks
from lmstate.models.stack import run_eager, run_tapped
from lmstate.models.tokens import Tokens, last_counts, token_rows
from lmstate.models.trace import OnSublayer, Traced, traced_blocks
from lmstate.ops import Norm, Weight
from lmstate.ops.dispatch import giving_way
from lmstate.speculation.heads_drafter import AheadDraft
from lmstate.state import Layout, SourceFeatures, State, Step
from lmstate.state.blocks import BlockPool
from lmstate.state.inference_mode import ordinary_tensors
from lmstate.state.kv.policies.per_layer import Policies, guarded, policies_of
from lmstate.state.snapshot import differences
from lmstate.state.tree import grow
from lmstate.state.validate import flag, flags, whole_number
from lmstate.text.grammars.compiler import GrammarCompiler
from lmstate.text.replay import Replay

if TYPE_CHECKING:
    from lmstate.audio.listener import Listener
    from lmstate.text.tokenizer import Tokenizer
    from lmstate.vision.reader import PicturePrompt, PictureReader

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ROWS = 2**20  # of a state: more are a slip, and would fill the memory before anything is said
DEVICE_CHUNK = 2048  # tokens of a row that one forward takes where each operation is a launch; `Layout.chunk` elsewhere
OPENING = Lock()  # held while a vision tower or a feature extractor is loaded: requests may come together


@dataclass(eq=False, repr=False)
class Model:
    """A language model: `model(tokens, state)` -> logits. Made by `lmstate.load`."""

    network: Network
    dtype: torch.dtype = torch.float32  # of stored keys and values, and of large matrix products
    context_size: int | None = None  # tokens that a text may have: what it was made for, unless `load` says otherwise
    name: str = ""
    eos_ids: frozenset[int] = frozenset()
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling that the checkpoint's makers suggest
    notes: tuple[str, ...] = ()  # what was guessed of the checkpoint, and what is held in another storage than its own
    folder: Path | None = None  # of the checkpoint, where it is one
    commit: str | None = None  # of the Hub's repository that it comes from
    _tokenizer: Tokenizer | None = None
    _fingerprint: str | None = None
    on_part: Callable[[int, int], None] | None = field(default=None, init=False)
    """Called with (tokens done, tokens of the step) before each part of a long step, and at its end."""
    _traced: tuple[Network, Network] | None = field(default=None, init=False)  # a network, and what its graphs hold
    _pictures: PictureReader | None = field(default=None, init=False, repr=False)
    _listener: Listener | None = field(default=None, init=False, repr=False)
    _replay: Replay | None = field(default=None, init=False, repr=False)
    _grammars: GrammarCompiler | None = field(default=None, init=False, repr=False)

    state_type: ClassVar[type[State]] = State
    """Class of its states."""

    def __repr__(self) -> str:
        return describe(self.name, self.network, self.context_size, self.dtype)

    def check(self) -> None:
        """Raise `RanksError` if a process of the model has ended. One in a single process is always there."""

    # ---- what it computes with

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    @property
    def embed(self) -> Weight:
        """The embedding, `[V, E]`."""
        return self.network.embed

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.network.blocks

    @property
    def norm(self) -> Norm:
        """The norm in front of the head."""
        return self.network.norm

    @property
    def head(self) -> Weight:
        """The head, `[V, E]`; the embedding itself where they are tied."""
        return self.network.head

    @property
    def heads(self) -> tuple[DraftHead, ...]:
        """The heads that draft."""
        return self.network.heads

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of its sources, see `State.condition`; None where there are none."""
        return self.network.encoder

    @property
    def device(self) -> torch.device:
        """The device of the embedding: where tokens go."""
        return self.network.device

    @property
    def output_device(self) -> torch.device:
        """The device of the head: where logits and hidden states come from."""
        return self.network.output_device

    @property
    def devices(self) -> list[torch.device]:
        """The device of each block."""
        return self.network.devices

    @property
    def has_tokenizer(self) -> bool:
        """Whether it came with a tokenizer."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise StateError(
                f"{self.name or 'this model'} has no tokenizer; give token ids, or add a tokenizer.json, which "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers makes of other files"
            )
        return self._tokenizer

    def encode(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> PicturePrompt:
        """A conversation as tokens and pictures: `prompt.place(state, row)`, then feed `prompt.tokens`.

        In a message whose content is a list, a picture is `{"type": "image", "image": bytes}`, the bytes of a PNG,
        JPEG, WebP or GIF file. The checkpoint's vision tower is loaded with the first one (`lmstate[vision]`).
        `variables`: as of `Tokenizer.chat_text`, which ends with the beginning of an answer. Raises `StateError` for a
        picture that is damaged or too large, `UnsupportedError` for a model whose pictures are not read, `ModelError`
        for a checkpoint or a chat template without what pictures need.
        """
        from lmstate.vision.reader import PicturePrompt, pictures_of

        if not pictures_of(messages):
            return PicturePrompt(self.tokenizer.chat(messages, **variables))
        return self.pictures().encode(messages, **variables)

    @property
    def sees(self) -> bool:
        """Whether it takes pictures, as far as its files tell without reading the vision tower."""
        from lmstate.vision.tower import has_tower

        return self.folder is not None and has_tower(self.folder)

    def pictures(self) -> PictureReader:
        """The reader of its pictures, opened with the first call. Raises as `encode`."""
        from lmstate.vision.reader import PictureReader

        with OPENING:
            if self._pictures is None:
                if self.folder is None:
                    raise UnsupportedError("pictures are read by models of checkpoint folders that lmstate.load opened")
                self._pictures = PictureReader.open(self.folder, self.tokenizer, self.device)
            return self._pictures

    @property
    def hears(self) -> bool:
        """Whether its sources are sounds."""
        return self.encoder is not None and self.encoder.hears

    def listen(self, sound: bytes | Tensor) -> SourceFeatures:
        """A sound as a source of a model that hears: `state.condition(row, source)`, `generate(source=source)`.

        sound: the bytes of a WAV file, or samples float32 `[N]` at `listener().rate`. At most as long as the encoder
        reads at once, 30 seconds for Whisper. Raises `StateError` for a sound that is damaged or too long,
        `UnsupportedError` for a model that does not hear, `ModelError` for a checkpoint without what sounds need.
        """
        listener = self.listener()
        return listener.features(sound if isinstance(sound, Tensor) else listener.samples(sound))

    def listener(self) -> Listener:
        """The maker of its features of sounds, opened with the first call. Raises as `listen`."""
        from lmstate.audio.listener import Listener

        with OPENING:
            if self._listener is None:
                if not self.hears:
                    raise UnsupportedError(f"a sound was given, and a {self.config.family} model reads no sounds")
                if self.folder is None:
                    raise UnsupportedError("sounds are read by models of checkpoint folders that lmstate.load opened")
                self._listener = Listener.open(self.folder, self._tokenizer, self.config.vocab_size)
            return self._listener

    @property
    def start_id(self) -> int | None:
        """The token that every answer to a source begins with; None for a model without an encoder."""
        return None if self.encoder is None else self.encoder.start_id

    @property
    def opening_length(self) -> int:
        """Number of learned positions in front of every row (prompt tuning, prefix tuning), which nothing counts."""
        return 0 if self.network.opening is None else self.network.opening.opening.count

    @property
    def opening_numbers(self) -> list[int]:
        """A number for each of them, that depends on all that was learned."""
        return [] if self.network.opening is None else self.network.opening.opening.media.numbers

    @property
    def weight_totals(self) -> WeightTotals:
        """Number of parameters, and bytes by storage."""
        return WeightTotals.of(self.network)

    @property
    def fingerprint(self) -> str:
        """A hash of the config and of a sample of every weight: what a snapshot must agree with."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.config, self.network.parts)
        return self._fingerprint

    def new_state(
        self,
        rows: int = 1,
        capacity: int | None = None,
        rewind: int = 16,
        kv: torch.dtype | Policies | None = None,
        static: bool = False,
        pool: BlockPool | None = None,
    ) -> State:
        """An empty state of `rows` sequences.

        `capacity`: the most tokens that a row may hold (None: any number); more than the model was made for warn.
        `rewind`: how many tokens back a rewind recomputes nothing. `kv`: how keys and values are stored and which are
        forgotten: a policy of `lmstate.kv`, one for each layer (`kv.PerLayer`, or a function of the layer's number), or
        a dtype; by default all, in the model's. `static`: everything is made at once and stays where it is, for
        `decode_step` in a compiled graph; it needs a `capacity`, keeps its number of rows, and takes no policies.
        `pool`: counts the blocks in which keys, values and latents lie, together with those of other states, and may
        limit their bytes; by default one of its own.
        """
        rows, rewind = whole_number(rows, "rows"), whole_number(rewind, "rewind")
        capacity = None if capacity is None else whole_number(capacity, "capacity")
        for name, value, least in (("rows", rows, 1), ("capacity", capacity, 1), ("rewind", rewind, 0)):
            if value is not None and value < least:
                raise StateError(f"new_state({name}={value}) was asked for; {name} is at least {least}")
        made_for = max(self.context_size or 0, self.config.max_positions or 0)
        if capacity is not None and 0 < made_for < capacity and not self.network.dynamic_ropes:
            warnings.warn(
                f"new_state(capacity={capacity}) was asked for, and the model was made for {made_for} tokens: "
                "answers to longer texts may be nonsense; lmstate.load(..., context_size=...) stretches its positions",
                UserWarning,
                stacklevel=2,
            )
        if rows > MOST_ROWS:
            raise StateError(f"new_state(rows={rows}) was asked for; a state has at most {MOST_ROWS} rows")
        if isinstance(kv, torch.dtype) and kv not in KV_DTYPES:
            known = ", ".join(map(str, KV_DTYPES))
            raise StateError(f"new_state(kv={kv}) was asked for; keys and values are stored in {known}")
        if not isinstance(pool, BlockPool | None):
            raise StateError(f"new_state(pool={pool!r:.80}) was asked for; give a lmstate.BlockPool")
        if flag(static, "static"):
            check_static(
                capacity,
                kv,
                devices=self.devices,
                max_positions=self.max_positions,
                dynamic_ropes=self.network.dynamic_ropes,
            )
        dtype = kv if isinstance(kv, torch.dtype) else self.dtype
        on_processor = any(device.type == "cpu" for device in self.devices)
        chunk = STATIC_CHUNK if static else Layout.chunk if on_processor else DEVICE_CHUNK
        if static and self.opening_length:
            raise UnsupportedError(
                "static=True was asked for, and this model has learned positions in front of each row, which a static "
                "state does not compute: leave static out"
            )
        capacity = None if capacity is None else self.opening_length + capacity
        layout = Layout(
            rows, self.device, dtype, capacity, rewind, chunk, max_positions=self.max_positions, static=static,
            pool=pool or BlockPool(),
        )  # fmt: skip
        state = self._new_state(layout, None if isinstance(kv, torch.dtype) else kv)
        if static:
            if self._traced is None or self._traced[0] is not self.network:
                self._traced = self.network, traceable(self.network)
            mark_static(self._traced[1], state)
        elif self.heads and not state.evicts:
            # Nothing is drafted in a static graph, nor where a policy evicts after each step.
            policy = None if kv is None or isinstance(kv, torch.dtype) else policies_of(kv, len(self.blocks))[-1]
            for head in self.heads:
                state.layers.append(head.new_state(replace(layout, kv=policy, device=self.output_device)))
                state.layers[-1].device = self.output_device
        return state

    @ordinary_tensors
    def _new_state(self, layout: Layout, kv: Policies | None = None) -> State:
        count, ahead = len(self.blocks), self.opening_length
        policies = [layout.kv] * count if kv is None else [guarded(each, ahead) for each in policies_of(kv, count)]
        layouts = [replace(layout, kv=policy) for policy in policies]
        return self.state_type(
            new_layers(self.blocks, layouts),
            layout,
            vocab_size=self.config.vocab_size,
            fingerprint=lambda: self.fingerprint,
            model_name=served_name(self.name) if self.name else "",
            user=weakref.ref(self),
            encode=None if self.encoder is None else lambda source: self.network.encoded(source),
            frequency_key=lambda length: self.network.frequency_key(length),
            hidden_size=self.config.hidden_size,
            axes=self.network.has_axes,
            whole_pictures=self.network.whole_pictures,
            opening=None if self.network.opening is None else self.network.opening.opening,
        )

    def _refuse_other(self, state: State) -> None:
        """Refuse the state of another model, whose layers may have the shapes of this one's.

        One with the same fingerprint is no other: a copy, or the same checkpoint loaded again.
        """
        if not isinstance(state, State):
            raise StateError(f"{state!r:.80} is not a state of lmstate; make one with new_state")
        if type(state) is not self.state_type:
            raise StateError("the state is of this model over another number of processes: move its rows by snapshots")
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
        """Number of learned position embeddings; None: any position will do."""
        return self.network.max_positions

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
            return self._tree(token_rows(tokens, self.config.vocab_size), state, logits or "all", commit, parents)
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
        """Features without the head: the stream behind the last block, float32 `[rows, T, E]`, zero at padding.

        tokens, state, commit, errors: as of a call. `model.logits(hidden)` gives the logits; `lmstate.ops.norm(hidden,
        model.norm)` what transformers calls the last hidden state.

        inputs: float32 `[rows, T, E]`, the stream in front of block `start` (a traced output of the block before, say),
        which stands in for what the tokens' embeddings would have become; `start` may be the number of blocks. A state
        is then only read, and nothing is left pending: the blocks before `start` have not seen these tokens. A block
        that shares the keys of an earlier one (Gemma 3n, Gemma 4) cannot go without it: StateError.
        """
        if inputs is None:
            if start:
                raise StateError(f"hidden(start={start}) was asked for without inputs; give the stream in front of it")
            return self._features(tokens, state, commit, self._run)
        start, ids = whole_number(start, "start"), token_rows(tokens, self.config.vocab_size)
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
        ids, commit = token_rows(tokens, self.config.vocab_size), flag(commit, "commit")
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

    # ---- drafts of its own heads

    def has_heads(self, state: State) -> bool:
        """Whether a state of this model has layers of its multi-token prediction heads."""
        return len(state.layers) > len(self.blocks)

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
        return draft_ahead(self.heads, self.norm, state, state.layers[len(self.blocks) :], last, depth)

    # ---- generation

    generate = generate
    stream = stream
    transcribe = transcribe
    chat = chat
    embeddings = embeddings

    @property
    def grammars(self) -> GrammarCompiler:
        """The compiler of constraints on its answers. Raises `StateError` if the model has no tokenizer."""
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.config.vocab_size)
        return self._grammars

    @property
    def replay(self) -> Replay:
        """The tokens of answers that `chat` gave, by their conversations."""
        if self._replay is None:
            self._replay = Replay()
        return self._replay


def _shown(value: object) -> str:
    """A tensor by its dtype and shape, anything else as it is, for messages."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
