"""The plain forward is differentiable, and its gradients are those of `transformers` for the same loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.models.layers.attention import Attention
from lmstate.models.layers.gated_delta_net import GatedDelta
from lmstate.models.layers.mlp import MLP
from lmstate.ops.weights.grouped import FloatWeight
from tests.zoo import pair, text

BOUND = 1e-4  # as for logits, and relative to the largest gradient of a tensor
TOKENS = 70  # several chunks of the gated delta rule, and a rest


def matched(theirs: Any, ours: Any) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
    """(what, a parameter of ours, those of theirs that it stacks along its first axis) of a Qwen3.5 model."""

    def stored(weight: Any) -> Tensor:
        assert isinstance(weight, FloatWeight)
        return weight.matrix

    yield "embedding", stored(ours.embed), [theirs.model.embed_tokens.weight]
    yield "head", stored(ours.head), [theirs.lm_head.weight]
    for index, (layer, block) in enumerate(zip(theirs.model.layers, ours.blocks)):
        mixer = block.mixer
        if isinstance(mixer, GatedDelta):
            part = layer.linear_attn
            yield f"{index}.qkvz", stored(mixer.qkvz), [part.in_proj_qkv.weight, part.in_proj_z.weight]
            yield f"{index}.gates", stored(mixer.gates), [part.in_proj_b.weight, part.in_proj_a.weight]
            yield f"{index}.out", stored(mixer.out), [part.out_proj.weight]
        else:
            assert isinstance(mixer, Attention)
            part = layer.self_attn
            yield f"{index}.qkv", stored(mixer.qkv), [part.q_proj.weight, part.k_proj.weight, part.v_proj.weight]
            yield f"{index}.out", stored(mixer.out), [part.o_proj.weight]
        assert isinstance(block.mlp, MLP)
        yield f"{index}.up", stored(block.mlp.up), [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]
        yield f"{index}.down", stored(block.mlp.down), [layer.mlp.down_proj.weight]


def test_gradients_of_a_recurrent_model_equal_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair("qwen3_5")
    ids = text(TOKENS, rows=2, seed=3)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    parameters = list(matched(theirs, ours))
    small: dict[str, list[Tensor]] = {"conv": [], "A": [], "dt_bias": []}
    blocks = list(ours.blocks)
    for index, block in enumerate(blocks):
        if isinstance(block.mixer, GatedDelta):  # small parameters are plain tensors
            leaves = {name: getattr(block.mixer, name).detach().clone().requires_grad_() for name in small}
            blocks[index] = replace(block, mixer=replace(block.mixer, **leaves))
            for name, leaf in leaves.items():
                small[name].append(leaf)
    monkeypatch.setattr(ours, "network", replace(ours.network, blocks=tuple(blocks)))
    try:
        for _, mine, _ in parameters:
            mine.requires_grad_()
        expected = loss(theirs(ids).logits)
        got = loss(ours(ids))
        torch.testing.assert_close(got, expected)
        expected.backward()
        got.backward()
        for what, mine, others in parameters:
            wanted = torch.cat([other.grad for other in others])
            assert wanted.abs().max() > 1e-5, what
            close(mine.grad, wanted, what)
        recurrent = [layer.linear_attn for layer in theirs.model.layers if hasattr(layer, "linear_attn")]
        for part, conv, A, dt_bias in zip(recurrent, *small.values()):
            close(conv.grad, part.conv1d.weight.grad[:, 0], "conv")
            close(A.grad * A.detach(), part.A_log.grad, "A_log")  # A = -exp(A_log)
            close(dt_bias.grad, part.dt_bias.grad, "dt_bias")
    finally:
        theirs.zero_grad()
        for _, mine, _ in parameters:
            mine.requires_grad_(False)
            mine.grad = None


def close(got: Tensor | None, expected: Tensor, what: str) -> None:
    assert got is not None, f"{what} has no gradient"
    torch.testing.assert_close(
        got, expected, atol=BOUND * float(expected.abs().max()), rtol=BOUND, msg=lambda text: f"{what}: {text}"
    )
