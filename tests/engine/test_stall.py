"""A long prompt holds up nobody: with a clock and costs of the test's own, so that it is the same on any machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

import lmstate
from lmstate.engine.admission import Admission
from lmstate.engine.pace import BEYOND, LATE, LEARN, Pace
from lmstate.engine.rows import RowPool
from lmstate.state.step import CHUNK
from tests.engine.alone import alone
from tests.engine.test_batching import paused, prompt
from tests.zoo import ours

CALL, TOKEN, POSITION = 10.0, 0.1, 5e-6  # milliseconds of a call, of each of its tokens, and of what each looks back on


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_prompt_of_16000_tokens_delays_no_token_of_seven_streams_beyond_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stall = 3.0
    model = ours("mamba2")
    clock = Clock()
    whole = type(model).__call__

    def call(self, tokens, state, **options):  # type: ignore[no-untyped-def]
        rows = [row for row in tokens if len(row)]
        lengths = [length for length, row in zip(state.lengths, tokens) if len(row)]
        looked = sum(POSITION * len(row) * length for row, length in zip(rows, lengths))
        clock.now += CALL + TOKEN * sum(map(len, rows)) + looked
        return whole(self, tokens, state, **options)

    monkeypatch.setattr(type(model), "__call__", call)
    monkeypatch.setattr("lmstate.engine.scheduler.perf_counter", clock)
    times: dict[lmstate.engine.Request, list[float]] = {}
    push = lmstate.engine.Request.push
    monkeypatch.setattr(
        lmstate.engine.Request, "push", lambda self, piece: (times[self].append(clock.now), push(self, piece))[1]
    )
    began: list[float] = []
    start = Admission._start
    monkeypatch.setattr(Admission, "_start", lambda self, job: (began.append(clock.now), start(self, job))[1])
    with lmstate.Engine(model, rows=8, stall=stall) as engine:
        go = paused(engine)
        for seed in range(7):  # of different lengths: chunks of all sizes are measured before, some at nobody's cost
            request = engine.submit(prompt(20 + 15 * seed, seed), max_new_tokens=10**6, ignore_eos=True)
            times[request] = []
        go.set()
        tokens = [iter(request) for request in times]
        for one in tokens:
            for _ in range(30):
                next(one)
        streams = list(times)
        long = engine.submit(prompt(128, 9) * 125, max_new_tokens=1)
        times[long] = []
        long.result(600)
        for request in streams:
            request.cancel()
            request.result(600)
    arrived, read = began[-1], times[long][0]
    usual = CALL + 7 * TOKEN
    gaps = [after - before for one in streams for before, after in pairwise(times[one]) if arrived < after <= read]
    looking = POSITION * sum(len(request.prompt) + len(times[request]) for request in streams)
    assert len(gaps) > 7 * 100
    assert max(gaps) <= stall * (usual + looking)
    # And the time that there is is used: it takes no chunks that are smaller than they need be.
    assert len(gaps) / 7 < 16000 / 20


def one(pace: Pace, at: int, left: int, *itls: float | None) -> int:
    """Tokens that a step beside rows that decode reads of one text."""
    (size,) = pace.chunks([(at, left)], True, itls or (None,))
    return size


def test_what_was_measured_at_the_beginning_of_a_text_is_not_taken_for_its_end() -> None:
    pace = Pace(3.0)
    pace.decoded(40.0, 1)

    def cost(size: int, at: int) -> float:
        return 10 + 0.2 * size + 1e-4 * size * (at + size / 2)

    for at in range(0, 4096, 128):
        for size in (8, 16, 32, 64, 128, 256):
            pace.read(40.0 + cost(size, at), [(size, at)], 0, 1)
            pace.decoded(40.0, 1)
    time = 3.0 * 40.0 / (1 + pace.late) - 40.0
    for at in (0, 4000, 12000, 16000):
        chosen = one(pace, at, 20000)
        assert cost(chosen, at) <= 1.03 * time and time < cost(chosen + 8, at)
    assert one(pace, 0, 20000) > one(pace, 16000, 20000)


def test_costs_that_change_are_followed_and_a_hiccup_is_not() -> None:
    pace = Pace(3.0)
    pace.decoded(10.0, 1)

    def read(times: int, call: float, token: float, head: float) -> int:
        for number in range(times):
            size, heads = (24, 1) if number % 5 == 0 else (one(pace, 0, 512), 0)
            pace.read(10.0 + call + token * size + head * heads, [(size, 0)], heads, 1)
            pace.decoded(10.0, 1)
        return one(pace, 0, 512)

    quiet = read(60, 2.0, 0.5, 3.0)
    most = (3.0 * 10.0 / (1 + pace.late) - 10.0 - 2.0) / 0.5  # tokens in the time that there is
    assert most - 4 <= quiet <= most * 1.02
    assert one(pace, 0, quiet) <= quiet - 4, "the last chunk has the head to pay for"
    pace.read(510.0, [(quiet, 0)], 0, 1)
    assert one(pace, 0, 512) >= 8
    assert read(60, 2.0, 0.5, 3.0) >= quiet - 4, "one chunk that took ever so long is forgotten"
    busy = read(120, 4.0, 1.0, 6.0)
    assert 4.0 + 1.0 * busy <= 20.0, "another process took half of the machine"


def test_rows_that_come_are_no_cost_of_the_chunks_beside_them() -> None:
    pace = taught(Pace(3.0))
    before = one(pace, 0, 5000)
    for _ in range(60):  # steps of twice as many rows, none without a chunk
        pace.read(20.0 + 2.0 + 0.5 * (size := one(pace, 0, 5000)), [(size, 0)], 0, 2)
    assert pace.decode is not None and 14.0 < pace.decode < 22.0
    assert one(pace, 0, 5000) > before, "there is more time where the usual gap is longer"


def test_the_part_that_99_of_100_gaps_stay_within_is_planned_with() -> None:
    pace, dice = Pace(3.0), random.Random(0)

    def gaps(times: int, late: Callable[[], float] = lambda: 0.0) -> float:
        """The part of so many gaps that took longer than the bound, where gaps are late by a part of what they were
        planned to take."""
        beyond = 0
        for _ in range(times):
            seconds = (12.0 + 0.5 * (size := one(pace, 0, 512))) * (1 + late())
            beyond += seconds > 30.0
            pace.read(seconds, [(size, 0)], 0, 1)
            pace.decoded(10.0, 1)
        return beyond / times

    def planned() -> float:
        return 12.0 + 0.5 * one(pace, 0, 512)

    pace.decoded(10.0, 1)
    step = 0.5 * 4  # sizes are multiples of four
    first, least, most = LATE
    gaps(20)
    assert planned() == pytest.approx(30.0 / (1 + first), abs=step)
    assert gaps(500) == 0 and planned() == pytest.approx(30.0 / (1 + least), abs=step)
    assert gaps(4000, lambda: dice.random() * 0.3) <= 1.5 * BEYOND, "of gaps of any lateness up to a part"
    assert 30.0 / (1 + 0.3) / 1.15 - step <= planned(), "the time is used: costs are now those of the mean"
    before = planned()
    gaps(1, lambda: 20.0)
    assert before - planned() <= 30.0 * LEARN, "a machine that stood still once tells little"
    for _ in range(20):
        gaps(1, lambda: 20.0)
        gaps(30)
    assert planned() >= 30.0 / (1 + most) - step


def test_where_no_one_waits_for_a_token_chunks_are_large() -> None:
    pace = Pace(3.0)
    assert pace.chunks([(0, 5000)], False) == [CHUNK] and pace.chunks([(0, 100)], False) == [100]
    assert pace.chunks([(0, 100), (0, 200), (7, 300), (0, 50)], False) == [100, 200, CHUNK - 300]
    pace.decoded(10.0, 1)
    assert one(pace, 0, 5000) <= 16, "nothing was measured: nobody is to wait for a guess"


@pytest.mark.parametrize(
    ("second", "answer", "expected"),
    [
        pytest.param(300, 5, ["read 20 and read 300", "decode 2"], id="both are read first"),
        pytest.param(600, 5, ["read 20 and read 364", "read 236", "decode 2"], id="in two steps"),
        pytest.param(1900, 5, ["read 20 and read 364", "read 304 and decode 1"], id="too long to wait for"),
        pytest.param(600, 1, ["read 20 and read 364", "done", "read 236"], id="nothing to gain"),
    ],
)
def test_an_answer_waits_for_a_prompt_that_came_with_it_where_that_is_short(
    second: int, answer: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, clock, seen = ours("llama"), Clock(), list[str]()
    whole, step = type(model).__call__, RowPool.step

    def call(self, tokens, state=None, **options):  # type: ignore[no-untyped-def]
        clock.now += 0.0002 * sum(map(len, tokens))
        return whole(self, tokens, state, **options)

    def forward(self, tokens, *rest, once=(), **options):  # type: ignore[no-untyped-def]
        read = [f"read {len(tokens[owner])}" for owner in once]
        decoding = len(tokens) - len(read)
        seen.append(" and ".join([*read, *([f"decode {decoding}"] if decoding else [])]))
        return step(self, tokens, *rest, once=once, **options)

    monkeypatch.setattr(type(model), "__call__", call)
    monkeypatch.setattr(RowPool, "step", forward)
    monkeypatch.setattr("lmstate.engine.scheduler.perf_counter", clock)
    monkeypatch.setattr("lmstate.engine.job.perf_counter", clock)
    finish = lmstate.engine.Request.finish
    monkeypatch.setattr(
        lmstate.engine.Request, "finish", lambda self, result: (seen.append("done"), finish(self, result))[1]
    )
    with lmstate.Engine(model, rows=8, draft=None) as engine:
        go = paused(engine)
        prompts = prompt(20, 1), prompt(second, 2)
        requests = [engine.submit(ids, max_new_tokens=answer, ignore_eos=True) for ids in prompts]
        go.set()
        got = [request.result(600).tokens[0] for request in requests]
    assert seen[: len(expected)] == expected
    assert got == [alone(model, ids, answer, ends=frozenset(), guess=one)[0] for ids, one in zip(prompts, got)]


def test_calls_that_follow_one_another_leave_others_their_steps() -> None:
    with lmstate.Engine(ours("llama"), rows=1) as engine:
        go = paused(engine)
        request = engine.submit(prompt(20, 1), max_new_tokens=8, ignore_eos=True)
        left = 1000

        def again(_: lmstate.Model) -> None:
            nonlocal left
            left -= 1
            if left and not request.done:
                engine.call(again)

        engine.call(again)
        go.set()
        request.result(600)
    assert left


def taught(pace: Pace, call: float = 2.0, token: float = 0.5, step: float = 10.0) -> Pace:
    """A pace that has measured chunks, and steps of rows that decode, of these costs."""
    pace.decoded(step, 1)
    for number in range(60):
        size = (16, 64, 128, 32)[number % 4]
        pace.read(step + call + token * size, [(size, 0)], 0, 1)
        pace.decoded(step, 1)
    return pace


def test_the_bound_is_the_larger_of_milliseconds_and_a_multiple() -> None:
    def tokens(stall: float | None, most: float | None) -> int:
        return one(taught(Pace(stall, most)), 0, 5000)

    assert tokens(None, 80.0) == tokens(3.0, 80.0) > 2 * tokens(3.0, None)
    assert tokens(12.0, 80.0) == tokens(12.0, None) > tokens(3.0, 80.0)
    assert tokens(None, 11.0) == 8, "there is no time, and the prompt goes on even so"


def test_a_request_has_a_bound_of_its_own() -> None:
    pace = taught(Pace(None, 80.0))
    usual = one(pace, 0, 5000)
    assert one(pace, 0, 5000, None, 40.0) < usual == one(pace, 0, 5000, None, 160.0)
    assert one(pace, 0, 5000, 160.0) > usual


def test_texts_share_the_time_of_a_step_in_their_order() -> None:
    pace = taught(Pace(None, 80.0))
    usual = one(pace, 0, 5000)
    assert pace.chunks([(0, 5000), (0, 5000)], True) == [usual]
    first, second = pace.chunks([(0, 20), (0, 5000)], True)
    assert first == 20 and usual - 40 < second < usual - 16
    assert pace.chunks([(0, 10), (0, 10), (0, 10)], True) == [10, 10, 10]
    assert pace.chunks([(0, 10), (0, 10)], True, (11.0,)) == [8], "the first goes on, whatever time there is"


@pytest.mark.parametrize("bound", [{"max_itl": 0}, {"max_itl": float("nan")}, {"stall": 1.0}, {"stall": float("nan")}])
def test_bounds_out_of_range_are_refused(bound: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bound))}=.* was asked for; it is above"):
        lmstate.Engine(ours("llama"), **bound)  # type: ignore[arg-type]


def test_short_prompts_share_a_step_with_the_rows_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clock, forwards = ours("llama"), Clock(), list[tuple[int, int]]()
    whole, step = type(model).__call__, RowPool.step

    def call(self, tokens, state=None, **options):  # type: ignore[no-untyped-def]
        clock.now += 0.002 + 0.0005 * sum(map(len, tokens))
        return whole(self, tokens, state, **options)

    def forward(self, tokens, *rest, once=(), **options):  # type: ignore[no-untyped-def]
        forwards.append((len(once), len(tokens) - len(once)))
        return step(self, tokens, *rest, once=once, **options)

    monkeypatch.setattr(type(model), "__call__", call)
    monkeypatch.setattr(RowPool, "step", forward)
    monkeypatch.setattr("lmstate.engine.scheduler.perf_counter", clock)
    with lmstate.Engine(model, rows=16, draft=None, max_itl=80.0) as engine:
        stream = engine.submit(prompt(64, 1), max_new_tokens=10**6, ignore_eos=True)
        tokens = iter(stream)
        for seed in range(2, 6):  # costs are measured
            engine.submit(prompt(40, seed), max_new_tokens=1).result(600)
        for _ in range(10):
            next(tokens)
        go = paused(engine)
        burst = [engine.submit(prompt(24, seed), max_new_tokens=3, ignore_eos=True) for seed in range(20, 26)]
        go.set()
        got = [request.result(600).tokens[0] for request in burst]
        stream.cancel()
        stream.result(600)
    assert max(forwards) >= (3, 1), "several were read beside a row that decodes"
    assert got == [alone(model, prompt(24, seed), 3, ends=frozenset())[0] for seed in range(20, 26)]


@pytest.mark.parametrize(("family", "together"), [("llama", True), ("llama", False), ("deepseek_v3", False)])
def test_prompts_are_read_apart_where_padding_is_computed(
    family: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, forwards = ours(family), list[tuple[int, int]]()
    if family == "llama" and not together:
        monkeypatch.setattr(type(model.network), "leaves_padding_out", False)
    elif model.network.leaves_padding_out != together:
        pytest.skip("there are no native bodies here")
    step = RowPool.step

    def forward(self, tokens, *rest, once=(), **options):  # type: ignore[no-untyped-def]
        forwards.append((len(once), len(tokens) - len(once)))
        return step(self, tokens, *rest, once=once, **options)

    monkeypatch.setattr(RowPool, "step", forward)
    with lmstate.Engine(model, rows=4) as engine:
        go = paused(engine)
        asked = {n: engine.submit(prompt(30 * n, n), max_new_tokens=9, n=2, ignore_eos=True) for n in range(1, 4)}
        go.set()
        for n, request in asked.items():
            tokens, other = request.result(600).tokens
            assert tokens == other == alone(model, prompt(30 * n, n), 9, ends=frozenset(), guess=tokens)[0]
    assert any(chunks for chunks, _ in forwards) == together
