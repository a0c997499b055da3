"""What a caller may get wrong: a clear error, and the state goes on as if nothing had been asked."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import lmstate
from lmstate import Snapshot, State, kv
from lmstate.generation import Generation
from tests.invariants.mirror import Mirror, close
from tests.zoo import VOCAB, ours, text

CASES = ["llama", "mistral", "qwen3_next", "mamba2", "deepseek_v3"]
NO_NUMBERS: list[Any] = [
    True,
    False,
    1.0,
    1.5,
    float("nan"),
    "0",
    [0],
    torch.tensor(True),
    torch.tensor(1.0),
    torch.tensor([1]),
    {},
]
every_case = pytest.mark.parametrize("case", CASES)

Use = Callable[[State, Any], object]
NUMBERS: dict[str, Use] = {
    "tokens": lambda state, it: state.tokens(it),
    "kept, row": lambda state, it: state.kept(it, 0),
    "kept, layer": lambda state, it: state.kept(0, it),
    "queue, row": lambda state, it: state.queue(it, [5]),
    "queue, ids": lambda state, it: state.queue(1, [5, it]),
    "rewind, row": lambda state, it: state.rewind(it, 3),
    "rewind, to": lambda state, it: state.rewind(1, it),
    "rewind_cost, row": lambda state, it: state.rewind_cost(it, 3),
    "rewind_cost, to": lambda state, it: state.rewind_cost(1, it),
    "mark": lambda state, it: state.mark(it),
    "select": lambda state, it: state.select([it, 0]),
    "snapshot": lambda state, it: state.snapshot(it),
    "restore": lambda state, it: state.restore(it, state.snapshot(0)),
    "drop, row": lambda state, it: state.drop(it, 2, 4),
    "drop, start": lambda state, it: state.drop(1, it, 4),
    "drop, stop": lambda state, it: state.drop(1, 0, it),
}


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()


def held(case: str, **options: Any) -> Mirror:
    mirror = Mirror(ours(case), rows=2, **options)
    mirror.extend([ids(30), ids(9, seed=1)])
    mirror.state.mark(0)
    mirror.extend([ids(5, seed=2), []])
    return mirror


@every_case
@pytest.mark.parametrize("use", NUMBERS)
def test_what_is_no_whole_number_changes_nothing(case: str, use: str) -> None:
    mirror = held(case)
    for wrong in NO_NUMBERS + ([] if use == "select" else [None]):
        with pytest.raises(lmstate.StateError, match="must be a whole number"):
            NUMBERS[use](mirror.state, wrong)
    mirror.check()


@pytest.mark.parametrize("one", [numpy.int64(1), numpy.uint8(1), torch.tensor(1), numpy.array(1)], ids=str)
def test_whole_numbers_of_numpy_and_torch_are_plain_ones(one: Any) -> None:
    mirror = held("qwen3_next")
    state = mirror.state
    state.queue(one, [one, 5])
    mirror.rows[1] += [1, 5]
    assert state.tokens(one) == mirror.rows[1] and all(type(token) is int for token in state.tokens(1))
    state.mark(one)
    mirror.rewind(one, 9 * one)
    state.restore(one, state.snapshot(one))
    mirror.select([None, one])
    mirror.check()
    mirror.model([[], [3, 4]], state, commit=False)
    state.commit(one)
    mirror.rows[1] += [3]
    mirror.check()
    assert mirror.model.new_state(rows=one, capacity=one, rewind=one).rows == 1


def test_positions_are_written_as_numbers(tmp_path: Any) -> None:
    mirror = held("llama")
    place = torch.tensor(3)
    mirror.rewind(0, place)
    place.fill_(1)
    assert mirror.state.lengths[0] == 3
    mirror.check()
    mirror.state.snapshot(0).save(tmp_path / "row")
    assert Snapshot.load(tmp_path / "row").length == 3


def test_a_span_between_floats_is_refused_where_tokens_are_forgotten() -> None:
    state = ours("llama").new_state(kv=kv.Recent(budget=12, sinks=2))
    ours("llama")([ids(9)], state)
    with pytest.raises(lmstate.StateError, match="whole number"):
        state.drop(0, 3.0, 5.0)  # type: ignore[arg-type]
    assert state.tokens(0) == ids(9)


@every_case
def test_a_verdict_that_is_no_number_leaves_the_step_pending(case: str) -> None:
    mirror = held(case)
    draft = [ids(4, seed=5), ids(2, seed=6)]
    mirror.model(draft, mirror.state, commit=False)
    wrong = ["10", [1.9, 0], [True, 0], [None, 0], ["1", 0], [[1], 0], True, 1.0, torch.tensor([1.7, 0.0])]
    for verdict in wrong:
        with pytest.raises(lmstate.StateError, match="whole number"):
            mirror.state.commit(verdict)  # type: ignore[arg-type]
        assert mirror.state.pending == [4, 2]
    for verdict in ([1], [5, 0], [-1, 0], 5, 3, -1, numpy.int64(5), torch.tensor([1])):
        with pytest.raises(lmstate.PendingError, match="does not fit"):
            mirror.state.commit(verdict)  # type: ignore[arg-type]
        assert mirror.state.pending == [4, 2]
    mirror.state.commit(torch.tensor([3, 1]))  # type: ignore[arg-type]
    mirror.rows[0] += draft[0][:3]
    mirror.rows[1] += draft[1][:1]
    mirror.check()


# ---- token ids

GIVEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensors": lambda rows: [rows[0], rows[1]],
    "a list of a tensor": list,
    "lists of numbers of torch": lambda rows: [list(rows[0]), list(rows[1])],
    "arrays": lambda rows: list(rows.numpy()),
    "an array": lambda rows: rows.numpy(),
    "small numbers": lambda rows: rows.to(torch.uint8),
}


@pytest.mark.parametrize("given", GIVEN)
def test_tokens_are_the_state_s_own(given: str) -> None:
    """Also after the caller uses its buffer again."""
    mirror = Mirror(ours("mamba2"), rows=2, rewind=2)
    rows = text(40, rows=2)
    mirror.model(GIVEN[given](rows), mirror.state)
    mirror.rows = rows.tolist()
    mirror.state.queue(0, rows[1][:3])  # type: ignore[arg-type]
    mirror.rows[0] += mirror.rows[1][:3]
    rows[:] = 5
    assert all(type(token) is int for row in range(2) for token in mirror.state.tokens(row))
    mirror.rewind(0, 20)
    mirror.check()


@pytest.mark.parametrize("bad", [VOCAB, -1, 2**70, 1.0, 1.5, float("nan"), "0", None, True, [1], torch.tensor(True)])
def test_ids_that_are_none_change_nothing(bad: Any) -> None:
    mirror = held("qwen3_next")
    for use in (
        lambda: mirror.model([[5, bad], [5]], mirror.state),
        lambda: mirror.model([[5], [5, bad]], mirror.state, commit=False),
        lambda: mirror.model([[5, bad]]),
        lambda: mirror.state.queue(1, [5, bad]),
    ):
        with pytest.raises(lmstate.StateError):
            use()
        mirror.check()


@pytest.mark.parametrize(
    "bad",
    [
        None,
        5,
        [1, 2],
        [None, [1]],
        ["ab", "c"],
        torch.tensor([1, 2]),
        torch.tensor([[True], [False]]),
        torch.tensor([[1 + 0j], [2]]),
        [[[1]], [[2]]],
    ],
    ids=str,
)
def test_tokens_that_are_no_rows_of_ids_are_said_to_be_none(bad: Any) -> None:
    mirror = held("llama")
    with pytest.raises(lmstate.StateError):
        mirror.model(bad, mirror.state)
    mirror.check()


def test_rows_that_can_be_read_once_are_read_once() -> None:
    model = ours("llama")
    close(model(iter([iter([1, 2]), iter([3])])), model([[1, 2], [3]]))  # type: ignore[arg-type]
    mirror = held("llama")
    mirror.state.select(row for row in [1, 0])  # type: ignore[arg-type]
    mirror.rows.reverse()
    mirror.check()


@every_case
def test_a_selection_that_is_no_list_is_refused(case: str) -> None:
    mirror = held(case)
    for wrong in [1, None, 0.5]:
        with pytest.raises(lmstate.StateError, match="it takes a list"):
            mirror.state.select(wrong)  # type: ignore[arg-type]
    mirror.check()


@pytest.mark.parametrize("name", ["rows", "capacity", "rewind"])
def test_a_state_of_no_whole_size_is_not_made(name: str) -> None:
    for wrong in [1.5, 2.0, True, "1", *([None] if name != "capacity" else [])]:
        with pytest.raises(lmstate.StateError, match=f"{name} must be a whole number"):
            ours("llama").new_state(**{name: wrong})


def test_a_state_of_more_rows_than_any_memory_has_is_not_made() -> None:
    with pytest.raises(lmstate.StateError, match="at most 1048576 rows"):
        ours("llama").new_state(rows=10**9)


def test_a_word_is_no_yes_or_no() -> None:
    model = ours("llama")
    state = model.new_state(capacity=64)
    for call in [
        lambda: model.new_state(capacity=64, static="yes"),
        lambda: model([[1]], state, commit="no"),
        lambda: model([[1]], state, rewindable=None),
        lambda: model.hidden([[1]], state, commit="no"),
        lambda: model.trace([[1]], state, on=lambda *_: None, commit=1),
    ]:
        with pytest.raises(lmstate.StateError, match="must be True or False"):
            call()
    assert (state.lengths, state.pending) == ([0], [0])


def test_a_text_of_fewer_than_no_tokens_is_not_expected() -> None:
    with pytest.raises(lmstate.StateError, match="no fewer than 0"):
        ours("llama").new_state().expect(0, -1)


def test_keys_are_stored_in_no_integers() -> None:
    with pytest.raises(lmstate.StateError, match=r"kv=torch.int8\) was asked for; keys and values are stored in"):
        ours("llama").new_state(kv=torch.int8)


@pytest.mark.parametrize("counts", [[3, 1], [-1, 1]])
@pytest.mark.parametrize("case", ["llama", "mamba2"])
def test_counts_that_a_device_step_cannot_have_are_refused_by_its_verdict(case: str, counts: list[int]) -> None:
    mirror = Mirror(ours(case), rows=2, capacity=40, static=True)
    mirror.extend([ids(9), ids(4, seed=1)])
    step = torch.tensor([[7, 8], [9, 3]])
    logits = mirror.model.decode_step(step, mirror.state, torch.tensor(counts))
    assert logits[0].isnan().all() and not logits[1].isnan().any()
    with pytest.raises(lmstate.StateError, match=f"{counts[0]} tokens of row 0"):
        mirror.state.commit()
    mirror.check()


# ---- snapshots made by hand


def changed(snapshot: Snapshot) -> list[Snapshot]:
    length = snapshot.length
    layers = snapshot.layers
    fields: list[dict[str, Any]] = [
        {"cached": length + 3},
        {"cached": -1},
        {"cached": True},
        {"cached": float(length)},
        {"cached": "3"},
        {"frequency_key": 0.0},
        {"frequency_key": None},
        {"tokens": (-5,) * length},
        {"tokens": (VOCAB,) * length},
        {"tokens": (1.0,) * length},
        {"tokens": (None,) * length},
        {"tokens": snapshot.tokens[:3]},
        {"tokens": None},
        {"logits": [0.0] * VOCAB},
        {"logits": torch.zeros(VOCAB, 2)},
        {"logits": torch.zeros(VOCAB + 1)},
        {"logits": torch.zeros(())},
        {"logits": torch.zeros(VOCAB, dtype=torch.int64)},
        {"logits": "logits"},
        {"layers": (*layers[:-1], {name: tensor.tolist() for name, tensor in layers[-1].items()})},
        {"layers": (*layers[:-1], {**layers[-1], "more": torch.zeros(1)})},
        {"layers": layers[:-1]},
        {"layers": None},
        {"layers": dict(enumerate(layers))},
        {"layers": (*layers[:-1], None)},
        {"fingerprint": None},
        {"fingerprint": ""},
    ]
    return [dataclasses.replace(snapshot, **each) for each in fields]


@every_case
def test_a_snapshot_is_checked_whole_before_anything_moves(case: str) -> None:
    mirror = held(case)
    snapshot = mirror.state.snapshot(1)
    for bad in [*changed(snapshot), None, "snapshot"]:
        with pytest.raises(lmstate.SnapshotError):
            mirror.state.restore(0, bad)  # type: ignore[arg-type]
        mirror.check()
    mirror.extend([[], []])  # an idle call repeats the last logits


def test_a_restored_row_has_its_own_logits() -> None:
    mirror = held("llama")
    snapshot = mirror.state.snapshot(0)
    mirror.restore(1, snapshot, mirror.rows[0])
    assert snapshot.logits is not None
    snapshot.logits.zero_()
    mirror.extend([[], []])


# ---- the state of another model


OTHERS = [
    ("mistral", "gemma2"),
    ("gemma2", "mistral"),
    ("lfm2", "recurrent_gemma"),
    ("llama", "qwen2"),
    ("mamba", "llama"),
]


@pytest.mark.parametrize(("own", "other"), OTHERS)
def test_the_state_of_another_model_is_refused(own: str, other: str) -> None:
    mirror = held(own)
    for use in (
        lambda: ours(other)([[5], [6]], mirror.state),
        lambda: ours(other)([[5], [6]], mirror.state, commit=False),
        lambda: list(Generation(fake_text(ours(other)), [[5], [6]], mirror.state, max_new_tokens=2)),
    ):
        with pytest.raises(lmstate.StateError, match="of another model"):
            use()
        mirror.check()


def fake_text(model: lmstate.Model) -> lmstate.Model:
    from tests.generation.fake_model import FakeTokenizer

    return dataclasses.replace(model, _tokenizer=FakeTokenizer())  # type: ignore[arg-type]


def test_what_is_no_state_is_said_to_be_none() -> None:
    with pytest.raises(lmstate.StateError, match="'mine' is not a state"):
        ours("llama")([[5]], "mine")  # type: ignore[call-overload, arg-type]


def test_other_weights_are_another_model() -> None:
    mirror = held("llama")
    twin = copy.deepcopy(ours("llama"))
    twin._fingerprint = None
    twin.blocks[-1].mixer.out.storage.mul_(2)  # type: ignore[attr-defined]
    with pytest.raises(lmstate.StateError, match=r"weights is .* there and .* here"):
        twin([[5], [6]], mirror.state)
    with pytest.raises(lmstate.StateError, match="of another model"):
        twin.decode_step(torch.tensor([[5], [6]]), ours("llama").new_state(2, capacity=9, static=True))
    mirror.check()


def test_a_copy_of_a_model_goes_on_with_its_states() -> None:
    mirror = held("llama")
    mirror.model = copy.deepcopy(ours("llama"))
    mirror.extend([[5], [6]])
    mirror.model = ours("llama")
    mirror.extend([[7], [8]])
    mirror.check()
    mirror.state = copy.deepcopy(mirror.state)
    assert mirror.state.user() is mirror.model, "a copy of a state is of the same model"
    mirror.check()


# ---- a step of no tokens


@pytest.mark.parametrize("tree", [False, True])
@every_case
def test_a_step_of_no_tokens_awaits_no_verdict(case: str, tree: bool) -> None:
    mirror = held(case)
    state = mirror.state

    def add() -> None:
        assert state.add() == 2
        state.remove(2)
        state.select([0, 1])

    verdicts: list[Callable[[], object]] = [state.commit, lambda: state.commit(0), lambda: state.commit([0, 0])]
    follow: list[Callable[[], object]] = [
        *([lambda: state.commit_path([[], []])] if tree else verdicts),
        lambda: state.discard(),
        lambda: mirror.extend([[5], []]),
        lambda: mirror.draft([[5, 6], []], [1, 0]),
        lambda: mirror.select([1, 0]),
        lambda: mirror.rewind(0, 8),
        lambda: state.mark(0),
        lambda: mirror.restore(1, state.snapshot(0), mirror.rows[0]),
        add,
    ]
    for use in follow:
        mirror.model([[], []], state, commit=False, parents=[[], []] if tree else None)
        assert state.pending == [0, 0]
        use()
        mirror.check()


def test_a_device_step_may_follow_a_step_of_no_tokens() -> None:
    mirror = Mirror(ours("llama"), capacity=40, static=True)
    mirror.extend([ids(9)])
    mirror.model([[]], mirror.state, commit=False)
    mirror.model.decode_step(torch.tensor([[5]]), mirror.state)
    mirror.state.commit()
    mirror.rows[0].append(5)
    mirror.check()
