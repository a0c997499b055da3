"""Multi-token prediction heads at work: they read every step after the model, and draft ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lmstate.errors import PendingError
from lmstate.models.heads.assistant import AssistantHead
from lmstate.models.heads.block_head import BlockHead
from lmstate.models.heads.head import DraftHead, parts
from lmstate.ops import Norm
from lmstate.speculation.heads_drafter import AheadDraft
from lmstate.state import CompositeState, LayerState, State, Step
from lmstate.state.layers.delayed import DelayedState
from lmstate.state.layers.last_input import LastInputState
from lmstate.state.media import Spans

DOUBTFUL = 0.05  # a batch whose drafts are all no more probable than this drafts no further


def read(
    heads: Sequence[DraftHead],
    norm: Norm,
    stream: Tensor,
    tokens: Tensor,
    step: Step,
    caches: Sequence[LayerState],
    tapped: Sequence[Tensor] = (),
) -> None:
    """Have each head read a step, so that its layer state is ready to draft from.

    norm: the model's last; stream: float32 `[R, T, E]` after its blocks; tokens: int64 `[R, T]`; caches: the heads';
    tapped: the stream at the taps of the first head.
    """
    hidden = heads[0].reads(stream, norm, tapped)
    for head, cache in zip(heads, caches, strict=True):
        if isinstance(head, AssistantHead):
            assert isinstance(cache, LastInputState)
            cache.advance(hidden, step)
            continue
        if isinstance(head, BlockHead):
            assert isinstance(cache, CompositeState)
            head.read_context(hidden, step, cache.members)
            continue
        tail, blocks = parts(cache)
        before = tail.advance(hidden, step)
        if head is heads[-1]:
            head.remember(before, tokens, step, blocks)
        else:
            hidden = head.handed_on(head.stream(before, tokens, step, blocks))


def planned_draft(
    heads: Sequence[DraftHead], state: State, last: Mapping[int, int], depth: int, device: torch.device
) -> DraftedAhead:
    """Drafts to make, for `run_draft`, see `Model.draft_ahead`. Raises `PendingError`."""
    if any(state.pending):
        raise PendingError(f"cannot draft: the rows have {state.pending} pending tokens; call commit or discard first")
    layout, lengths, (held, media) = state.layout, state.lengths, state.in_layers()
    depth = depth if len(heads) == 1 else min(depth, len(heads))
    counts = [0] * state.rows
    for row in last:
        ready = lengths[row] and not state.rewind_cost(row, lengths[row])
        room = [limit - held[row] for limit in (layout.capacity, layout.max_positions) if limit is not None]
        counts[row] = max(0, min([depth, *room])) if ready else 0
    return DraftedAhead(last, held, counts, device, media)


def run_draft(heads: Sequence[DraftHead], state: State, caches: Sequence[LayerState], drafted: DraftedAhead) -> None:
    """Draft with the heads, whose layer states are `caches`. One head drafts any number of tokens, from what itself
    made of the ones before; of several each drafts one."""
    if isinstance(heads[0], AssistantHead):
        _assisted(heads[0], caches[0], state.layers, drafted)
    elif isinstance(heads[0], BlockHead):
        _block(heads[0], caches[0], state.layout.capacity, drafted)
    else:
        _chain(heads[0], caches[0], drafted) if len(heads) == 1 else _each(heads, caches, drafted)


class DraftedAhead:
    """Tokens of the rows after what their state holds: the next one, and those drafted after it.

    lengths: the positions of each row as layers count them. counts: how many tokens are drafted of each at most.
    """

    decide: Callable[[Tensor], None] | None = None
    """Over several processes: overwrite a tensor with that of rank 0, whose drafts are those of all."""

    def __init__(
        self,
        last: Mapping[int, int],
        lengths: Sequence[int],
        counts: Sequence[int],
        device: torch.device,
        media: tuple[Spans, ...],
    ) -> None:
        self.lengths, self.counts, self.device, self.media = lengths, list(counts), device, media
        self.rows = list(last)
        self.tokens = torch.zeros(len(lengths), 1, dtype=torch.int64, device=device)  # [R, 1 + drafted so far]
        for row, token in last.items():
            self.tokens[row, 0] = token
        self._confidence: list[Tensor] = []
        self._reached = torch.ones(len(lengths), device=device)

    def told(self) -> tuple[list[list[int]], int]:
        """The rows with their next tokens, and how many tokens are drafted of one at most."""
        return [[row, int(self.tokens[row, 0])] for row in self.rows], max(self.counts)

    def step(self, first: int, stop: int) -> Step:
        """The step over the tokens `first .. stop - 1` of each row that drafts so far."""
        starts = tuple(length + min(first, count) for length, count in zip(self.lengths, self.counts))
        counts = tuple(max(0, min(stop, count) - first) for count in self.counts)
        ends = tuple(start + count for start, count in zip(starts, counts))
        return Step(starts, counts, self.device, ends, speculative=True, media=self.media)

    def append(self, logits: Tensor, sure: Tensor | None = None) -> bool:
        """The most likely next tokens, of logits `[R, V]`; returns whether to go on.

        sure: how sure of them the drafter is, `[R]`; None: as sure as they are probable.
        """
        best = logits.max(-1)
        sure = 1 / (logits - best.values[:, None]).exp().sum(-1) if sure is None else sure
        self.tokens = torch.cat([self.tokens, best.indices[:, None]], dim=1)
        self._confidence.append(sure)
        self._reached = self._reached * sure
        done = self.tokens.shape[1] - 1
        going = [row for row, count in enumerate(self.counts) if count > done]
        goes_on = bool(going) and bool((self._reached[going] > DOUBTFUL).any())
        if self.decide is None:
            return goes_on
        decision = torch.cat([best.indices, torch.tensor([goes_on], device=self.device)])
        self.decide(decision)
        self.tokens[:, -1] = decision[:-1]
        return bool(decision[-1])

    def drafts(self) -> dict[int, AheadDraft]:
        tokens = self.tokens[:, 1:].tolist()
        confidence = torch.stack(self._confidence, dim=1).tolist() if self._confidence else [[] for _ in self.lengths]
        counts = self.counts
        return {
            row: AheadDraft(tuple(tokens[row][: counts[row]]), tuple(confidence[row][: counts[row]]))
            for row in self.rows
        }


def _chain(head: DraftHead, cache: LayerState, drafted: DraftedAhead) -> None:
    """Draft with one head, which reads its own output: in the layer state a step of several parts, never committed."""
    tail, blocks = parts(cache)
    most = max(drafted.counts)
    try:
        blocks.reserve(drafted.step(0, most))
        before = tail.carry[0][:, None]  # [R, 1, E]
        for at in range(most):
            stream = head.stream(before, drafted.tokens[:, at:], drafted.step(at, at + 1), blocks)
            if not drafted.append(head.logits(stream[:, 0])):
                return
            before = head.handed_on(stream)
    finally:
        blocks.discard()


def _assisted(head: AssistantHead, cache: LayerState, layers: Sequence[LayerState], drafted: DraftedAhead) -> None:
    """Draft with a head that attends to the model's own `layers`, always from the position of the next token."""
    assert isinstance(cache, LastInputState)
    before, step = cache.carry[0][:, None], drafted.step(0, 1)
    for at in range(max(drafted.counts)):
        stream = head.drafting(head.joined(before, drafted.tokens[:, at:]), step, layers)
        if not drafted.append(head.logits(stream[:, 0])):
            return
        before = head.handed_on(stream)


