"""The engine over a model on the GPU: answers, drafts, prefixes, forks and restarts give what a request gets alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import lmstate
from tests.cuda import ids, needs_gpu, on_gpu
from tests.engine.alone import alone

pytestmark = needs_gpu
KINDS = ("llama", "mistral", "deepseek_v3", "qwen3_next-dense", "mamba2", "falcon_h1", "lfm2")


@pytest.mark.parametrize("draft", [None, "text"])
@pytest.mark.parametrize("case", KINDS)
def test_each_request_of_a_batch_gets_what_it_gets_alone(case: str, draft: str | None) -> None:
    model = on_gpu(case)
    prompts = [ids(length, seed) for seed, length in enumerate((3, 40, 17, 90, 5))]
    expected = [alone(model, prompt, 12, ends=frozenset())[0] for prompt in prompts]
    with lmstate.Engine(model, rows=3, draft=draft) as engine:
        for _ in range(2):  # again, from kept prefixes and with earlier answers to draft from
            requests = [engine.submit(prompt, max_new_tokens=12, ignore_eos=True) for prompt in prompts]
            assert [request.result(600).tokens[0] for request in requests] == expected
        assert engine.submit(prompts[1], max_new_tokens=1).result(600).usage.reused > 0


@pytest.mark.parametrize("case", KINDS)
def test_prefixes_are_found_in_a_store_after_a_restart(case: str, tmp_path: Path) -> None:
    model, prompt = on_gpu(case), ids(140)
    expected = alone(model, prompt, 8, ends=frozenset())[0]
    for found in (False, True):
        with lmstate.Engine(model, store=tmp_path) as engine:
            got = engine.submit(prompt, max_new_tokens=8, ignore_eos=True).result(600)
            assert got.tokens[0] == expected
            assert (got.usage.reused > 0) == found
