"""Every causal type of transformers gives the same through a StateCache as without a cache, or is refused by it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lmstate.errors import UnsupportedError
from lmstate.integrations.transformers import StateCache
from tests.integrations.causal_types import OUTSIDE, REFUSED, TYPES, small
from tests.integrations.models import call, text
from tests.sweeps import sampled
from tests.zoo import randomize

CUTS = (0, 30, 31, 32, 37, 50, 51, 60)  # a prompt past every window, single tokens, several at once
RUN = [name for name in TYPES if name not in (*OUTSIDE, *REFUSED)]
SUITE = (
    "dory", "dots3_note_text", "glm_moe_dsa", "inkling2_loop_text", "minimax_m3_vl_text", "qwen4_exp_text", "roberta",
    "zaya",
)  # fmt: skip


def made(name: str) -> Any:
    """A small random model of a type."""
    torch.manual_seed(0)
    config = small(name)
    config.pad_token_id, config.eos_token_id = 0, 2
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    for module in model.modules():
        if "time_step_limit" in vars(module):  # the forward of one token ignores it
            module.time_step_limit = (0.0, float("inf"))
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", sampled(RUN, [name for name in SUITE if name in RUN]))
def test_any_cut_fork_file_rewind_and_draft_gives_the_text_fed_whole(name: str, tmp_path: Path) -> None:
    model, ids = made(name), text(60, rows=2)
    with torch.no_grad():
        whole = model(ids).logits

    def goes_on(cache: StateCache, *cuts: int) -> None:
        for start, stop in itertools.pairwise(cuts):
            assert cache.get_seq_length() == start
            same(call(model, ids[:, start:stop], cache), whole[:, start:stop])

    cache = StateCache(model)
    goes_on(cache, *CUTS)
    cache.rewind(to=44)
    goes_on(cache, 44, 60)
    cache = StateCache(model)
    goes_on(cache, 0, 40)
    cache.save(tmp_path / "cache")
    forked = cache.fork(2)
    call(model, text(5, rows=4, seed=2), forked)
    goes_on(cache, 40, 60)
    goes_on(StateCache.load(tmp_path / "cache", model), 40, 60)
    forked.batch_select_indices([0, 2])
    forked.rewind(to=25)
    goes_on(forked, 25, 60)
    prompt = ids[:1, :9].repeat(1, 5)
    asked = {"max_new_tokens": 12, "do_sample": False}
    drafted = model.generate(prompt, past_key_values=StateCache(model), prompt_lookup_num_tokens=4, **asked)
    assert torch.equal(drafted, model.generate(prompt, **asked))
    if model._supports_attention_backend:
        model.set_attn_implementation("lmstate")
        goes_on(StateCache(model), *CUTS)


def same(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in TYPES if name in REFUSED])
def test_what_would_not_fit_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="run it without one"):
        StateCache(made(name))
