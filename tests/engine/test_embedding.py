"""Vectors of texts: the same however a text is cut, and beside other requests."""

from __future__ import annotations

from concurrent.futures import CancelledError

import pytest
import torch

from lmstate import ops
from lmstate.engine import Engine, EngineClosed
from lmstate.models.embeddings import EMBED_CHUNK, POOLINGS
from tests.engine.test_batching import paused, prompt
from tests.zoo import ours


@pytest.mark.parametrize("case", ["llama", "qwen3_next-dense"])
def test_a_vector_is_the_pooled_hidden_states(case: str) -> None:
    model, ids = ours(case), prompt(200, 4)
    with torch.no_grad():
        hidden = ops.norm(model.hidden([ids], model.new_state())[0], model.norm)
    expected = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}
    with Engine(model) as engine:
        for pooling in POOLINGS:
            assert torch.equal(engine.embed(ids, pooling).result(60), expected[pooling])
        answer = engine.submit(prompt(30, 1), max_new_tokens=20, ignore_eos=True)
        assert torch.equal(engine.embed(ids).result(60), expected["mean"]), "read in smaller parts"
        assert len(answer.result(60).tokens[0]) == 20


def test_a_vector_that_is_not_wanted_any_more_is_not_read() -> None:
    model = ours("llama")
    with Engine(model) as engine:
        go = paused(engine)
        vector = engine.embed(prompt(EMBED_CHUNK + 1, 1))
        vector.cancel()
        go.set()
        with pytest.raises(CancelledError):
            vector.result(60)
        waiting = engine.embed([1, 2, 3])
        assert waiting.result(60).shape == (model.config.hidden_size,)
        for pooling, ids, said in (
            ("max", [1], "unknown pooling='max'"),
            ("mean", [], "no tokens"),
            ("mean", [-1], "-1"),
        ):
            with pytest.raises(ValueError, match=said):
                engine.embed(ids, pooling)
        go = paused(engine)
        waiting = engine.embed([1, 2, 3])
        engine._closed = True
        go.set()
        with pytest.raises(EngineClosed):
            waiting.result(60)
    with pytest.raises(EngineClosed):
        engine.embed([1])
