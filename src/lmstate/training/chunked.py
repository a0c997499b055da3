"""The forward of long texts chunk by chunk, and its backward from the last chunk to the first.

Between the two only what is at the borders is kept: keys, values and latents, and the carries. A chunk's activations
exist while it is its turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from lmstate.errors import StateError, UnsupportedError
from lmstate.models.model import Model
from lmstate.models.stack import run_eager
from lmstate.models.tokens import Tokens, token_rows
from lmstate.ops import dispatch
from lmstate.state import Layout, MediaSpan, Step
from lmstate.state.inference_mode import ordinary_tensors
from lmstate.state.kv.policies.per_layer import Policies
from lmstate.state.validate import whole_number
from lmstate.training.evicting import StreamEvicting, StreamEvictingLatents
from lmstate.training.model import ParameterModel
from lmstate.training.streams import StreamAttention, StreamCarry, StreamLatents, follow, simple, stream_layers


class Tape:
    """Texts of several rows, cut into chunks, and what layers remember of them."""

    def __init__(
        self, model: Model, ids: Sequence[Sequence[int]], chunk: int, checkpoint: bool, kv: Policies | None
    ) -> None:
        self.ids, self.chunk, self.checkpoint = ids, chunk, checkpoint
        self.lengths = [len(row) for row in ids]
        self.width = max(self.lengths)
        self.layout = Layout(
            len(ids), model.device, model.dtype, self.width, rewind=0, chunk=chunk, max_positions=model.max_positions
        )
        self.layers = stream_layers(model.blocks, self.layout, kv)
        self.parts = simple(self.layers)

    def steps(self) -> list[tuple[int, Step]]:
        """Each chunk's first position, and its step."""
        steps = []
        for first in range(0, self.width, self.chunk):
            counts = tuple(min(max(length - first, 0), self.chunk) for length in self.lengths)
            starts = tuple(min(first, length) for length in self.lengths)
            step = Step(starts, counts, self.layout.device, tuple(self.lengths), chunk=self.chunk)
            steps.append((first, step))
        return steps

    def forward(self, model: Model) -> Tensor:
        """float32 `[R, T, E]`: what the head reads. Padding is zero."""
        out = torch.zeros(len(self.ids), self.width, model.config.hidden_size, device=self.layout.device)
        with dispatch.references():
            for chunk, (first, step) in enumerate(self.steps()):
                self._enter(chunk)
                out[:, first : first + step.width] = self._hidden(model, first, step)
            self._clear()
        padding = torch.arange(self.width) >= torch.tensor(self.lengths)[:, None]
        return out.masked_fill_(padding[..., None].to(out.device), 0.0)

    def backward(self, models: Iterator[Model], grad: Tensor) -> None:
        """Add to the gradients of all leaves that `models` are made of; each is used for one chunk."""
        padding = torch.arange(self.width) >= torch.tensor(self.lengths)[:, None]
        grad = grad.masked_fill(padding[..., None].to(grad.device), 0.0)
        carried: list[Sequence[Tensor | None]] | None = None
        for part in self.parts:
            if isinstance(part, StreamAttention | StreamLatents | StreamEvicting | StreamEvictingLatents):
                part.past.forget()  # of an earlier backward through the same text
        for chunk, (first, step) in reversed(list(enumerate(self.steps()))):
            model = next(models)
            follow(self.layers, model.blocks, self.layout)
            self._enter(chunk)
            outputs: list[Tensor] = [self._hidden(model, first, step)]
            grads: list[Tensor | None] = [grad[:, first : first + step.width]]
            scans = [part for part in self.parts if isinstance(part, StreamCarry)]
            for scan, later in zip(scans, carried or ()):
                outputs += scan.end
                grads += later
            pairs = [(out, g) for out, g in zip(outputs, grads) if g is not None and out.requires_grad]
            torch.autograd.backward([out for out, _ in pairs], [g for _, g in pairs])
            carried = [[part.grad for part in scan.start] for scan in scans]
            self._clear()

    def _enter(self, chunk: int) -> None:
        for part in self.parts:
            if isinstance(part, StreamCarry | StreamEvicting | StreamEvictingLatents):
                part.enter(chunk)

    def _clear(self) -> None:
        for part in self.parts:
            if isinstance(part, StreamAttention | StreamLatents | StreamEvicting | StreamEvictingLatents | StreamCarry):
                part.clear()

    def _hidden(self, model: Model, first: int, step: Step) -> Tensor:
        rows = [row[first : first + step.width] for row in self.ids]
        tokens = torch.tensor([[*row, *[0] * (step.width - len(row))] for row in rows], device=self.layout.device)
        if (opening := model.network.opening) is not None:
            media = (MediaSpan(0, opening.opening.media),)
            step = replace(step, media=(media,) * step.rows, extras={}, _cached={})
        x, blocks = model.network.embedded(tokens, step), model.network.blocks_of(step)
        if opening is not None and torch.is_grad_enabled() and not x.requires_grad:
            x = x.requires_grad_()  # a gradient is to reach the past, where all that is learned is
        if self.checkpoint and torch.is_grad_enabled():
            for block, layer in zip(blocks, self.layers):
                x = recompute(block, x, step, layer, use_reentrant=False, preserve_rng_state=False)
        else:
            x = run_eager(blocks, x, step, self.layers)
        return x if model.network.exit is None else model.network.exit(x)


class _Hidden(torch.autograd.Function):
    """`Tape.forward` as a function of parameters."""

    @staticmethod
    def forward(ctx: Any, model: ParameterModel, tape: Tape, *parameters: Tensor) -> Tensor:
        ctx.model, ctx.tape, ctx.version = model, tape, model.version
        return tape.forward(model)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.model.version != ctx.version:
            raise StateError(
                "backward was asked for, and the weights have changed since the loss was computed; step the optimizer "
                "after backward, or compute the loss again"
            )
        with torch.enable_grad(), dispatch.references(), ctx.model.apart() as (leaves, models):
            ctx.tape.backward(models, grads[0])
        own = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None  # autograd takes a gradient without another holder, and copies any other
        return None, None, *own


@ordinary_tensors
def hidden_states(
    model: ParameterModel,
    ids: Tokens,
    chunk: int = 512,
    checkpoint: bool = False,
    kv: Policies | None = None,
) -> Tensor:
    """Hidden states float32 `[R, T, E]` before the last norm and the head, as a function of `model.parameters()`.

    Options are those of `loss`.
    """
    chunk, ids = whole_number(chunk, "chunk"), token_rows(ids, model.config.vocab_size)
    if chunk < 1:
        raise StateError(f"chunk={chunk} was asked for; a chunk has at least one token")
    model.refresh()
    ahead = model.opening_length
    if kv is not None and ahead:
        raise UnsupportedError(
            "kv=... was asked for with learned positions in front of each text; train them without a policy"
        )
    tape = Tape(model, [[*[0] * ahead, *row] for row in ids], chunk, checkpoint, kv)
    hidden: Tensor = _Hidden.apply(model, tape, *model.parameters())
    return hidden[:, ahead:]
