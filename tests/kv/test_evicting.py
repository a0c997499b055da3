"""Every query sees what the policy had kept and its own step, and going back brings back all that was evicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lmstate
from lmstate import kv
from lmstate.state import Layout, attention_state, latent_state
from lmstate.state.changes import Changes
from lmstate.state.kv.eviction.attention import EvictingState
from tests.invariants.mirror import close
from tests.kv.policies import BUDGETS, FAMILIES
from tests.kv.watch import Watch, attention_of
from tests.zoo import CASES, ours, text

every_policy = pytest.mark.parametrize("policy", BUDGETS)
families = [case for case in FAMILIES if case in CASES]


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()


@pytest.mark.parametrize("case", families)
@every_policy
def test_every_query_sees_what_was_kept_and_its_own_step(case: str, policy: str) -> None:
    watch, budget = Watch(ours(case), BUDGETS[policy], rows=2), BUDGETS[policy].budget
    for seed, widths in enumerate([(20, 3), (1, 9), (0, 1), (7, 0), (1, 1), (30, 18)]):
        watch.feed([ids(width, 10 * seed + row) for row, width in enumerate(widths)])
        for layer in watch.layers:
            if isinstance(attention_of(watch.state.layers[layer]), EvictingState):
                assert max(len(head) for row in range(2) for head in watch.state.kept(row, layer)) <= budget
    watch.check()


@every_policy
@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate],
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(data=st.data())
def test_any_interleaving_sees_what_was_kept(policy: str, data: st.DataObject) -> None:
    rewind = data.draw(st.sampled_from([0, 3, 16]))
    watch = Watch(
        ours(data.draw(st.sampled_from(["llama", "mistral", "deepseek_v3"]))), BUDGETS[policy], rows=3, rewind=rewind
    )
    fed = 0
    for _ in range(12):
        what = data.draw(st.sampled_from(["feed", "feed", "draft", "discard", "rewind", "select", "snapshot"]))
        widths = data.draw(st.lists(st.sampled_from([0, 1, 1, 2, 5, 17]), min_size=3, max_size=3))
        fed += 3
        new = [ids(width, fed + row) for row, width in enumerate(widths)]
        row = data.draw(st.integers(0, 2))
        if what == "feed":
            watch.feed(new)
        elif what == "draft":
            watch.feed(new, [data.draw(st.integers(0, width)) for width in widths])
        elif what == "discard":
            watch.model(new, watch.state, commit=False)
            watch.state.discard()
        elif what == "rewind":
            length = len(watch.rows[row])
            watch.rewind(row, length - data.draw(st.integers(0, length - reach(watch, row))))
        elif what == "select":
            watch.select(data.draw(st.lists(st.one_of(st.none(), st.integers(0, 2)), min_size=3, max_size=3)))
        else:
            snapshot = watch.state.snapshot(row)
            other = data.draw(st.integers(0, 2))
            watch.state.restore(other, snapshot)
            watch.rows[other], watch.seen[other] = list(watch.rows[row]), list(watch.seen[row])
        watch.check()


def reach(watch: Watch, row: int) -> int:
    """The earliest position that costs nothing, and the later ones neither."""
    length = len(watch.rows[row])
    return max(layer.earliest_rewind(row, length) for layer in watch.state.layers)


@every_policy
@pytest.mark.parametrize("steps", [[1] * 30, [9, 9, 9], [25, 1, 1, 3]])
def test_rewound_inside_the_window_brings_back_every_bit(policy: str, steps: list[int]) -> None:
    model = ours("llama")
    state = model.new_state(kv=BUDGETS[policy], rewind=8)
    model([ids(30)], state)
    past = {30: state.snapshot()}
    for seed, step in enumerate(steps):
        model([ids(step, seed)], state)
        past[state.lengths[0]] = state.snapshot()
    length = state.lengths[0]
    for to in (to for to in sorted(past, reverse=True) if length - 8 <= to):
        assert state.rewind_cost(0, to) == 0
        state.rewind(0, to)
        for mine, then in zip(state.snapshot().layers, past[to].layers):
            assert mine.keys() == then.keys()
            for name in mine:
                assert torch.equal(mine[name], then[name]), (to, name)


@every_policy
def test_rewound_into_a_step_equals_a_draft_accepted_up_to_there(policy: str) -> None:
    model = ours("llama")
    rewound, drafted = (model.new_state(kv=BUDGETS[policy], rewind=8) for _ in range(2))
    for state in (rewound, drafted):
        model([ids(30)], state)
    model([ids(12, 1)], rewound)
    rewound.rewind(0, 37)
    model([ids(12, 1)], drafted, commit=False)
    drafted.commit(7)
    assert [rewound.kept(0, layer) for layer in range(2)] == [drafted.kept(0, layer) for layer in range(2)]
    close(model([[5, 6]], rewound), model([[5, 6]], drafted))


@every_policy
@pytest.mark.parametrize("short", [[1, 1], [3], [1] * 6])
def test_rewound_into_a_long_step_that_short_ones_followed(policy: str, short: list[int]) -> None:
    """What the long step evicted is more than a short one has slots for."""
    model = ours("llama")
    rewound, drafted = (model.new_state(kv=BUDGETS[policy], rewind=16) for _ in range(2))
    model([ids(200)], rewound)
    for seed, width in enumerate(short):
        model([ids(width, 1 + seed)], rewound)
    for to in (199, 195, 190):
        model([ids(200)], drafted, commit=False)
        drafted.commit(to)
        assert rewound.rewind_cost(0, to) == 0
        rewound.rewind(0, to)
        for mine, other in zip(rewound.snapshot().layers, drafted.snapshot().layers):
            for name in mine:
                torch.testing.assert_close(mine[name], other[name], rtol=1e-5, atol=1e-6)
        drafted.rewind(0, 0)
    model([ids(200)[:190]], drafted, commit=False)
    drafted.commit()
    for seed in range(20):  # the slots are given back
        close(model([[seed + 3]], rewound), model([[seed + 3]], drafted))
    held = attention_of(rewound.layers[0])
    assert held is not None and held.slots < 100


@every_policy
def test_discarded_draft_evicts_nothing(policy: str) -> None:
    model = ours("mistral")
    state = model.new_state(2, kv=BUDGETS[policy])
    model([ids(40), ids(13, 1)], state)
    before, held = [state.snapshot(row) for row in range(2)], state.memory()
    for width in (1, 20, 90):
        model([ids(width, 2), ids(3, 3)], state, commit=False)
        state.discard()
    assert state.memory() == held
    for row in range(2):
        for mine, then in zip(state.snapshot(row).layers, before[row].layers):
            assert all(torch.equal(mine[name], then[name]) for name in then)


@every_policy
def test_far_rewind_equals_feeding_again(policy: str) -> None:
    model = ours("llama")
    state, fresh = (model.new_state(kv=BUDGETS[policy], rewind=4) for _ in range(2))
    for seed in range(8):
        model([ids(11, seed)], state)
    tokens = state.tokens(0)[:33]
    assert state.rewind_cost(0, 33) == 33
    state.rewind(0, 33)
    close(model([[3]], state), (model([tokens], fresh), model([[3]], fresh))[1])
    assert state.kept(0, 0) == fresh.kept(0, 0)


@every_policy
def test_rewind_to_a_mark_brings_back_what_was_kept_there(policy: str) -> None:
    model = ours("qwen3_next")
    state = model.new_state(kv=BUDGETS[policy], rewind=4)
    model([ids(40)], state)
    state.mark(0)
    kept, expected = state.kept(0, 3), model([[5]], state)
    model([ids(60, 1)], state)
    state.rewind(0, 40)
    assert state.kept(0, 3) == kept
    close(model([[5]], state), expected)


@every_policy
@pytest.mark.parametrize("case", ["llama", "deepseek_v3"])
def test_rewind_to_a_mark_at_the_start(policy: str, case: str) -> None:
    """Where no query was seen yet."""
    model = ours(case)
    state, fresh = (model.new_state(kv=BUDGETS[policy]) for _ in range(2))
    state.mark(0)
    model([ids(40)], state)
    state.rewind(0, 0)
    close(model([ids(20, 1)], state), model([ids(20, 1)], fresh))
    close(model([[3]], state), model([[3]], fresh))


@every_policy
def test_a_long_step_evicts_between_its_parts(policy: str) -> None:
    model = ours("llama")
    states = [model.new_state(2, kv=BUDGETS[policy]) for _ in range(2)]
    rows = [ids(70), ids(35, 1)]
    for state in states:
        model([ids(5, 2), ids(9, 3)], state)
    cut = states[0]
    cut.layout = type(cut.layout)(**{**vars(cut.layout), "chunk": 16})
    model(rows, cut)
    for first in range(0, 70, 16):
        model([row[first : first + 16] for row in rows], states[1])
    for row in range(2):
        assert cut.kept(row, 0) == states[1].kept(row, 0)
    close(model([[5], [5]], cut), model([[5], [5]], states[1]))


@pytest.mark.parametrize("steps", [[80], [1] * 80, [17, 1, 30, 32], [79, 1]])
def test_survivors_of_recent_are_the_sinks_and_the_most_recent(steps: list[int]) -> None:
    model = ours("llama")
    state = model.new_state(kv=kv.Recent(budget=12, sinks=2))
    for seed, step in enumerate(steps):
        model([ids(step, seed)], state)
    assert all(head == [0, 1, *range(70, 80)] for layer in range(2) for head in state.kept(0, layer))


@every_policy
@pytest.mark.parametrize("storage", [kv.Dense(), kv.Dense(torch.bfloat16), kv.Quantized(8), kv.Quantized(4)])
def test_kept_slots_hold_what_was_stored_at_their_position(policy: str, storage: kv.Storage) -> None:
    """Layer 0's keys and values depend on no other token, so that a state which keeps all knows them."""
    model = ours("llama")
    whole = model.new_state(kv=torch.float32)
    state = model.new_state(kv=type(BUDGETS[policy])(**{**vars(BUDGETS[policy]), "storage": storage}))
    for seed in range(9):
        model([ids(7, seed)], state)
    model([state.tokens(0)], whole)
    layer, reference = attention_of(state.layers[0]), whole.snapshot().layers[0]
    assert layer is not None
    position, alive = layer.arrays["position"][0], layer.slot_store.filled()[0]
    bound = {"Dense": 0.01 if storage == kv.Dense(torch.bfloat16) else 1e-6, "Quantized": 0}[type(storage).__name__]
    for name, stored in zip("kv", layer.read(layer.arrays)):
        for head in range(position.shape[0]):
            got = stored[0, head, alive[head]]
            wanted = reference[name][head, position[head, alive[head]].long()]
            step = 0.0 if not isinstance(storage, kv.Quantized) else {8: 1 / 127, 4: 1 / 7}[storage.bits]
            # Half a code's step of a turned vector, which is at most as large as the vector is long.
            limit = bound * wanted.abs().amax() + step * wanted.norm(dim=-1, keepdim=True) + 1e-5
            assert ((got - wanted).norm(dim=-1, keepdim=True) <= limit * wanted.shape[-1] ** 0.5).all()


