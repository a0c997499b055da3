"""Routing keeps keys where they are, spreads what is too much for one replica, and mixes no namespaces."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmstate.cluster.key import RouteKey, route_key
from lmstate.cluster.placement import Placement, ReplicaView, RouteCosts

SPACE = "model float32 None"


def fleet(count: int, generation: int = 0, **changes: object) -> list[ReplicaView]:
    return [replace(ReplicaView(f"{generation}-{rank}", rank, SPACE), **changes) for rank in range(count)]  # type: ignore[arg-type]


def named(number: int, tokens: int = 100) -> RouteKey:
    return RouteKey(sha256(str(number).encode()).hexdigest(), True, tokens)


def ranks(placement: Placement, keys: list[RouteKey], views: list[ReplicaView]) -> list[int]:
    placement.observe(views)
    rank = {view.id: view.rank for view in views}
    return [rank[placement.choose(key, SPACE)[0]] for key in keys]


def settle(placement: Placement, keys: list[RouteKey], views: list[ReplicaView]) -> list[int]:
    """Send each key once, as slowly as the replicas answer."""
    placement.observe(views)
    rank, found = {view.id: view.rank for view in views}, []
    for key in keys:
        id = placement.choose(key, SPACE)[0]
        placement.begun(id, placement.sent(key, id))
        found.append(rank[id])
    return found


KEYS = [named(number) for number in range(1500)]
TEXT = route_key(list(range(200)))


@settings(max_examples=8, deadline=None)
@given(count=st.integers(2, 16), data=st.data(), known=st.booleans())
def test_when_a_replica_leaves_few_keys_move(count: int, data: st.DataObject, known: bool) -> None:
    leaves, views = data.draw(st.integers(0, count - 1)), fleet(count)
    placement = Placement()
    before = (settle if known else ranks)(placement, KEYS, views)
    after = ranks(placement, KEYS, [view for view in views if view.rank != leaves])
    moved = [one for one, other in zip(before, after) if one != other]
    assert set(moved) == {leaves} and leaves not in after
    assert len(moved) <= 1.5 / count * len(KEYS)
    back = ranks(placement, KEYS, views) if not known else before
    assert back == before


@settings(max_examples=6, deadline=None)
@given(count=st.integers(1, 6), known=st.booleans(), order=st.randoms())
def test_a_rollout_moves_no_key(count: int, known: bool, order: random.Random) -> None:
    placement, views = Placement(), fleet(count)
    before = (settle if known else ranks)(placement, KEYS[:80], views)
    for rank in range(count):  # one at a time, each beside the old one for a while
        new = replace(views[rank], id=f"1-{rank}")
        views = [*views[:rank], replace(views[rank], takes=False), *views[rank + 1 :], new]
        order.shuffle(views)
        assert ranks(placement, KEYS[:80], views) == before
        views = sorted((view for view in views if view.takes), key=lambda view: view.rank)
        assert ranks(placement, KEYS[:80], views) == before


@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(2, 8),
    skew=st.floats(0, 4),
    keys=st.integers(1, 300),
    seed=st.integers(0, 999),
    fetch=st.sampled_from([None, 0.01]),
    named_keys=st.booleans(),
)
def test_no_replica_has_more_than_its_share_of_a_backlog(
    count: int, skew: float, keys: int, seed: int, fetch: float | None, named_keys: bool
) -> None:
    """More requests than can be answered, by keys of which some come far more often than others."""
    dice, costs = random.Random(seed), RouteCosts(read=1e-3, fetch=fetch, row=0.0)
    placement, work, visits = Placement(costs), Counter[str](), Counter[int]()
    placement.observe(fleet(count))
    lengths = [dice.randint(1, 700) for _ in range(keys)]
    weights = [1 / (rank + 1) ** skew for rank in range(keys)]
    while sum(work.values()) < 60 * count:
        number = dice.choices(range(keys), weights)[0]
        visits[number] += 1
        key = named(number, lengths[number] + 400 * (visits[number] % 5))
        key = replace(key, named=named_keys)
        id = placement.choose(key, SPACE)[0]
        work[id] += placement.sent(key, id)
    moving = costs.read * (700 + 400 * 4)  # at most, and that of one request
    assert max(work.values()) <= 1.25 * (sum(work.values()) / count + moving) + moving


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_order_of_replicas_changes_nothing(data: st.DataObject) -> None:
    views = [
        ReplicaView(
            f"r{rank}",
            rank,
            data.draw(st.sampled_from([SPACE, "another"])),
            data.draw(st.floats(0, 10)),
            data.draw(st.integers(0, 8)),
            data.draw(st.sampled_from([None, 50, 5000])),
            data.draw(st.booleans()),
            data.draw(st.sampled_from([None, (), [digest for _, digest in TEXT.beginnings]])),
        )
        for rank in range(data.draw(st.integers(0, 6)))
    ]
    one, other = Placement(), Placement()
    one.observe(views)
    other.observe(data.draw(st.permutations(views)))
    for key in (KEYS[3], route_key([1, 2, 3]), TEXT):
        chosen = one.choose(key, SPACE)
        assert chosen == other.choose(key, SPACE) == one.choose(key, SPACE)
        assert set(chosen) == {view.id for view in views if view.takes and view.namespace == SPACE} or any(
            view.room is not None and view.room < key.tokens for view in views
        )
        if chosen:
            one.sent(key, chosen[0])
            other.sent(key, chosen[0])


def test_no_replica_of_another_namespace_is_chosen() -> None:
    placement = Placement()
    placement.observe([ReplicaView("a", 0, "another", resident=[digest for _, digest in TEXT.beginnings])])
    assert placement.choose(TEXT, SPACE) == []
    placement.observe([])
    assert placement.choose(KEYS[0], SPACE) == []


def test_a_state_stays_home_until_waiting_costs_more_than_moving() -> None:
    key = replace(named(1), tokens=4000)
    for fetch, stays in ((None, 2.0), (0.05, 0.2)):
        placement = Placement(RouteCosts(read=1e-3, fetch=fetch, fetched=1e-5))
        placement.observe(fleet(2))
        (home, other) = placement.choose(key, SPACE)
        placement.sent(key, home)
        later = replace(key, tokens=4100)
        for wait, expected in ((0.0, home), (stays, home), (10.0, other)):
            placement.observe([replace(view, wait=wait if view.id == home else 0.0) for view in fleet(2)])
            assert placement.choose(later, SPACE)[0] == expected, (fetch, wait)


def test_a_prefix_goes_where_it_is_and_spreads_when_it_is_hot() -> None:
    placement, text = Placement(RouteCosts(read=1e-3)), list(range(600))
    placement.observe(fleet(4))
    used = Counter[str]()
    for number in range(200):
        key = route_key([*text, *[number] * 40])
        id = placement.choose(key, SPACE)[0]
        seconds = placement.sent(key, id)
        used[id] += 1
        if number < 20:  # at first one after the other
            placement.begun(id, seconds)
            assert len(used) == 1
    assert len(used) == 4 and max(used.values()) <= 1.25 * 50 + 20


def test_published_digests_replace_what_was_sent() -> None:
    placement, key = Placement(), route_key(list(range(640)))
    placement.observe(fleet(4))
    first = placement.choose(key, SPACE)[0]
    placement.sent(key, first)
    other = next(view.id for view in fleet(4) if view.id != first)
    digests = [digest for _, digest in key.beginnings]
    placement.observe([replace(view, resident=digests if view.id == other else ()) for view in fleet(4)])
    assert placement.choose(key, SPACE)[0] == other
    placement.observe([view for view in fleet(4) if view.id != other])
    assert not placement._where, "no digest of a replica that is gone, or has it no more, is kept"


def test_memory_of_keys_and_texts_is_bounded() -> None:
    placement = Placement(keys=50, digests=30)
    settle(placement, [route_key([number] * 200, session=str(number)) for number in range(300)], fleet(3))
    assert len(placement._homes) == 50
    assert len(placement._where) <= 90
    assert all(len(known.sent) <= 30 for known in placement._known.values())


def test_keys_of_two_tenants_share_nothing() -> None:
    text = list(range(200))
    one, other = (route_key(text, session="s", tenant=tenant) for tenant in ("a", "b"))
    assert one.name != other.name
    assert not {digest for _, digest in one.beginnings} & {digest for _, digest in other.beginnings}


@pytest.mark.parametrize("field", ["session", "previous", "source", "user"])
def test_a_key_is_named_by_the_first_that_is_given(field: str) -> None:
    given = {"session": "x", "previous": "x", "source": "x", "user": "x"}
    for before in ("session", "previous", "source", "user"):
        if before == field:
            break
        del given[before]
    key = route_key([1, 2], **given)
    assert key == route_key([1, 2], **{field: "x"}) and key.named
    assert key.name != route_key([1, 2]).name
