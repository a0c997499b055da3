"""The forward of a step: the blocks over one part of it after the other, then the head where it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate.language_model import Logits
from lmstate.models.trace import Traced
from lmstate.state import State, Step
from lmstate.state.step import integers

PACKED = 64  # tokens whose logits may be held twice, with and without padding: those of drafts in a few rows

Keep = Sequence[int] | None
"""Numbers of the last tokens of each row that a part's stream is needed of; None: of all, padding included."""

Run = Callable[[Tensor, Step, State, Keep], Tensor]
"""Tokens int64 `[R, t]` of one part of a step, on the host -> the stream after the blocks, float32 `[R, t, E]`; where
some are kept only those, as `ops.last_tokens` gives them."""

Head = Callable[[Tensor, Tensor | None], Tensor]
"""Hidden states `[..., E]`, and where to put what they give (None: anywhere) -> float32 `[..., features]`."""


@dataclass(frozen=True)
class Forward:
    """The functions that a step goes through: call it for the logits, or hidden states, of a step of `state`."""

    run: Run
    head: Head | None  # None: hidden states are what is wanted
    features: int
    output: torch.device  # of the stream after the blocks, and of logits
    on_part: Callable[[int, int], None] | None
    give_way: Callable[[], None]  # see `giving_way`

    def __call__(self, ids: list[list[int]], step: Step, state: State, logits: Logits) -> Tensor | None:
        """ "last" -> float32 `[R, features]`, "all" -> `[R, T, features]`, "none" -> None, numbers k of last tokens ->
        `[R, max(k), features]`; see `Model.__call__`."""
        if logits == "all":
            return self._all(ids, step, state)
        if logits == "last":
            return self._last(ids, step, state)
        if logits == "none":
            for _ in self._parts(ids, step, state, keep=[0] * step.rows):
                pass
            return None
        return self._kept(ids, step, state, logits)

    def _all(self, ids: list[list[int]], step: Step, state: State) -> Tensor:
        """Features of every token, zero at padding; held once."""
        whole: Tensor | None = None
        pieces: list[Tensor] = []
        for offset, part, hidden in self._parts(ids, step, state):
            if whole is not None:
                self._features(hidden, whole[:, offset : offset + part.width])
                continue
            if part is step and self._packs(step):
                return self._padded(self._features(step.packed(hidden)), step)
            piece = self._features(hidden)
            if part.width == step.width or piece.requires_grad:
                pieces.append(piece)
            else:
                whole = piece.new_empty(step.rows, step.width, piece.shape[-1])
                whole[:, : part.width] = piece
                del piece
        if whole is None:
            none = torch.zeros(step.rows, 0, self.features, dtype=torch.float32, device=self.output)
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1) if pieces else none
        if step.uniform:
            return whole
        padding = (torch.arange(step.width) >= step.counts_t[:, None])[..., None].to(whole.device)
        # The stream may be what a caller gave; logits are our own.
        kept = self.head is None or whole.requires_grad
        return whole.masked_fill(padding, 0.0) if kept else whole.masked_fill_(padding, 0.0)

    def _packs(self, step: Step) -> bool:
        """Whether the head leaves padding out. It costs more than most layers do, and where drafts await a verdict rows
        with long ones are beside rows with none; a trace tells of it as of the others, padding included."""
        packs = self.head is not None and not isinstance(self.head, Traced)
        return packs and not step.uniform and step.new_tokens <= PACKED

    def _padded(self, packed: Tensor, step: Step) -> Tensor:
        """Logits `[N, V]` -> `[R, T, V]`."""
        whole = packed.new_zeros(step.rows, step.width, packed.shape[-1])
        for row, own in enumerate(packed.split(step.counts)):
            whole[row, : len(own)] = own
        return whole

    def _features(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Hidden states through the head, if there is one, in `out` if there is one."""
        if self.head is not None:
            return self.head(hidden, out)
        return hidden if out is None else out.copy_(hidden)

    def _last(self, ids: list[list[int]], step: Step, state: State) -> Tensor:
        if all(step.counts):
            return self._kept(ids, step, state, [1] * step.rows)[:, 0]
        out = torch.full((step.rows, self.features), float("nan"), dtype=torch.float32, device=self.output)
        for row, logits in enumerate(state.last_logits()):
            if logits is not None:
                out[row] = logits
        if rows := [row for row, count in enumerate(step.counts) if count]:
            out[rows] = self._kept(ids, step, state, [min(count, 1) for count in step.counts])[rows, 0]
        return out

    def _kept(self, ids: list[list[int]], step: Step, state: State, keep: Sequence[int]) -> Tensor:
        """Features of the last `keep[r]` tokens of each row, `[R, max(keep), features]`, zero after them."""
        most = max(keep)
        pieces: list[Tensor] = []  # hidden at the next of `places`
        places: list[int] = []  # among the R * most of the result
        for offset, part, hidden in self._parts(ids, step, state, keep):
            own = _kept_of(part, offset, step, keep)
            if any(own):
                width = hidden.shape[1]
                within = [row * width + at for row, n in enumerate(own) for at in range(n)]
                flat = hidden.flatten(0, 1)
                pieces.append(flat if len(within) == len(flat) else flat[within])
                for row, n in enumerate(own):
                    first = row * most + max(0, offset - (step.counts[row] - keep[row]))
                    places += range(first, first + n)
        if not pieces:
            return torch.zeros(step.rows, most, self.features, dtype=torch.float32, device=self.output)
        features = self._features(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        if places == list(range(step.rows * most)):
            return features.view(step.rows, most, -1)
        out = features.new_zeros(step.rows * most, self.features)
        out[places] = features
        return out.view(step.rows, most, -1)

    def _parts(
        self, ids: list[list[int]], step: Step, state: State, keep: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Step, Tensor]]:
        """Run the blocks over a step, part by part: (offset, part, hidden float32 `[R, t, E]`).

        keep: hidden is of the last `keep[r]` tokens of each row alone, as far as the part has them, in a part of more
        than one token a row.
        """
        if not step.width:
            return
        for offset, part in step.chunks():
            self.give_way()
            if self.on_part is not None:
                self.on_part(offset, step.width)
            width = part.width
            rows = [row[offset : offset + width] for row in ids]
            padded = integers([row + [0] * (width - len(row)) for row in rows])
            own = None if keep is None or width == 1 else _kept_of(part, offset, step, keep)
            yield offset, part, self.run(padded, part, state, own)
        if self.on_part is not None:
            self.on_part(step.width, step.width)


def _kept_of(part: Step, offset: int, step: Step, keep: Sequence[int]) -> list[int]:
    """Number of each row's tokens in a part that are among the row's last `keep[r]` of the step: the part's last."""
    return [max(0, min(n, offset + n - (count - kept))) for n, count, kept in zip(part.counts, step.counts, keep)]
