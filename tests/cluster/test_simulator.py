"""The simulator's counts hold together, and routing by state keeps its bars in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.cluster.plan import FleetPlan
from bench.cluster.policies import POLICIES
from bench.cluster.simulator import Machine, Outcome, simulate
from bench.cluster.work import agents, one_shots

from lmstate.cluster.placement import RouteCosts

STORE = RouteCosts(fetch=0.02)


def play(policy: str, machine: Machine, *, prefixes: bool = False, kill_every: int = 0) -> Outcome:
    clients = one_shots(300, 0.8, 30, 1500, 100, 20) if prefixes else agents(8, 12)
    return simulate(POLICIES[policy](machine.costs), clients, 4, machine, kill_every=kill_every)


def test_agents_compute_nothing_twice() -> None:
    assert play("by state", Machine()).ratio <= 1.10, "the system prompt at each replica"
    assert play("by state", Machine(costs=STORE)).ratio <= 1.05
    assert play("round robin", Machine()).ratio > 2


def test_agents_survive_kills() -> None:
    told = play("by state", Machine(costs=STORE), kill_every=20)
    assert told.moved > 0 and told.lost == 0 and told.requests == 8 * 12
    assert told.ratio <= 1.10


def test_long_prefixes_are_shared_out() -> None:
    machine = Machine(memory=int(0.6 * 30 * 1600 / 4))
    ours, plain = play("by state", machine, prefixes=True), play("round robin", machine, prefixes=True)
    assert ours.hit_rate >= 3 * plain.hit_rate
    assert ours.balance <= 1.25


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_is_the_same_each_time_and_adds_up(policy: str) -> None:
    told = play(policy, Machine(costs=STORE), prefixes=True, kill_every=50)
    assert told == play(policy, Machine(costs=STORE), prefixes=True, kill_every=50)
    assert told.requests == 300 and told.lost == 0
    assert 0 < told.new <= told.prompt_tokens == 300 * 1600
    assert told.computed >= told.new and replace(told, policy="") != told


def test_a_plan_follows_from_the_counts() -> None:
    told = play("by state", Machine(costs=STORE))
    plan = FleetPlan("p", per_token=1000, fixed=500_000, sessions=7200, tokens=4000, turns=2.0, regions=2, replicas=10)
    rows = dict(plan.rows(told, RouteCosts(read=1e-3)))
    assert rows["state of a session"] == "4 MB" and rows["turns"] == "4 a second"
    assert rows["states written to the store"] == f"{4 * (told.new / told.requests * 1000 + 5e5) / 1e9:.1f} GB a second"
    assert rows["sessions of a lost region"] == "3,600"
    assert rows["reading their tokens again"] == "48 minutes of all that are left"  # 3,600 x 4,000 x 1 ms over 5
    with pytest.raises(ValueError, match="no request"):
        plan.rows(replace(told, requests=0), STORE)
