"""A static state is a state: everything that holds for one holds for it, and nothing in it moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmstate import CapacityError, PendingError, StateError, UnsupportedError
from tests.compiled.static_mirror import CAPACITY, StaticMirror
from tests.invariants.mirror import Fault, close, failing_layer
from tests.sweeps import sampled
from tests.zoo import CASES, GROWING, SAMPLE, ours, text

STRETCHING = ("llama-dynamic", "llama-longrope", "phi3-longrope", "phimoe-longrope")
CASES_STATIC = [case for case in CASES if case not in (*STRETCHING, *GROWING)]
every_family = pytest.mark.parametrize("case", sampled(CASES_STATIC, {*CASES_STATIC} & {*SAMPLE}))
KINDS = ("llama", "mistral", "gemma3-pattern", "llama4-interleaved", "deepseek_v2", "lfm2", "qwen3_next", "zamba2")
every_kind = pytest.mark.parametrize("case", KINDS)


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()


def mirror(case: str, rows: int = 1, **options: object) -> StaticMirror:
    model = ours(case)
    return StaticMirror(model, model.decode_step, rows, **options)


@every_family
def test_steps_on_tensors_equal_the_forward_over_the_whole(case: str) -> None:
    own = mirror(case, rows=2)
    own.extend([ids(21), ids(8, 1)])
    for seed, width in enumerate([1, 1, 5, 1, 16, 1, 3]):
        own.feed([ids(width, 10 + seed), ids(width, 20 + seed)])
    own.feed([ids(6, 3), ids(6, 4)], accept=[2, 6])
    own.rewind(0, len(own.rows[0]) - 9)
    own.ragged([ids(4, 5), []], width=4)
    own.select([1, 1])
    own.feed([ids(1, 6), ids(1, 7)])
    own.check()


@every_kind
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_interleavings_of_all_that_can_be_done(case: str, data: st.DataObject) -> None:
    own = mirror(case, rows=2, rewind=data.draw(st.sampled_from([0, 4, 16])))
    kept = [(own.state.snapshot(0), list(own.rows[0]))]
    for turn in range(8):
        row, seed = data.draw(st.integers(0, 1)), 100 * turn
        room = CAPACITY - max(map(len, own.rows)) - 2
        action = data.draw(
            st.sampled_from(["feed", "feed", "draft", "extend", "ragged", "rewind", "select", "restore"])
        )
        width = data.draw(st.sampled_from([1, 2, 5, 17]))
        late = any(held.cached < len(held.tokens) for held in own.state._rows)
        if action == "rewind":
            own.rewind(row, data.draw(st.integers(0, len(own.rows[row]))))
        elif action == "select":
            own.select([data.draw(st.sampled_from([0, 1, None])) for _ in range(2)])
        elif action == "restore":
            own.restore(row, *data.draw(st.sampled_from(kept)))
        elif width <= room:
            if action == "extend" or late:
                own.extend([ids(width, seed), ids(data.draw(st.integers(0, width)), seed + 1)])
            elif action == "ragged":
                own.ragged([ids(data.draw(st.integers(0, width)), seed + i) for i in range(2)], width)
            else:
                accept = [data.draw(st.integers(0, width)) for _ in range(2)] if action == "draft" else None
                own.feed([ids(width, seed), ids(width, seed + 1)], accept)
        own.check()
        kept.append((own.state.snapshot(row), list(own.rows[row])))


@every_kind
def test_a_long_prompt_and_a_failed_one(case: str) -> None:
    own = mirror(case, rows=2, capacity=320)
    own.extend([ids(20), ids(3, 1)])
    before = own.state.memory()
    with failing_layer(own.model, len(own.model.blocks) - 1, after=True), pytest.raises(Fault):
        own.model([ids(300, 2), ids(1)], own.state)
    assert own.state.memory() == before
    own.check()
    own.extend([ids(290, 2), ids(150, 3)])
    own.check()


@every_kind
def test_a_snapshot_moves_between_static_and_growing_states(case: str) -> None:
    model, own = ours(case), mirror(case)
    own.extend([ids(40)])
    growing = model.new_state(1)
    growing.restore(0, own.state.snapshot(0))
    new = ids(3, 1)
    close(model([new], growing), own.expected(own.rows[0] + new)[-1:])
    own.rows[0] += new
    own.state.restore(0, growing.snapshot(0))
    own.check()


@every_kind
def test_a_full_row_is_left_alone_and_said_to_be_full(case: str) -> None:
    own = mirror(case, rows=2, capacity=24)
    own.extend([ids(23), ids(9, 1)])
    got = own.step(torch.tensor([[5, 6], [7, 8]]), own.state)
    assert got[0].isnan().all()
    close(got[1], own.expected(own.rows[1] + [7, 8])[-1])
    with pytest.raises(CapacityError, match="row 0 holds 23 tokens and was given 2 more"):
        own.state.commit()
    assert own.state.lengths == [23, 9] and own.state.pending == [0, 0]
    own.feed([[5], [7]])
    assert own.state.lengths == [24, 10]


@every_kind
def test_tokens_that_wait_to_be_computed_are_not_passed_over(case: str) -> None:
    own = mirror(case, rows=1)
    own.extend([ids(60)])
    own.state.queue(0, [9, 9, 9])
    own.rows[0] += [9, 9, 9]
    assert own.step(torch.tensor([[5]]), own.state).isnan().all()
    with pytest.raises(StateError, match="3 tokens of row 0 are still to be computed"):
        own.state.commit()
    own.extend([[]])
    own.feed([[5]])


def test_what_a_static_state_refuses() -> None:
    model = ours("mistral")
    with pytest.raises(StateError, match="without a capacity"):
        model.new_state(static=True)
    with pytest.raises(UnsupportedError, match="frequencies change at"):
        ours("phi3-longrope").new_state(capacity=100, static=True)
    assert ours("phi3-longrope").new_state(capacity=64, static=True).rows == 1
    for capacity in (10**15, 10**25):
        with pytest.raises(CapacityError, match="give a smaller capacity"):
            ours("llama").new_state(capacity=capacity, static=True)
    state = model.new_state(1, capacity=CAPACITY * 2, static=True)
    with pytest.raises(UnsupportedError, match="keeps the 1 that it was made with"):
        state.select([0, 0])
    with pytest.raises(CapacityError, match="at most 128 at a time"):
        model.decode_step(text(129), state)
    model(text(100), state)
    with pytest.raises(CapacityError, match="at most 128 tokens a row"):
        model(text(129), state, commit=False)
    with pytest.raises(StateError, match="2 rows of tokens"):
        model.decode_step(text(1, rows=2), state)
    with pytest.raises(UnsupportedError, match="static=True"):
        model.decode_step(text(1), model.new_state(1))
    model.decode_step(text(1), state)
    for wrong in (lambda: model.decode_step(text(1), state), lambda: model(text(1), state), lambda: state.snapshot(0)):
        with pytest.raises(PendingError):
            wrong()
    state.discard()
    assert state.lengths == [100]
    model.decode_step(text(1), state)
