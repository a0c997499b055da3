"""Multi-token prediction heads draft in the engine: no answer changes, and they know each row wherever it came from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import lmstate
from lmstate.engine.memory import Preempted
from lmstate.speculation import Draft, HeadsDrafter, Speculator
from tests.engine.test_batching import paused, prompt
from tests.engine.test_drafts import Knowing, asked, mixed, same
from tests.engine.test_prefixes import ask, check
from tests.heads.zoo import pair
from tests.speculation.drafters import always
from tests.zoo import VOCAB

CASES = ["deepseek_v3-two", "qwen3_next", "mimo_v2_flash", "glm4_moe"]


def headed(case: str) -> lmstate.Model:
    return replace(pair(case).ours, eos_ids=frozenset({2}))


class Watched(HeadsDrafter):
    """Notes what the heads draft for which text, and proposes what an oracle knows instead, for most rows."""

    def __init__(self, model: lmstate.Model, wholes: Sequence[Sequence[int]] = (), right: float = 0.8) -> None:
        super().__init__(model, model.new_state())
        self.own = model
        self.oracle = Knowing(wholes, right)
        self.random = random.Random(1)
        self.noted: dict[tuple[int, ...], tuple[int, ...]] = {}

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        super().observe(rows, accepted)
        self.oracle.observe(rows, accepted)

    def forget(self, row: int) -> None:
        super().forget(row)
        self.oracle.forget(row)

    def propose(self, rows: Sequence[int], depth: int) -> list[Draft]:
        drafts = super().propose(rows, depth)
        for row, draft in zip(rows, drafts):
            self.noted[tuple(self.oracle.rows[row])] = draft.tokens
        known = self.oracle.propose(rows, depth)
        return [own if self.random.random() < 0.3 else Draft(tuple(other)) for own, other in zip(drafts, known)]

    def check(self) -> None:
        """Every draft is what the heads say of the text alone."""
        assert self.noted
        for text, tokens in self.noted.items():
            state = self.own.new_state()
            self.own([list(text[:-1])], state)
            expected = self.own.draft_ahead(state, {0: text[-1]}, len(tokens) or 1)[0].tokens
            shared = min(len(tokens), len(expected))  # how far depends on how sure the batch is
            assert tokens[:shared] == expected[:shared] and bool(tokens) == bool(expected)


@pytest.mark.parametrize("case", CASES)
def test_a_batch_with_heads_gets_what_it_gets_without(case: str) -> None:
    """Rows that join and leave, several answers of one prompt, grammars, stops, and drafts that hold in part."""
    model = headed(case)
    requests = mixed(2)
    plain = asked(model, requests, None)
    wholes = [[*request["prompt"], *tokens] for request, one in zip(requests, plain) for tokens in one.tokens]
    drafter = Watched(model, wholes)
    drafted = asked(model, requests, always(drafter, VOCAB, depth=5))
    for one, other in zip(plain, drafted):
        same(one, other)
    assert sum(one.usage.accepted for one in drafted) > 20
    drafter.check()


@pytest.mark.parametrize("case", ["deepseek_v3-two", "qwen3_next"])
def test_rows_from_prefixes_sessions_and_a_restart_have_their_heads(case: str, tmp_path: Path) -> None:
    model, system = headed(case), prompt(80, 1)
    drafter = Watched(model)
    for start in range(2):
        speculator = always(drafter, VOCAB, depth=3)
        with lmstate.Engine(model, rows=2, store=tmp_path, draft=speculator) as engine:
            reused = 0
            for seed in range(3):
                ids = [*system, 90 + seed, *prompt(6, 20 + seed)]
                got = ask(engine, ids, 8, n=3)
                check(model, ids, got)
                reused += got.usage.reused
            assert reused >= len(system)
            session = engine.session("one")
            held = session.tokens
            for turn in range(2):
                ids = prompt(7, 10 * start + turn)
                got = session.send(ids, max_new_tokens=9, ignore_eos=True, logprobs=0).result(600)
                held = [*held, *ids]
                check(model, held, got)
                held += got.tokens[0]
            session.rewind(len(held) - 4)
            other = session.fork(f"other {start}")
            got = other.send([5, 6], max_new_tokens=6, ignore_eos=True, logprobs=0).result(600)
            check(model, [*held[:-4], 5, 6], got)
        drafter.check()
        drafter = Watched(model)


def test_a_row_that_was_taken_back_and_read_again_has_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = headed("qwen3_next")
    drafter, taken = Watched(model), []
    of = Preempted.of
    monkeypatch.setattr(Preempted, "of", staticmethod(lambda job, choice: taken.append(choice) or of(job, choice)))
    with lmstate.Engine(model, rows=3, memory=300_000, draft=always(drafter, VOCAB, depth=3)) as engine:
        go = paused(engine)
        requests = [
            (prompt(20, n), engine.submit(prompt(20, n), max_new_tokens=60, logprobs=0, ignore_eos=True))
            for n in range(4)
        ]
        go.set()
        for ids, request in requests:
            check(model, ids, request.result(600))
        numbers = engine._drafting._numbers
    assert any(choice.tokens for choice in taken), "no row was taken back; then this shows nothing"
    assert not numbers
    drafter.check()


def test_auto_drafts_with_heads_and_with_the_text() -> None:
    model = headed("glm4_moe")
    requests = [{"prompt": prompt(9, seed) * 3, "max_new_tokens": 30, "ignore_eos": True} for seed in range(4)]
    plain = asked(model, requests, None, rows=3)
    for draft in ("auto", "heads"):
        for one, other in zip(plain, asked(model, requests, draft, rows=3)):
            same(one, other)
        with lmstate.Engine(model, draft=draft) as engine:
            speculator = engine._drafting._speculator
            assert isinstance(speculator, Speculator) and isinstance(speculator.drafter, HeadsDrafter)


def test_heads_that_are_not_there_are_refused_when_the_engine_is_made() -> None:
    model = headed("glm4_moe")
    bare = replace(model, network=replace(model.network, heads=()), _fingerprint=None)
    for owner, kv in ((bare, None), (model, lmstate.kv.Recent(budget=16, sinks=2, recent=8))):
        with pytest.raises(ValueError, match="heads=True"):
            lmstate.Engine(owner, kv=kv, draft="heads")
        lmstate.Engine(owner, kv=kv, draft="auto").close()
