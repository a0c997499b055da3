"""Where only last logits are asked for, what a last block does with tokens alone is done for those: nothing changes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate import kv
from lmstate.ops import Norm, Residual, dispatch
from lmstate.state.kv.policies.per_layer import Policies
from tests.heads.zoo import pair
from tests.invariants.test_to_the_bit import EACH, SIZES, model_of, text
from tests.zoo import CASES, auto, ours

pytestmark = pytest.mark.usefixtures("one_thread")
native = pytest.mark.skipif(dispatch.choice().library is None, reason="there are no native bodies")
POLICIES = [
    None, kv.Quantized(8), kv.Quantized(4), kv.Recent(budget=24), kv.H2O(budget=24, recent=8),
    kv.SnapKV(budget=24, window=8),
]  # fmt: skip
ROWS = [text(length, seed=length) for length in (50, 3, 33, 1)]
LONG = [text(length, seed=length) for length in (400, 390, 385, 386)]  # more than sublayers are fused for
MORE = [text(length, seed=length) for length in (5, 9, 1, 2)]


def check(
    model: lmstate.Model, policy: Policies | None = None, bound: float = 0.0, rows: list[list[int]] = ROWS
) -> None:
    """Logits of all, of the last, of some and of no tokens, in several parts, and then those of more tokens."""
    states = [model.new_state(len(rows), kv=policy) for _ in range(4)]
    for state in states:
        state.layout = type(state.layout)(**{**vars(state.layout), "chunk": 384 if rows is LONG else 16})
    every = model(rows, states[0], logits="all")
    last = model(rows, states[1], logits="last")
    assert every is not None and last is not None
    assert model(rows, states[2], logits="none") is None
    counts = [(0, 3, len(ids), 1)[row % 4] if len(ids) > 2 else 1 for row, ids in enumerate(rows)]
    some = model(rows, states[3], logits=counts, rewindable=[row % 2 == 0 for row in range(len(rows))])
    assert some is not None and some.shape[:2] == (len(rows), max(counts))
    for row, (ids, count) in enumerate(zip(rows, counts)):
        torch.testing.assert_close(some[row, :count], every[row, len(ids) - count : len(ids)], rtol=0, atol=bound)
        assert not some[row, count:].any()
    assert every.isfinite().all()
    expected = torch.stack([every[row, len(ids) - 1] for row, ids in enumerate(rows)])
    torch.testing.assert_close(last, expected, rtol=0, atol=bound)
    more = [*MORE, *MORE][: len(rows)]
    expected = model(more, states[0], logits="all")
    for state in states[1:]:
        torch.testing.assert_close(model(more, state, logits="all"), expected, rtol=0, atol=bound)


@native
@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
@pytest.mark.parametrize("case", EACH)
def test_to_the_bit(case: str, kind: str) -> None:
    check(model_of(case, kind))


@pytest.mark.parametrize("case", ["llama", "cohere", "gpt2", "qwen3_5", "deepseek_v3", "mamba2"])
def test_plain_code(case: str) -> None:
    check(ours(case), bound=1e-4, rows=LONG)


@native
def test_most_tokens_are_kept(tmp_path: Path) -> None:
    """Those that are kept are too few to share packed weights, all together are not: more lies between their
    products."""
    config = CASES["llama"](**{**SIZES, "intermediate_size": 1024})
    auto(config).from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = lmstate.load(tmp_path, weights="bfloat16")
    check(model, rows=[text(length, seed=row) for row, length in enumerate((2, 1, 1, 1, 1, 1))])


@native
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_under_every_policy(case: str, policy: Policies | None) -> None:
    check(model_of(case, "bfloat16"), policy)


@pytest.mark.parametrize("case", CASES)
def test_every_family(case: str) -> None:
    """Torch's products, of which plain layers are made, round by the number of rows."""
    check(ours(case), bound=1e-4)


@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3_5", "deepseek_v3"])
def test_feed_forward_parts_see_no_other_token(case: str) -> None:
    """As plain code, which tells what it sees; with native bodies behind all before it."""
    seen: list[list[int]] = []
    model = deepcopy(ours(case))
    feed = model.blocks[-1].mlp
    assert feed is not None

    def recording(x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        seen.append(list(x.shape[:-1]))
        return feed(x, norm, residual)

    *before, last = model.blocks
    model.network = replace(model.network, blocks=(*before, replace(last, mlp=recording)))
    model([text(40), text(20)], model.new_state(2), logits="last")
    assert seen == [[2, 1]]


@native
def test_heads_read_every_token() -> None:
    model = pair("qwen3_5").ours
    whole, last = model.new_state(1), model.new_state(1)
    ids = text(40)
    model([ids], whole, logits="all")
    model([ids], last, logits="last")
    drafts = [model.draft_ahead(state, {0: 7}, 3) for state in (whole, last)]
    assert drafts[0][0].tokens and drafts[0] == drafts[1]