def test_a_snapshot_of_another_policy_is_refused() -> None:
    model = ours("llama")
    states = [model.new_state(kv=one) for one in (None, BUDGETS["recent"], BUDGETS["h2o"], kv.Quantized(8))]
    for state in states:
        model([ids(20)], state)
    for a in states:
        for b in states:
            if a is not b:
                before = b.snapshot()
                with pytest.raises(lmstate.SnapshotError):
                    b.restore(0, a.snapshot())
                assert b.snapshot().tokens == before.tokens


@every_policy
@pytest.mark.parametrize("case", ["llama", "mistral", "deepseek_v3", "falcon_h1"])
def test_restored_in_a_fresh_state_goes_on_as_if_never_saved(policy: str, case: str) -> None:
    """Short steps alone, of which no native body tells what a policy has to know of queries."""
    model = ours(case)
    undisturbed, restored = (model.new_state(kv=BUDGETS[policy]) for _ in range(2))
    model([ids(60)], undisturbed)
    restored.restore(0, undisturbed.snapshot())
    for seed in range(25):
        new = [ids(1 + seed % 2, seed)]
        assert torch.equal(model(new, restored), model(new, undisturbed))
    for layer, one in enumerate(undisturbed.layers):
        if isinstance(attention_of(one), EvictingState):
            assert restored.kept(0, layer) == undisturbed.kept(0, layer)


