"""Salts: texts of different salts share nothing that was computed, in memory or in a store, and no answer changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import lmstate
from lmstate.engine.tiers import Tier
from tests.engine.test_batching import KINDS, paused, prompt
from tests.engine.test_prefixes import ask, check
from tests.zoo import ours

SALTS = ("", "one", "another")


@pytest.mark.parametrize("kind", ["attention", "hybrid"] if "hybrid" in KINDS else sorted(KINDS)[:2])
def test_a_text_reuses_what_was_computed_under_its_own_salt_alone(kind: str) -> None:
    model, ids = ours(KINDS[kind]), prompt(50, 1)
    with lmstate.Engine(model, rows=2) as engine:
        for salt in SALTS:
            assert engine.explain(ids, salt).matched == 0
            got = ask(engine, ids, salt=salt)
            assert got.usage.reused == got.usage.reuse.matched == 0
            check(model, ids, got)
        for salt in SALTS:
            got = ask(engine, [*ids, 7], salt=salt)
            assert got.usage.reused == len(ids)
            check(model, [*ids, 7], got)
        assert len({engine.tree(salt) for salt in SALTS}) == 1
        assert len(engine.prefixes()) == sum(len(engine.prefixes(salt=salt)) for salt in SALTS)
        assert len(engine.resident()) == 0 or len({*engine.resident()}) == len(engine.resident())
        engine.clear_prefixes("one")
        assert [engine.explain(ids, salt).reused > 0 for salt in SALTS] == [True, False, True]


def test_requests_that_arrive_together_wait_for_none_of_another_salt() -> None:
    model, ids = ours(KINDS["attention"]), prompt(80, 1)
    with lmstate.Engine(model, rows=4) as engine:
        go = paused(engine)
        asked = [engine.submit(ids, max_new_tokens=2, ignore_eos=True, salt=salt) for salt in ("one", "another") * 2]
        go.set()
        reused = [request.result(600).usage.reused for request in asked]
    assert reused[:2] == [0, 0]
    assert min(reused[2:]) > 0


def test_earlier_answers_of_a_salt_are_no_drafts() -> None:
    model, ids = ours(KINDS["attention"]), prompt(20, 1)
    with lmstate.Engine(model, rows=1, draft="text") as engine:
        corpus = engine._drafting._corpus
        assert corpus is not None
        ask(engine, ids, salt="one")
        assert len(corpus) == 0
        ask(engine, ids)
        assert len(corpus) > 0


def test_a_store_gives_a_prefix_to_its_salt_alone(tier: Callable[[], Tier]) -> None:
    model, ids = ours(KINDS["attention"]), prompt(70, 1)
    with lmstate.Engine(model, store=tier()) as engine:
        for salt in SALTS[:2]:
            ask(engine, ids, salt=salt)
    with lmstate.Engine(model, store=tier()) as engine, lmstate.Engine(model, store=tier()) as other:
        for salt, known in zip(SALTS, (True, True, False)):
            got = ask(engine, [*ids, 4], salt=salt)
            check(model, [*ids, 4], got)
            assert (got.usage.reused == len(ids)) == known
        later = prompt(70, 2)  # of which the other engine learns while it runs
        ask(engine, later, salt="one")
        assert engine.drain()
        assert ask(other, [*later, 4], salt="another").usage.reused == 0
        assert ask(other, [*later, 4], salt="one").usage.reused == len(later)


def test_a_session_goes_on_under_its_own_salt(tmp_path: Path) -> None:
    model = ours(KINDS["attention"])
    with lmstate.Engine(model, store=tmp_path) as engine:
        session = engine.session("name", salt="one")
        session.send(prompt(40, 1), max_new_tokens=3, ignore_eos=True).result(600)
        held = session.tokens
        assert engine.explain([*held, 5]).matched == 0
        with pytest.raises(ValueError, match="another salt"):
            engine.submit([1], session=session, salt="another")
        session.save(tmp_path / "file")
        fork = engine.session("name").fork("fork")
        got = fork.send([5], max_new_tokens=2, ignore_eos=True).result(600)
        assert got.usage.reused >= len(held) - 1
        loaded = engine.load_session("loaded", tmp_path / "file", "another")
        assert loaded.send([5], max_new_tokens=2, ignore_eos=True).result(600).tokens == got.tokens
    with lmstate.Engine(model, store=tmp_path) as engine:
        for salt, known in (("one", True), ("third", False)):
            session = engine.find_session("name", salt)
            assert session is not None and session.tokens == held
            got = engine.submit([5], session=session, max_new_tokens=2, ignore_eos=True).result(600)
            assert (got.usage.reused > 0) == known
            held = session.tokens
            session._engine._conversations._sessions.clear()  # as another process would find it


@pytest.mark.parametrize("salt", [None, 5, "a\nb", "x" * 129])
def test_what_is_no_salt_is_refused(salt: object) -> None:
    with lmstate.Engine(ours(KINDS["attention"])) as engine, pytest.raises(ValueError, match="salt"):
        engine.submit([1, 2], salt=salt)  # type: ignore[arg-type]