def _block(head: BlockHead, cache: LayerState, capacity: int | None, drafted: DraftedAhead) -> None:
    """Draft with a head that fills a block at once; rows that have no room for one get no draft."""
    assert isinstance(cache, CompositeState)
    for row, length in enumerate(drafted.lengths):
        fits = capacity is None or length + head.size <= capacity
        drafted.counts[row] = min(drafted.counts[row], head.drafts) if fits else 0
    counts = tuple(head.size if count else 0 for count in drafted.counts)
    if not any(counts):
        return
    ends = tuple(length + count for length, count in zip(drafted.lengths, counts))
    step = Step(tuple(drafted.lengths), counts, drafted.device, ends, speculative=True, media=drafted.media)
    tokens = torch.full((len(counts), head.size), head.mask, dtype=torch.int64, device=drafted.device)
    tokens[:, :1] = drafted.tokens
    try:
        cache.reserve(step)
        stream = head.drafted(tokens, step, cache.members)
    finally:
        cache.discard()
    for at in range(max(drafted.counts)):
        if not drafted.append(*head.next(stream, at, drafted.tokens[:, -1])):
            return


def _each(heads: Sequence[DraftHead], caches: Sequence[LayerState], drafted: DraftedAhead) -> None:
    """Draft a token with each head, which first reads what the heads before it made of the tokens drafted so far."""
    handed_on: Tensor | None = None  # [R, n, E], of the n tokens that the head before has read
    for at, (head, cache) in enumerate(zip(heads, caches)):
        if at == max(drafted.counts):
            return
        tail, blocks = parts(cache)
        before = tail.carry[0][:, None]
        before = before if handed_on is None else torch.cat([before, handed_on], dim=1)
        stream = _run(head, blocks, before, drafted, drafted.step(0, at + 1))
        if not drafted.append(head.logits(stream[:, at])):
            return
        handed_on = head.handed_on(stream)


def _run(head: DraftHead, blocks: DelayedState, before: Tensor, drafted: DraftedAhead, step: Step) -> Tensor:
    try:
        blocks.reserve(step)
        return head.stream(before, drafted.tokens, step, blocks)
    finally:
        blocks.discard()