SCALES = {"llama": 8**-0.5, "mistral": 16**-0.5, "deepseek_v3": 24**-0.5}


@dataclass(frozen=True)
class Told(kv.Budget):
    """Writes down the scale that it was told, and asks for nothing else."""

    told: list[float] = field(default_factory=list, hash=False)

    def rank(self, slots: kv.Slots) -> Tensor:
        self.told.append(slots.scale)
        return slots.positions.float()


@pytest.mark.parametrize("case", SCALES)
@pytest.mark.parametrize("steps", [[30], [1] * 30, [40, 1, 1]])
@pytest.mark.parametrize("restored", [False, True])
def test_a_policy_is_told_the_scale_whatever_path_the_steps_took(case: str, steps: list[int], restored: bool) -> None:
    model, policy = ours(case), Told(budget=6)
    state = model.new_state(kv=policy)
    if restored:
        model([ids(30)], state)
        other = model.new_state(kv=policy)
        other.restore(0, state.snapshot())
        state = other
    policy.told.clear()
    for seed, width in enumerate(steps):
        model([ids(width, seed)], state)
    assert policy.told and policy.told == pytest.approx([SCALES[case]] * len(policy.told))


ALTERED: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: x.flatten()[0],
    "flat": lambda x: x.flatten(),
    "an axis more": lambda x: x[None],
    "turned": lambda x: x.mT.contiguous(),
    "shorter": lambda x: x[..., 1:],
    "longer": lambda x: torch.cat([x, x[..., :1]], -1),
    "empty": lambda x: x[..., :0],
    "another dtype": lambda x: x.to(torch.int16 if x.is_floating_point() else torch.float32),
}


