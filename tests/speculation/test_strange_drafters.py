"""Drafters that lie, answer in odd types, draft what cannot be, or fail at any moment: no text and no state changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

import lmstate
from lmstate.generation import Sampler
from lmstate.ops import dispatch
from lmstate.speculation import Draft, ModelDrafter, Speculator
from tests.engine.test_batching import prompt
from tests.engine.test_drafts import asked, same
from tests.speculation.drafters import always
from tests.speculation.test_greedy import prompts_of, run, speaking, whole_texts
from tests.zoo import VOCAB, ours

NAN = float("nan")


class Strange:
    """Knows how texts go on, and says so in every form that a drafter may use, with what can never be in between."""

    def __init__(self, wholes: Sequence[Sequence[int]], seed: int) -> None:
        self.wholes, self.random = [list(whole) for whole in wholes], random.Random(seed)
        self.texts: dict[int, list[int]] = {}

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        for row, tokens in zip(rows, accepted):
            self.texts.setdefault(row, []).extend(tokens)

    def propose(self, rows: Sequence[int], depth: int) -> Any:
        answers = [self.draft(self.texts[row], depth) for row in rows]
        return self.random.choice([list, tuple, iter])(answers)

    def draft(self, text: list[int], depth: int) -> Any:
        rng = self.random
        whole = next((whole for whole in self.wholes if whole[: len(text)] == text), text)
        ahead = whole[len(text) :][: rng.choice([0, 1, depth, depth + 3, 99])]
        for at in range(len(ahead)):
            if rng.random() < 0.2:
                ahead[at] = rng.choice([-1, VOCAB, 2**40, rng.randrange(VOCAB)])
        sure = tuple(rng.choice([0.5, 1.0, 0.0, NAN, -3.0, 7.0, float("inf")]) for _ in ahead)
        forms: list[Any] = [
            ahead, tuple(ahead), np.array(ahead, dtype=np.int64), torch.tensor(ahead, dtype=torch.int64), iter(ahead),
            Draft(tuple(ahead)), Draft(tuple(ahead), sure), Draft(tuple(map(np.int64, ahead)), sure),
        ]  # fmt: skip
        return rng.choice(forms)


@pytest.mark.parametrize("case", ["llama", "qwen3_next-dense", "gemma3"])
@pytest.mark.parametrize("seed", range(3))
def test_strange_drafts_change_nothing(case: str, seed: int) -> None:
    model, prompts = speaking(case), prompts_of(9, 4, 17, seed=seed)
    sampler = Sampler(0.9, seed=seed) if seed % 2 else Sampler()
    options = {"max_new_tokens": 25, "params": sampler}
    plain, state = model.new_state(rows=3, capacity=40), model.new_state(rows=3, capacity=40)
    run(model, prompts, plain, None, **options)
    for depth in (None, 6):  # chosen by what pays, and always
        drafter = Strange(whole_texts(plain), seed)
        state = model.new_state(rows=3, capacity=40)
        speculator = Speculator(drafter, VOCAB, rows=1, depth=depth)  # type: ignore[arg-type]
        generation = run(model, prompts, state, speculator, **options)
        assert whole_texts(state) == whole_texts(plain)
        assert speculator.most == 20, "a step of three rows has at most 64 tokens"
        idle: list[list[int]] = [[], [], []]
        if dispatch.choice().library is not None:
            assert torch.equal(model(idle, state), model(idle, plain))  # type: ignore[arg-type]
    assert generation.report().draft.accepted > 5


WRONG: list[tuple[Any, str]] = [
    (None, "0 drafts for 2 rows"),
    ([[1]], "1 drafts for 2 rows"),
    ([[1], [2], [3]], "3 drafts for 2 rows"),
    (["ab", [1]], "whole number"),
    ([[1.0], [2]], "whole number"),
    ([[True], [2]], "whole number"),
    ([3, [2]], "list of token ids"),
    ([None, [2]], "list of token ids"),
    ([Draft((1,), drawn_from=(torch.ones(VOCAB + 1),)), []], "drawn from"),
    ([Draft((1,), drawn_from=(0.5,)), []], "drawn from"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("answer", "why"), WRONG, ids=range(len(WRONG)))
def test_what_is_no_draft_is_named_and_leaves_a_state_to_go_on_from(answer: Any, why: str) -> None:
    model, prompts = speaking("qwen3_next-dense"), prompts_of(9, 4)
    plain, state = model.new_state(rows=2), model.new_state(rows=2)
    run(model, prompts, plain, None, max_new_tokens=20)

    class Wrong(Strange):
        def propose(self, rows: Sequence[int], depth: int) -> Any:
            return answer if len(self.texts[0]) > 15 else super().propose(rows, depth)

    with pytest.raises(ValueError, match=why):
        run(model, prompts, state, always(Wrong(whole_texts(plain), 1), VOCAB, 2), max_new_tokens=20)
    check_prefix(model, prompts, state, plain)


@pytest.mark.parametrize("where", ["observe", "propose"])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_drafter_that_raises_leaves_a_state_to_go_on_from(where: str, after: int) -> None:
    model, prompts = speaking("qwen3_next-dense"), prompts_of(9, 4)
    plain, state = model.new_state(rows=2), model.new_state(rows=2)
    run(model, prompts, plain, None, max_new_tokens=20)
    drafter = failing(where, after)(whole_texts(plain), 1)
    with pytest.raises(RuntimeError, match="no idea"):
        run(model, prompts, state, always(drafter, VOCAB, 2), max_new_tokens=20)
    check_prefix(model, prompts, state, plain)


def check_prefix(model: lmstate.Model, prompts: list[list[int]], state: lmstate.State, plain: lmstate.State) -> None:
    """The state is on its way, and goes on as if nobody had drafted."""
    assert state.pending == [0, 0]
    for row, (held, whole) in enumerate(zip(whole_texts(state), whole_texts(plain))):
        assert len(prompts[row]) <= len(held) < len(whole) and held == whole[: len(held)]
        one = model.new_state()
        one.restore(0, state.snapshot(row))
        run(model, [[]], one, None, max_new_tokens=len(whole) - len(held))
        assert one.tokens(0) == whole


def failing(where: str, after: int) -> type[Strange]:
    class Failing(Strange):
        calls = 0

        def count(self, name: str) -> None:
            self.calls += name == where
            if name == where and self.calls > after:
                raise RuntimeError("no idea")

        def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
            self.count("observe")
            super().observe(rows, accepted)

        def propose(self, rows: Sequence[int], depth: int) -> Any:
            self.count("propose")
            return super().propose(rows, depth)

        def forget(self, row: int) -> None:
            self.count("forget")
            self.texts.pop(row, None)

    return Failing


REQUESTS = [
    {"prompt": prompt(9 + seed, seed), "max_new_tokens": 6 + 3 * seed, "ignore_eos": True, "logprobs": 1}
    for seed in range(5)
]


@pytest.mark.parametrize("seed", range(2))
def test_strange_drafts_change_nothing_in_an_engine(seed: int) -> None:
    model = ours("qwen3_next-dense")
    plain = asked(model, REQUESTS, None, rows=3)
    wholes = [[*request["prompt"], *one.tokens[0]] for request, one in zip(REQUESTS, plain)]  # type: ignore[misc]
    drafted = asked(model, REQUESTS, always(Strange(wholes, seed), VOCAB, depth=6), rows=3)
    for one, other in zip(plain, drafted):
        same(one, other)
    assert sum(one.usage.accepted for one in drafted) > 5


@pytest.mark.parametrize("where", ["observe", "propose", "forget"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_drafter_that_raises_anywhere_stops_no_request_of_an_engine(where: str, after: int) -> None:
    model = ours("qwen3_next-dense")
    plain = asked(model, REQUESTS, None, rows=2)
    with pytest.warns(UserWarning, match="no idea"):
        drafted = asked(model, REQUESTS, always(failing(where, after)([], 1), VOCAB), rows=2)
    for one, other in zip(plain, drafted):
        same(one, other)


@pytest.mark.parametrize("answer", [answer for answer, _ in WRONG if not isinstance(answer, list) or len(answer) != 2])
def test_what_is_no_draft_stops_no_request_of_an_engine(answer: Any) -> None:
    class Wrong(Strange):
        def propose(self, rows: Sequence[int], depth: int) -> Any:
            return answer

    model = ours("llama")
    request = {"prompt": prompt(9, 1), "max_new_tokens": 6}
    ask = [request, request]
    with pytest.warns(UserWarning, match="goes on without drafts"):
        drafted = asked(model, ask, always(Wrong([], 1), VOCAB), rows=2)
    for one, other in zip(asked(model, ask, None), drafted):
        same(one, other)


def test_a_drafter_of_fewer_rows_is_named() -> None:
    model = speaking("llama")
    drafter = ModelDrafter(model, 1, VOCAB)
    with pytest.raises(ValueError, match="1 rows was told of row 1"):
        run(model, prompts_of(3, 4), model.new_state(rows=2), always(drafter, VOCAB, 2))


def test_a_depth_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="depth is -1"):
        always(Strange([], 1), VOCAB, depth=-1)


def test_threads_that_draft_with_one_model_do_not_disturb_each_other() -> None:
    model, prompts = speaking("qwen3_next-dense"), [prompts_of(9, 4, seed=seed) for seed in range(3)]
    plain = [model.new_state(rows=2) for _ in prompts]
    states = [model.new_state(rows=2) for _ in prompts]
    for ids, state in zip(prompts, plain):
        run(model, ids, state, None, max_new_tokens=20)

    def draft(ids: list[list[int]], state: lmstate.State) -> None:
        drafter = ModelDrafter(model, 2, VOCAB)
        run(model, ids, state, always(drafter, VOCAB, 2, depth=3), max_new_tokens=20)

    threads = [Thread(target=draft, args=each) for each in zip(prompts, states)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [whole_texts(state) for state in states] == [whole_texts(state) for state in plain]
