"""The visibility oracle: what each query could see is written down, and full attention under that mask must agree.

What a policy keeps is read from `State.kept` before each step; a new token sees that and the tokens of its own step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import lmstate
from lmstate.ops import FULL_CAUSAL, AttentionParams, CausalMask, RopeTables
from lmstate.ops.attention.rope import rope
from lmstate.state import CompositeState, KeyValueState, LatentState, LayerState, SharedState, Step
from tests.invariants.mirror import PROBE, bytes_held, close

Seen = list[list[set[int]]]  # [layer][kv head]: the positions that one token saw


class Watch:
    """A state beside plain lists of tokens, and of what each of them saw."""

    def __init__(self, model: lmstate.Model, kv: Any, rows: int = 1, **options: Any) -> None:
        self.model, self.kv = model, kv
        self.state = model.new_state(rows, kv=kv, **options)
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.seen: list[list[Seen]] = [[] for _ in range(rows)]
        self.layers = [i for i, layer in enumerate(self.state.layers) if attention_of(layer) is not None]

    def feed(self, ids: Sequence[Sequence[int]], accept: Sequence[int] | None = None) -> None:
        """Extend the rows; with `accept`, by a draft of which so many tokens are accepted."""
        seen = self.sight([len(new) for new in ids])
        got = self.model([list(new) for new in ids], self.state, logits="all", commit=accept is None)
        if accept is not None:
            self.state.commit(list(accept))
        for row, new in enumerate(ids):
            if new:
                tokens = self.rows[row] + list(new)
                close(got[row, : len(new)], self.expected(tokens, self.seen[row] + seen[row])[-len(new) :])
                n = len(new) if accept is None else accept[row]
                self.rows[row] += list(new)[:n]
                self.seen[row] += seen[row][:n]

    def sight(self, counts: Sequence[int]) -> list[list[Seen]]:
        """For each row, what each of its next tokens will see."""
        out = []
        for row, count in enumerate(counts):
            start = len(self.rows[row])
            kept = {layer: self.state.kept(row, layer) for layer in self.layers}
            out.append([
                [[{*head, *range(start, start + i + 1)} for head in kept.get(layer, [])]
                 for layer in range(len(self.state.layers))]
                for i in range(count)
            ])  # fmt: skip
        return out

    def rewind(self, row: int, to: int) -> None:
        self.state.rewind(row, to)
        del self.rows[row][to:], self.seen[row][to:]

    def select(self, rows: Sequence[int | None]) -> None:
        self.state.select(rows)
        self.rows = [[] if row is None else list(self.rows[row]) for row in rows]
        self.seen = [[] if row is None else list(self.seen[row]) for row in rows]

    def check(self) -> None:
        assert self.state.lengths == [len(row) for row in self.rows]
        assert sum(self.state.memory().values()) == bytes_held(self.state)
        seen = self.sight([len(PROBE)] * len(self.rows))
        got = self.model([PROBE] * len(self.rows), self.state, logits="all", commit=False)
        self.state.discard()
        for row, tokens in enumerate(self.rows):
            close(got[row], self.expected(tokens + PROBE, self.seen[row] + seen[row])[-len(PROBE) :])

    def expected(self, tokens: list[int], seen: list[Seen]) -> Tensor:
        """float32 [n, V]: full attention over the whole row, under the mask of what each token saw."""
        state, stored = self.model.new_state(1), {}
        for layer in self.layers:
            heads = len(seen[0][layer])
            mask = torch.zeros(heads, len(tokens), len(tokens), dtype=torch.bool)
            for own, one in enumerate(seen):
                for head, positions in enumerate(one[layer]):
                    mask[head, own, sorted(positions)] = True
            if isinstance(state.layers[layer], LatentState):
                state.layers[layer] = MaskedLatent(mask, FULL_CAUSAL)
                continue
            found = attention_of(state.layers[layer])
            outer = state.layers[layer]
            if isinstance(found, SharedState):
                source = stored[id(found.source)]
                masked = Masked(mask, source.sight, source)
            else:
                masked = Masked(mask, getattr(found, "mask", FULL_CAUSAL))
                stored[id(found)] = masked
            if isinstance(outer, CompositeState):
                outer.members = tuple(masked if member is found else member for member in outer.members)
            else:
                state.layers[layer] = masked
        return self.model([tokens], state, logits="all", commit=False)[0]


def attention_of(layer: LayerState) -> KeyValueState | None:
    return next((part for part in layer.leaves() if isinstance(part, KeyValueState)), None)


class Masked(KeyValueState):
    """Full attention of one step over itself, under a mask bool `[K, n, n]`, in plain torch.

    With a `source`: over that one's keys and values.
    """

    kind, lossy = "masked", False

    def __init__(self, mask: Tensor, sight: CausalMask, source: Masked | None = None) -> None:
        self.sight, self.source = sight, source
        own, stored = torch.arange(mask.shape[1])[:, None], torch.arange(mask.shape[1])
        self.distance = own - stored
        if sight.window is not None:
            mask = mask & (stored > own - sight.window)
        if sight.chunk is not None:
            mask = mask & (stored // sight.chunk == own // sight.chunk)
        self.mask = mask

    def attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        step: Step,
        params: AttentionParams,
        rotation: RopeTables | None = None,
    ) -> Tensor:
        scale, softcap, sinks, slopes, biases = params
        assert biases is None
        assert len(q) == 1
        if rotation is not None:
            q = rope(q, *rotation)
            new = None if new is None else (rope(new[0], *rotation), new[1])
        k, v = self.new = new or self.source.new
        group = q.shape[2] // k.shape[2]
        keys, values = (x.repeat_interleave(group, dim=2)[0].transpose(0, 1).double() for x in (k, v))  # [H, n, D]
        scores = q[0].transpose(0, 1).double() @ keys.mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            scores = scores - slopes.double()[:, None, None] * self.distance
        scores = scores.masked_fill(~self.mask.repeat_interleave(group, dim=0), -torch.inf)
        if sinks is not None:
            extra = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            weights = torch.cat([scores, extra], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights @ values).transpose(0, 1)[None].float()

    def reserve(self, step: Step) -> None: ...
    def commit(self, step: Step, accepted: tuple[int, ...]) -> None: ...
    def discard(self) -> None: ...
    def earliest_rewind(self, row: int, length: int) -> int:
        return 0

    def rewind(self, row: int, length: int, to: int) -> None: ...
    def select(self, rows: Sequence[int | None]) -> None: ...
    def add_row(self, changes: object) -> None: ...
    def capture(self, row: int, length: int) -> dict[str, Tensor]:
        return {}

    def restore(self, row: int, length: int, tensors: dict[str, Tensor]) -> None: ...
    def tensors(self) -> list[Tensor]:
        return []


class MaskedLatent(Masked, LatentState):
    """The same over latents and rope keys, which all heads share."""

    observed = True

    def store(self, latent: Tensor, rope_key: Tensor, step: Step) -> None:
        self.latent, self.rope_key = latent, rope_key

    def attend_latents(
        self, q_latent: Tensor, q_rope: Tensor, step: Step, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        keys = torch.cat([self.latent, self.rope_key], dim=-1)[:, :, None]
        q = torch.cat([q_latent, q_rope], dim=-1)
        return self.attend(q, (keys, self.latent[:, :, None]), step, AttentionParams(scale, sinks=sinks))