@every_policy
@pytest.mark.parametrize("storage", [kv.Dense(), kv.Quantized(4)])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_snapshot_that_does_not_fit_is_refused_before_anything_moves(
    policy: str, storage: kv.Storage, fresh: bool
) -> None:
    model = ours("llama")
    source, state, twin = (model.new_state(n, kv=replace(BUDGETS[policy], storage=storage)) for n in (1, 2, 2))
    model([ids(60)], source)
    for one in (state, twin) if not fresh else ():
        model([ids(20), ids(9, 1)], one)
    snapshot = source.snapshot()
    own = snapshot.layers[1]
    bad = {f"{name} {how}": {**own, name: alter(own[name])} for name in own for how, alter in ALTERED.items()}
    if "scores" in own:
        bad["scores negative"] = {**own, "scores": -own["scores"]}
    position = own["position"]
    bad["position twice"] = {**own, "position": position[:, :1].expand_as(position).contiguous()}
    bad["position behind a gap"] = {**own, "position": position.masked_fill(position == position[:, :1], -1)}
    bad["position beyond"] = {**own, "position": position + 60}
    for how, layer in bad.items():
        with pytest.raises(lmstate.SnapshotError):
            state.restore(0, replace(snapshot, layers=(snapshot.layers[0], layer, *snapshot.layers[2:])))
            pytest.fail(f"taken: {how}")
    for one in (state, twin):
        model([ids(3, 2), ids(3, 3)], one)
    assert torch.equal(model([[5], [6]], state), model([[5], [6]], twin))
    state.restore(0, snapshot)
    close(model([[7], []], state)[0], model([[7]], source)[0])


