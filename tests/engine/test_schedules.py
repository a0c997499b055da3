"""Random schedules of all that can be asked of an engine, against each request alone from scratch.

`pytest --interleavings N` runs an eightieth of N a kind and setting.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import lmstate
from lmstate.engine import Completion, Request, Session
from lmstate.engine.memory import RowCost
from lmstate.engine.options import as_bytes
from lmstate.engine.tiers.folder import FolderTier
from lmstate.generation.sampling import Sampler
from lmstate.speculation import HeadsDrafter, TextDrafter
from tests.engine.alone import alone
from tests.engine.test_batching import KINDS, prompt
from tests.engine.test_tiers import Failing, insisting
from tests.heads.zoo import pair
from tests.speculation.drafters import always
from tests.zoo import VOCAB, ours

MOST = 90  # tokens of a prompt
OPERATIONS = 25
INDEX = st.integers(0, 10**6)
SUBMIT = st.tuples(
    st.just("submit"),
    INDEX,  # which earlier text it begins with
    st.floats(0, 1),  # how much of it
    st.integers(1, 20),  # new tokens
    st.integers(0, 6),  # tokens to generate
    st.sampled_from([1, 1, 1, 2, 4]),  # answers
    st.sampled_from([0.0, 0.0, 1.2]),
    st.sampled_from([0, 0, 1, -1]),
    st.sampled_from(["", "", "one", "two"]),  # sender
)
OPERATION = st.one_of(
    SUBMIT,
    SUBMIT,
    st.tuples(st.just("cancel"), INDEX),
    st.tuples(st.just("wait"), INDEX),
    st.tuples(st.just("say"), st.sampled_from("ab"), st.integers(1, 9), st.integers(1, 5)),
    st.tuples(st.just("undo"), st.sampled_from("ab")),
    st.tuples(st.just("back"), st.sampled_from("ab"), st.floats(0, 1)),
    st.tuples(st.just("fork"), st.sampled_from("ab")),
    st.tuples(st.just("restart")),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "room for all": {"memory": "1GiB"},
    "little memory": {"memory": 150_000},
    "little memory and a folder": {"memory": 150_000, "folder": FolderTier},
    "a folder that fails": {"memory": 400_000, "folder": Failing},
    "drafts at every step": {"memory": 150_000, "drafts": True},
}


@dataclass
class Asked:
    request: Request
    ids: list[int]
    sampler: Sampler
    cancelled: bool = False


class Schedule:
    def __init__(
        self, model: lmstate.Model, folder: Path, options: dict[str, Any], oracle: lmstate.Model | None = None
    ) -> None:
        """`oracle`: says what the model is to answer; the model itself if it is None."""
        self.model, self.folder, self.options = model, folder, options
        self.oracle = oracle or model
        self.asked: list[Asked] = []
        self.texts: list[list[int]] = [prompt(40, 0)]
        self.sessions: dict[str, list[int]] = {}
        self.fed = 0
        self.engine = self.made()

    def made(self) -> lmstate.Engine:
        tier = self.options.get("folder")
        store = None if tier is None else tier(self.folder, "schedule", 10**9)
        draft = None
        if self.options.get("drafts"):
            own = HeadsDrafter(self.model, self.model.new_state()) if self.model.heads else TextDrafter(reading=20)
            draft = always(own, VOCAB, depth=5)
        least = RowCost.of(self.model, self.model.new_state)(1) * 5 // 4  # some rows take much, however short they are
        memory = max(as_bytes(self.options["memory"]), least)
        return lmstate.Engine(self.model, rows=3, memory=memory, store=store, draft=draft)

    def ids(self, count: int) -> list[int]:
        self.fed += 1
        return prompt(count, 1000 + self.fed)

    def submit(
        self, index: int, part: float, new: int, count: int, n: int, temperature: float, priority: int, sender: str
    ) -> None:
        base = self.texts[index % len(self.texts)]
        ids = [*base[: round(part * min(len(base), MOST))], *self.ids(new)]
        sampler = Sampler(temperature, seed=self.fed)
        request = self.engine.submit(
            ids, max_new_tokens=count, n=n, temperature=temperature, seed=self.fed, priority=priority,
            sender=sender, logprobs=0, ignore_eos=True,
        )  # fmt: skip
        self.asked.append(Asked(request, ids, sampler))

    def cancel(self, index: int) -> None:
        if self.asked:
            one = self.asked[index % len(self.asked)]
            one.cancelled = True
            one.request.cancel()

    def wait(self, index: int) -> None:
        if self.asked:
            self.check(self.asked.pop(index % len(self.asked)))

    def say(self, name: str, new: int, count: int) -> None:
        held = self.sessions.setdefault(name, [])
        ids = self.ids(new)
        got = self.session(name).send(ids, max_new_tokens=count, ignore_eos=True, logprobs=0).result(600)
        held += ids
        self.same(got, held, Sampler())
        held += got.tokens[0]
        assert self.session(name).tokens == held
        if len(held) > MOST:
            self.back(name, 0.3)

    def session(self, name: str) -> Session:
        """The session of this name, however often a store that fails has to be asked."""
        return insisting(lambda: self.engine.session(name))

    def undo(self, name: str) -> None:
        session = self.session(name)
        try:
            insisting(session.undo)
        except lmstate.StateError:
            assert not session.tokens or name in self.sessions
        self.sessions[name] = session.tokens

    def back(self, name: str, part: float) -> None:
        held = self.sessions.setdefault(name, [])
        to = round(part * len(held))
        insisting(lambda: self.session(name).rewind(to))
        del held[to:]

    def fork(self, name: str) -> None:
        other = "ab"["ba".index(name)]
        insisting(self.session(other).close)
        insisting(lambda: self.session(name).fork(other))
        self.sessions[other] = list(self.sessions.get(name, []))

    def restart(self) -> None:
        self.end()
        self.engine = self.made()
        for name, held in self.sessions.items():
            if self.options.get("folder") is None:
                held.clear()
            assert self.session(name).tokens == held

    def end(self) -> None:
        for one in self.asked:
            self.check(one)
        self.asked.clear()
        held = self.engine.call(lambda _: (self.engine._reuse.prefixes.nbytes, self.engine._reuse.prefixes.counted()))
        assert len(set(held.result())) == 1
        stats = self.engine.stats()
        assert (stats["waiting"], stats["reading"], stats["decoding"], stats["row_bytes"]) == (0, 0, 0, 0)
        assert stats["failed"] == 0
        self.engine.close()

    def check(self, one: Asked) -> None:
        got = one.request.result(600)
        self.same(got, one.ids, one.sampler)
        assert one.cancelled or "cancelled" not in got.finished
        self.texts.append([*one.ids, *got.tokens[0]])

    def same(self, got: Completion, ids: Sequence[int], sampler: Sampler) -> None:
        assert got.logprobs is not None
        for index, (tokens, told) in enumerate(zip(got.tokens, got.logprobs)):
            expected, logprobs, _ = alone(self.oracle, ids, len(tokens), sampler, index, frozenset(), tokens)
            assert tokens == expected
            assert [entry.logprob for entry in told] == pytest.approx(logprobs, abs=1e-4)


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """What a request held is free at its end, not when Python next looks for cycles."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_schedule_gives_each_request_what_it_gets_alone(
    kind: str, setting: str, request: pytest.FixtureRequest
) -> None:
    check_schedules(ours(KINDS[kind]), SETTINGS[setting], request.config.getoption("--interleavings") // 80)


@pytest.mark.parametrize("case", ["deepseek_v3-two", "qwen3_next", "mimo_v2_flash"])
def test_any_schedule_drafted_by_heads_gives_each_request_what_it_gets_alone(
    case: str, request: pytest.FixtureRequest
) -> None:
    options = {"memory": 250_000, "folder": FolderTier, "drafts": True}
    check_schedules(pair(case).ours, options, request.config.getoption("--interleavings") // 80)


def check_schedules(
    model: lmstate.Model, options: dict[str, Any], count: int, oracle: lmstate.Model | None = None
) -> None:
    Failing.dice = random.Random(0)

    @settings(
        max_examples=max(1, count),
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],  # a schedule has threads in it, so that a shorter one need not fail as well
        suppress_health_check=list(HealthCheck),
    )
    @given(operations=st.lists(OPERATION, min_size=OPERATIONS, max_size=OPERATIONS))
    def run(operations: list[tuple]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            schedule = Schedule(model, Path(folder), options, oracle)
            for name, *arguments in operations:
                getattr(schedule, name)(*arguments)
            schedule.end()

    run()
