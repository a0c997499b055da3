"""The attention implementation "lmstate" gives what transformers' own gives, natively where it can."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from lmstate.integrations.transformers import StateCache
from lmstate.integrations.transformers.kernels import attention
from lmstate.ops import dispatch
from tests.integrations.models import DECODERS, call, decoder, text

CUTS = (0, 30, 31, 32, 37, 50, 51, 60)
RECURRENT = ("mamba", "mamba2", "falcon_mamba")
BIASED = ("inkling", "deepseek_v32")  # a bias by position, and keys that are chosen, are sdpa's


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def native_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    inner = attention.ops.attend

    def counted(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counts.append(q.shape[1])
        return inner(q, *args, **kwargs)

    monkeypatch.setattr(attention.ops, "attend", counted)
    return counts


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in RECURRENT])
@pytest.mark.parametrize("kind", (StateCache, "dynamic"))
def test_logits_equal_those_of_transformers(name: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = decoder(name), text(60, rows=2)
    make = StateCache if kind is StateCache else lambda model: DynamicCache(config=model.config)
    cache = make(model)
    expected = [call(model, ids[:, a:b], cache, a) for a, b in itertools.pairwise(CUTS)]
    counts = native_calls(monkeypatch)
    with implementation(model, "lmstate"):
        cache = make(model)
        pieces = [call(model, ids[:, a:b], cache, a) for a, b in itertools.pairwise(CUTS)]
    torch.testing.assert_close(torch.cat(pieces, 1), torch.cat(expected, 1), atol=1e-4, rtol=1e-4)
    if name not in BIASED and dispatch.choice().library is not None and model.config._attn_implementation == "sdpa":
        short = {1} if getattr(cache, "feeds_singly", False) else {1, 5}
        assert short <= set(counts), "single tokens and short pieces are to run natively"


@pytest.mark.parametrize("name", ("llama", "gemma3", "qwen3_next", "gpt_oss"))
def test_a_prompt_in_bfloat16_is_as_near_to_float32_as_that_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, ids = decoder(name), text(115, rows=2)
    model = copy.deepcopy(exact).bfloat16()

    def logits(model: Any) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        return torch.cat([call(model, ids[:, a:b], cache, a).float() for a, b in ((0, 70), (70, 115))], 1)

    want, theirs, counts = logits(exact), logits(model), native_calls(monkeypatch)
    with implementation(model, "lmstate"):
        ours = logits(model)
    assert (ours - want).abs().mean() < 1.2 * (theirs - want).abs().mean()
    library = dispatch.choice().library
    if library is not None and library.dense.rounds_to_bf16:
        assert {70, 45} <= set(counts)


@pytest.mark.parametrize("name", ("llama", "gemma3", "qwen3_next", "gpt_oss"))
def test_left_padded_batches_give_the_same_text(name: str) -> None:
    model, ids = decoder(name), text(20, rows=2)
    ids[0, :7] = 0
    settings: dict[str, Any] = {"attention_mask": (ids != 0).long(), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **settings)
    with implementation(model, "lmstate"):
        assert torch.equal(model.generate(ids, **settings, past_key_values=StateCache(model)), expected)


def test_a_gradient_is_followed() -> None:
    model, ids = decoder("llama"), text(10)
    model.zero_grad()
    with implementation(model, "lmstate"):
        model(ids).logits.square().sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(ids).logits.square().sum().backward()
    for mine, parameter in zip(ours, model.parameters()):
        torch.testing.assert_close(mine, parameter.grad)
    model.zero_grad()


@pytest.mark.parametrize(
    ("rows", "window"),
    (
        (["11110", "11111"], attention.CausalWindow(0, None)),
        (["01110", "01111"], attention.CausalWindow(1, None)),
        (["01110", "00111"], attention.CausalWindow(1, 3)),
        (["1110", "0111"], attention.CausalWindow(0, 3)),
        (["11110", "01111"], attention.CausalWindow(0, 4)),
        (["10110", "11111"], None),  # a gap
        (["11111", "11111"], None),  # sees what comes
        (["11110", "00011"], None),  # a chunk begins between them
        (["00110", "01111"], None),  # sees farther than the one before
    ),
)
def test_masks_are_read_as_what_they_say(rows: list[str], window: attention.CausalWindow | None) -> None:
    seen = torch.tensor([[c == "1" for c in row] for row in rows])[None, None]
    assert attention.causal_window(seen) == window
    assert attention.causal_window(torch.cat([seen, seen])) == window
    other = seen.clone()
    other[..., 0] = ~other[..., 0]
    assert attention.causal_window(torch.cat([seen, other])) is None


class Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def test_what_watches_operations_sees_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, ids, counts, flops = decoder("llama"), text(1), native_calls(monkeypatch), []
    for name in ("sdpa", "lmstate"):
        with implementation(model, name), torch.no_grad():
            with FlopCounterMode(display=False) as counter:
                model(ids, use_cache=False)
            flops.append(counter.get_total_flops())
            traced = torch.jit.trace(Logits(model), (ids,), check_trace=False)
            torch.testing.assert_close(traced(ids + 1), model(ids + 1).logits, atol=1e-4, rtol=1e-4)
    assert flops[0] == flops[1] > 0
    assert len(counts) == (len(model.model.layers) if dispatch.choice().library is not None else 0)