@pytest.mark.parametrize("heads", [0, 1, 3, 12])
def test_queries_of_other_heads_are_refused_by_a_state_that_saw_none(heads: int) -> None:
    layout = Layout(1, torch.device("cpu"), torch.float32, kv=BUDGETS["snapkv"])
    for state in (
        attention_state(layout, 2, 8, heads=6, scale=1.0),
        latent_state(layout, 5, 3, heads=6, scale=1.0),
    ):
        empty = {name: x[0][..., :0] if name == "position" else x[0] for name, x in state.arrays.items()}
        state.restore(0, 4, {**empty, "queries": torch.zeros(4, 6, 8)}, Changes())
        with pytest.raises(lmstate.SnapshotError, match="queries"):
            state.restore(0, 4, {**empty, "queries": torch.zeros(4, heads, 8)}, Changes())


@every_policy
@pytest.mark.parametrize("length", [5, 20, 90])
def test_an_idle_row_is_restored_while_another_is_pending(policy: str, length: int) -> None:
    model = ours("llama")
    state, twin, source = (model.new_state(n, kv=BUDGETS[policy]) for n in (2, 1, 1))
    model([ids(60), ids(60, 1)], state)
    model([ids(60, 1)], twin)
    model([ids(length, 2)], source)
    for one, row in ((state, [[], ids(9, 3)]), (twin, [ids(9, 3)])):
        model(row, one, commit=False)
    state.restore(0, source.snapshot())
    state.commit([0, 7])
    twin.commit(7)
    for seed in range(8):
        got = model([ids(2, seed), ids(2, seed)], state)
        close(got, torch.cat([model([ids(2, seed)], source), model([ids(2, seed)], twin)]))


@every_policy
def test_dropped_span_closes_the_gap(policy: str) -> None:
    model = ours("llama")
    state = model.new_state(kv=BUDGETS[policy], rewind=4)
    model([ids(30)], state)
    kept = state.kept(0, 0)
    state.drop(0, 3, 26)
    assert state.lengths == [7]
    assert state.kept(0, 0) == [[p if p < 3 else p - 23 for p in head if not 3 <= p < 26] for head in kept]
    layer = attention_of(state.layers[0])
    whole = model.new_state(kv=torch.float32)
    model([ids(30)[:3] + ids(30)[26:]], whole)
    keys = whole.snapshot().layers[0]["k"]
    stored = state.snapshot().layers[0]
    for head, position in enumerate(stored["position"]):
        there = position >= 0
        torch.testing.assert_close(stored["k"][head, there], keys[head, position[there].long()])
    model([ids(20, 1)], state)
    assert layer is not None and state.lengths == [27]


@pytest.mark.parametrize("storage", [kv.Dense(), kv.Quantized(8)])
def test_up_to_the_budget_a_quarter_more_slots_than_tokens_are_held(storage: kv.Storage) -> None:
    model = ours("llama")
    state = model.new_state(kv=kv.H2O(budget=2048, storage=storage), rewind=0)
    plain = model.new_state(kv=storage, rewind=0)
    for width in (295, *[1] * 120):
        piece = [ids(width, width)]
        close(model(piece, state), model(piece, plain))
        for layer in map(attention_of, state.layers):
            assert isinstance(layer, EvictingState)
            assert state.lengths[0] <= layer.slot_store.slots <= 1.25 * state.lengths[0] + 16
