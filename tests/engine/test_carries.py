"""An engine whose recurrences keep their carries in few bits: each answer has the bits of the request run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lmstate
from lmstate.engine import Completion
from tests.engine.test_batching import prompt
from tests.zoo import ours

SYSTEM = prompt(150, 1)  # two multiples of 64, and then some


def ask(engine: lmstate.Engine, ids: list[int], **options: Any) -> Completion:
    return engine.submit(ids, max_new_tokens=12, ignore_eos=True, logprobs=0, **options).result(600)


def check(model: lmstate.Model, ids: list[int], got: Completion, carries: int) -> None:
    state = model.new_state(carries=carries)
    logits = model([ids], state)
    for tokens, told in zip(got.tokens, got.logprobs or [], strict=True):
        assert tokens[0] == int(logits[0].argmax())
        state.rewind(0, len(ids))
        after = model([tokens], state, logits="all")[0]
        says = torch.cat([logits, after[:-1]]).log_softmax(-1)
        assert [entry.logprob for entry in told] == pytest.approx(says[range(len(tokens)), tokens].tolist(), abs=1e-6)


@pytest.mark.parametrize("carries", [16, 8])
@pytest.mark.parametrize("case", ["qwen3_next-dense", "falcon_h1"])
def test_prefixes_drafts_forks_and_sessions_change_no_answer(case: str, carries: int, tmp_path: Path) -> None:
    model = ours(case)
    with lmstate.Engine(model, rows=3, carries=carries, store=tmp_path) as engine:
        reused = []
        for seed in range(3):
            ids = [*SYSTEM, 90 + seed, *prompt(30, 20 + seed)]
            got = ask(engine, ids, n=2)
            check(model, ids, got, carries)
            reused.append(got.usage.reused)
        assert reused == [0, 0, 128]  # they differ at 150, and the second left a carry at 128
        requests = [engine.submit(ids[: 150 + n], max_new_tokens=9, ignore_eos=True, logprobs=0) for n in (1, 7, 20)]
        for n, request in zip((1, 7, 20), requests):
            check(model, ids[: 150 + n], request.result(600), carries)
        first = ask(engine, ids[:40], session="one")
        second = ask(engine, prompt(30, 5), session="one")
        check(model, [*ids[:40], *first.tokens[0], *prompt(30, 5)], second, carries)
        said = list(engine.session("one").tokens)
    for other in (carries, 32):
        with lmstate.Engine(model, carries=other, store=tmp_path) as engine:
            found = engine.explain([*SYSTEM, 98, 3]).reused
            assert found == (128 if other == carries else 0), "states of other bits go by another name"
            assert engine.session("one").tokens == said, "a session is a text, which is read again"
            answer = ask(engine, new := prompt(9, other), session="one")
            check(model, [*said, *new], answer, other)
            said += [*new, *answer.tokens[0]]
            ids = [*SYSTEM, 98, 3, 4]
            check(model, ids, ask(engine, ids), other)


@pytest.mark.parametrize("case", ["llama", "lfm2"])
def test_a_model_that_sums_nothing_goes_on_from_what_it_stored_with_other_carries(case: str, tmp_path: Path) -> None:
    model, tokens = ours(case), []
    for carries in (32, 8, 16):
        with lmstate.Engine(model, carries=carries, store=tmp_path) as engine:
            assert engine.session("one").tokens == tokens
            tokens = [*tokens, *SYSTEM[:9], *ask(engine, SYSTEM[:9], session="one").tokens[0]]


def test_what_is_kept_inside_of_a_prompt_takes_as_many_bits() -> None:
    model, held = ours("mamba2"), {}
    for carries in (32, 8):
        with lmstate.Engine(model, carries=carries) as engine:
            for seed in range(2):
                ask(engine, [*SYSTEM, 90 + seed, *prompt(30, seed)])
            nodes = {node.end: node for _, node in engine._reuse.prefixes.nodes() if node.carry is not None}
            at = 128 if carries == 8 else len(SYSTEM)
            carry = nodes[at].carry
            assert carry is not None
            held[carries] = sum(part.nbytes for layer in carry.layers for name, part in layer.items() if name != "conv")
    assert held[8] == held[32] * 33 / 128
