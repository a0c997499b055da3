"""The promise, for every family: where the stream is cut never matters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.invariants.mirror import BOUND, Fault, Mirror, close, failing_layer, failing_method, whole
from tests.sweeps import sampled
from tests.zoo import CASES, ENCODERS, SAMPLE, VOCAB, conditioned, ours, text

# Steps of one token, of a convolution's and of small windows' size and one more, of a chunk and one more.
STEPS = st.sampled_from([1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 64, 65])
few = settings(max_examples=4, deadline=None, derandomize=True)
every_family = pytest.mark.parametrize("case", [*CASES, *ENCODERS])
many_families = pytest.mark.parametrize("case", sampled([*CASES, *ENCODERS], (*SAMPLE, "bart", "mbart")))


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()


@many_families
@few
@given(steps=st.lists(STEPS, min_size=2, max_size=6))
def test_any_chunking_equals_whole(case: str, steps: list[int]) -> None:
    mirror = Mirror(ours(case), deferred=True)
    for seed, step in enumerate(steps):
        mirror.extend([ids(step, seed)], logits="all" if seed % 2 else "last")
    mirror.check()


@many_families
@few
@given(steps=st.lists(st.tuples(*[st.one_of(st.just(0), STEPS)] * 3), min_size=2, max_size=5))
def test_ragged_batch_equals_each_row_alone(case: str, steps: list[tuple[int, ...]]) -> None:
    mirror = Mirror(ours(case), rows=3, deferred=True, together=False)
    for seed, widths in enumerate(steps):
        mirror.extend([ids(width, 10 * seed + row) for row, width in enumerate(widths)])
    mirror.check()


@every_family
def test_chunks_inside_one_call_equal_whole(case: str) -> None:
    model = ours(case)
    state = conditioned(model, model.new_state(2))
    state.layout = type(state.layout)(**{**vars(state.layout), "chunk": 16})
    rows = [ids(70), ids(35, seed=1)]
    got = model(rows, state, logits="all")
    for row, tokens in enumerate(rows):
        close(got[row, : len(tokens)], whole(model, tokens, state.source(row)))
    after = [whole(model, [*tokens, 5], state.source(row))[-1] for row, tokens in enumerate(rows)]
    close(model([[5], [5]], state), torch.stack(after))


@many_families
@few
@given(data=st.data())
def test_partly_accepted_draft_equals_never_drafted(case: str, data: st.DataObject) -> None:
    mirror = Mirror(ours(case), rows=3, deferred=True, rewind=data.draw(st.sampled_from([0, 4, 16])))
    mirror.extend([ids(20), ids(9, 1), []])
    for turn in range(3):
        widths = [data.draw(st.integers(0, 20)) for _ in range(3)]
        accept = [data.draw(st.integers(0, width)) for width in widths]
        mirror.draft([ids(width, 10 * turn + row) for row, width in enumerate(widths)], accept)
        mirror.check()


@many_families
@few
@given(data=st.data())
def test_rewound_equals_never_happened(case: str, data: st.DataObject) -> None:
    mirror = Mirror(ours(case), rows=2, deferred=True, rewind=8)
    mirror.extend([ids(30), ids(44, 1)])
    for turn in range(4):
        row = data.draw(st.integers(0, 1))
        length = len(mirror.rows[row])
        to = data.draw(st.one_of(st.integers(max(0, length - 8), length), st.integers(0, length)))
        if turn == 0 and length - to <= 8:
            assert mirror.state.rewind_cost(row, to) == 0, "inside the rewind window nothing is recomputed"
        mirror.rewind(row, to)
        mirror.check()
        mirror.extend([ids(data.draw(STEPS), turn + 1), []])


@every_family
def test_forked_rows_do_not_see_each_other(case: str) -> None:
    mirror = Mirror(ours(case), rows=3, deferred=True)
    mirror.extend([ids(20), ids(5, 1), ids(33, 2)])
    mirror.select([0, 0, None, 2])
    mirror.check()
    mirror.extend([ids(3, 3), ids(3, 4), ids(8, 5), []])
    mirror.rewind(0, 19)
    mirror.check()
    mirror.select([3, 1])
    mirror.check()


@every_family
def test_restored_equals_continued(case: str) -> None:
    model = ours(case)
    mirror = Mirror(model, rows=2, deferred=True)
    mirror.extend([ids(21), ids(40, 1)])
    snapshot, kept = mirror.state.snapshot(1), list(mirror.rows[1])
    mirror.extend([ids(30, 2), ids(30, 3)])
    mirror.restore(0, snapshot, kept)
    mirror.check()
    other = Mirror(model, rows=1, deferred=True, capacity=120, rewind=0)
    other.restore(0, snapshot, kept)
    other.check()
    close(model([[]], other.state)[0], other.expected(kept)[-1])
    other.extend([ids(9, 4)])
    other.check()


@every_family
def test_failed_step_is_no_step(case: str) -> None:
    model = ours(case)
    mirror = Mirror(model, rows=2, deferred=True)
    mirror.extend([ids(20), ids(7, 1)])
    before = sum(mirror.state.memory().values())
    for index in range(len(model.blocks)):
        for step in (1, 9, 90):
            with failing_layer(model, index, after=step == 9), pytest.raises(Fault):
                model([ids(step, 2), ids(1, 3)], mirror.state)
        with failing_method(mirror.state.layers[index], "reserve"), pytest.raises(Fault):
            model([ids(90, 2), []], mirror.state)
    # Less where a row's rope changes with its length: it goes back to be computed again before the step begins.
    held = sum(mirror.state.memory().values())
    assert held <= before if model.network.dynamic_ropes else held == before
    mirror.check()


@pytest.mark.parametrize("deferred", [False, True])
def test_the_oracle_can_fail(deferred: bool) -> None:
    mirror = Mirror(ours("llama"), deferred=deferred)
    mirror.extend([ids(12)])
    mirror.rows[0][3] = (mirror.rows[0][3] + 1) % VOCAB
    mirror.state._rows[0].ids[3] = mirror.rows[0][3]
    with pytest.raises(AssertionError):
        mirror.check()
    assert BOUND < 1e-3
