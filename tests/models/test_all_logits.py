"""`logits="all"`: of a large vocabulary they are most of what a call needs, and are held once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmstate.errors import StateError
from lmstate.ops import linear
from lmstate.ops.weights.grouped import quantize
from tests.zoo import VOCAB, ours, text

LENGTH = 1100  # parts of 512, 512 and 76


class Large(TorchDispatchMode):
    """Counts the logits of at least so many elements that operations make; views and what is changed in place not."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.made = least, 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        result = call(*args, **(kwargs or {}))
        logits = isinstance(result, torch.Tensor) and result.ndim > 1 and result.shape[-1] == VOCAB
        if logits and result.numel() >= self.least:
            self.made += result.untyped_storage().data_ptr() not in given
        return result


@pytest.mark.parametrize("name", ["gemma2", "cohere", "llama"])  # a softcap, a scale, neither
@pytest.mark.parametrize("ragged", [False, True])
def test_the_logits_of_all_tokens_are_made_once(name: str, ragged: bool) -> None:
    model, ids = ours(name), text(LENGTH, rows=2).tolist()
    if ragged:
        ids[1] = ids[1][:700]
    for state in (None, model.new_state(rows=2)):
        with Large(sum(map(len, ids)) * VOCAB) as large:
            out = model(ids, state, logits="all")
        assert out is not None and large.made == 1
        for row, each in enumerate(ids):
            alone = model([each])
            assert alone is not None
            torch.testing.assert_close(out[row, : len(each)], alone[0], rtol=1e-4, atol=1e-4)
            assert not out[row, len(each) :].any()


@pytest.mark.parametrize("commit", [False, True])
def test_the_head_of_few_ragged_tokens_reads_no_padding(commit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = ours("gemma2"), text(13, rows=3).tolist()
    ids[0], ids[2] = ids[0][:1], ids[2][:4]
    read: list[int] = []
    head = type(model).logits
    monkeypatch.setattr(
        type(model), "logits", lambda self, x, out=None: (read.append(x[..., 0].numel()), head(self, x, out))[1]
    )
    out = model(ids, model.new_state(rows=3), logits="all", commit=commit)
    assert out is not None and read == [1 + 13 + 4]
    for row, each in zip(out, ids):
        assert torch.equal(row[: len(each)], model([each])[0]) and not row[len(each) :].any()


def test_a_state_keeps_the_last_logits_and_not_those_before() -> None:
    model = ours("llama")
    state = model.new_state(rows=2)
    out = model(text(20, rows=2), state, logits="all")
    for row, last in enumerate(state.last_logits()):
        assert out is not None and last is not None
        assert torch.equal(last, out[row, -1]) and last.untyped_storage().nbytes() == 4 * VOCAB


def test_gradients_reach_the_logits_of_every_part() -> None:
    model = ours("llama")
    state, ids = model.new_state(), text(600)
    head = model.head.storage
    head.requires_grad_()
    try:
        out = model(ids, state, logits="all")
        assert out is not None
        (found,) = torch.autograd.grad(out.sum(), head)
        whole = model(ids)
        assert whole is not None
        (expected,) = torch.autograd.grad(whole.sum(), head)
    finally:
        head.requires_grad_(False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["float32", "int4"])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_product_is_the_same_where_it_is_put(kind: str, rows: int) -> None:
    x, weight, bias = torch.randn(rows, 64), quantize(torch.randn(48, 64), kind), torch.randn(48)
    whole = torch.full((rows + 2, 48), 7.0)
    assert linear(x, weight, bias, out=whole[1:-1]).data_ptr() == whole[1:-1].data_ptr()
    assert torch.equal(whole[1:-1], linear(x, weight, bias)) and bool((whole[[0, -1]] == 7).all())
    with pytest.raises((ValueError, RuntimeError)):
        linear(x, weight, out=torch.empty(rows, 47))


@pytest.mark.parametrize("given", ["hi", ["hi"], [[1], "hi"]])
def test_a_text_in_place_of_tokens_is_told_how_to_become_them(given: Any) -> None:
    with pytest.raises(StateError, match="encode"):
        ours("llama")(given)


def test_what_a_tokenizer_of_transformers_gives_is_told_apart_from_a_text() -> None:
    with pytest.raises(StateError, match="input_ids"):
        ours("llama")({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]})  # type: ignore[arg-type]
