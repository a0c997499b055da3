"""Shapes of agents' traffic: nothing is computed twice where there is memory for all, whatever the layers are."""

from __future__ import annotations

import pytest
from bench.engine import run_trace

from tests.engine.test_batching import KINDS
from tests.zoo import ours


@pytest.mark.parametrize("name", ["conversation", "agents"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_computes_little_more_than_what_is_new(kind: str, name: str) -> None:
    run = run_trace(ours(KINDS[kind]), name, "4GiB")
    assert run.prompt_tokens > 3 * run.new, "the trace has little to reuse"
    # Layers that forget have no carry yet where a text first differs in its middle.
    assert run.computed / run.new <= (1.02 if kind in ("attention", "latent") else 1.5)
