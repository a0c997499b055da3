"""The loss of the next token over long texts, in memory that grows with a chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate import ops
from lmstate.errors import CapacityError, StateError
from lmstate.models.model import Model
from lmstate.models.tokens import Tokens, token_rows
from lmstate.ops.weights.grouped import FloatWeight
from lmstate.state.inference_mode import ordinary_tensors
from lmstate.state.kv.policies.per_layer import Policies
from lmstate.state.validate import token_ids
from lmstate.training.chunked import hidden_states
from lmstate.training.model import ParameterModel

LOGITS = 1 << 24
"""Logits that exist at a time."""
IGNORED = -100
"""The label of a token that is not to be learned."""

Reduction = Literal["mean", "sum"]


@ordinary_tensors
def loss(
    model: Model,
    tokens: Tokens,
    chunk: int = 512,
    reduction: Reduction = "mean",
    kv: Policies | None = None,
    labels: Tokens | None = None,
    checkpoint: bool = False,
) -> Tensor:
    """Cross entropy of each next token, a scalar float32 tensor whose `backward()` fills the parameters' `.grad`.

    tokens: int64 `[R, T]`, or one list of ids a row (ragged). labels: of the same shape, what each token is to be
    learned as, -100 for not at all; by default the tokens themselves. The first of a row is never predicted.
    chunk: how many tokens of a row are computed at a time; the loss and its gradients are those of the whole rows,
    whatever it is. reduction: "mean" over the tokens that are predicted (NaN if there are none), or "sum".
    checkpoint: keep only what goes into each layer of a chunk, and compute the layer again: less memory, more time.
    kv: which keys and values attention forgets after each chunk, as in `Model.new_state`: the loss is that of a state
    which is fed in these chunks, and what is evicted is held constant, so that it does depend on `chunk`.

    Memory: keys, values, latents and carries of the whole text, once more for their gradients, and the activations of
    one chunk. Raises `StateError` for tokens or labels that do not fit, or a model without parameters, and
    `UnsupportedError` for a policy that rounds what it keeps.
    """
    if not isinstance(model, ParameterModel):
        raise StateError(
            'this model has no parameters to train: load it with lmstate.load(..., trainable=True), or trainable="lora"'
        )
    if reduction not in ("mean", "sum"):
        raise StateError(f'reduction={reduction!r} was asked for; there are "mean" and "sum"')
    ids = token_rows(tokens, model.config.vocab_size)
    limit = None if model.max_positions is None else model.max_positions - model.opening_length
    if limit is not None and max(map(len, ids)) > limit:
        raise CapacityError(
            f"a text of {max(map(len, ids))} tokens was given; the model has learned {limit} positions and knows no "
            "others: train on shorter texts"
        )
    targets = _targets(ids, labels, model.config.vocab_size)
    where = [(row, at) for row, own in enumerate(targets) for at, target in enumerate(own) if target != IGNORED]
    if not where:
        nothing = torch.zeros((), device=model.device)
        return nothing / 0 if reduction == "mean" else nothing.requires_grad_()
    hidden = hidden_states(model, ids, chunk, checkpoint, kv)  # which brings the model up to date
    rows, positions = (torch.tensor(index, device=model.device) for index in zip(*where))
    wanted = torch.tensor([targets[row][at] for row, at in where], device=model.device)
    total = next_token_loss(model, hidden[rows, positions], wanted)
    return total / len(where) if reduction == "mean" else total


def next_token_loss(model: Model, hidden: Tensor, targets: Tensor) -> Tensor:
    """The sum of `-log p(target)` over tokens: hidden float32 `[N, E]` as blocks leave them, targets int64 `[N]`.

    Of the logits `[N, V]` only some rows exist at a time. Their gradients are computed with them, so that backward
    computes nothing again.
    """
    shared = model.norm.weight, model.norm.bias, model.head.storage, model.network.head_bias
    total: Tensor = _NextTokenLoss.apply(model, hidden, targets, *shared)
    return total


class _NextTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, model: Model, hidden: Tensor, targets: Tensor, *shared: Tensor | None) -> Tensor:
        total = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
        follow = ctx.needs_input_grad[1], *ctx.needs_input_grad[3:]
        leaves = [None if one is None else one.detach().requires_grad_(need) for one, need in zip(shared, follow[1:])]
        size = max(1, LOGITS // model.config.vocab_size)
        grads = []
        with torch.set_grad_enabled(any(follow)):
            for x, wanted in zip(hidden.split(size), targets.split(size)):
                x = x.detach().requires_grad_(follow[0])
                part = F.cross_entropy(_logits(model, x, *leaves), wanted, reduction="sum")
                total += part.detach()
                if any(follow):
                    part.backward()
                    grads.append(x.grad)
        ctx.of_hidden = torch.cat([grad for grad in grads if grad is not None]) if follow[0] else None
        ctx.of_shared = [None if leaf is None else leaf.grad for leaf in leaves]
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, *of_shared = (
            None if own is None else own * grads[0] for own in (ctx.of_hidden, *ctx.of_shared)
        )  # fmt: skip
        return None, of_hidden, None, *of_shared


def _logits(
    model: Model, x: Tensor, weight: Tensor | None, bias: Tensor | None, matrix: Tensor | None, head_bias: Tensor | None
) -> Tensor:
    """`Model.logits` `[n, E]` -> `[n, V]` with other tensors in the place of its own."""
    assert weight is not None and matrix is not None
    head = FloatWeight(matrix) if isinstance(model.head, FloatWeight) else model.head
    x = ops.norm(x, replace(model.norm, weight=weight, bias=bias))
    logits = ops.linear(x, head, head_bias)
    if model.config.logit_scale != 1.0:
        logits = logits * model.config.logit_scale
    cap = model.config.logit_softcap
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _targets(ids: list[list[int]], labels: Tokens | None, vocab: int) -> list[list[int]]:
    """Label of each token: the next one of its row, `IGNORED` where none is learned."""
    if labels is None:
        return [[*row[1:], IGNORED][: len(row)] for row in ids]
    if isinstance(labels, Tensor) and (labels.ndim != 2 or labels.is_floating_point()):
        raise StateError(f"labels are {labels.dtype} {list(labels.shape)}; they must be int64 [rows, T]")
    rows = labels.tolist() if isinstance(labels, Tensor) else labels
    given = [token_ids(row, f"row {index} of the labels") for index, row in enumerate(rows)]
    if [len(row) for row in given] != [len(row) for row in ids]:
        raise StateError(
            f"labels of {[len(row) for row in given]} tokens a row were given for texts of "
            f"{[len(row) for row in ids]}; "
            f"give one a token, {IGNORED} for those that are not to be learned"
        )
    wrong = [label for row in given for label in row if label != IGNORED and not 0 <= label < vocab]
    if wrong:
        raise StateError(f"the label {wrong[0]!r:.40} was given; labels are {IGNORED} or 0 to {vocab - 1}")
    return [[*row[1:], IGNORED][: len(row)] for row in given]
