"""A fleet that does not fit on this machine, on paper: counts of the simulator, and sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from bench.cluster.policies import POLICIES
from bench.cluster.simulator import Machine, Outcome, simulate
from bench.cluster.work import agents
from lmstate.cluster.placement import RouteCosts

GIGA = 1e9
ID = 4  # bytes of a token of a record


@dataclass(frozen=True)
class FleetPlan:
    """Sessions of a model over replicas in regions. `per_token`: bytes of state of a token; `fixed`: of a session."""

    name: str
    per_token: int
    fixed: int = 0
    sessions: int = 1_000_000
    tokens: int = 4_000  # of a session
    turns: float = 1.0  # of a session in an hour
    regions: int = 3
    replicas: int = 100

    @property
    def session_bytes(self) -> int:
        return self.tokens * self.per_token + self.fixed

    def rows(self, told: Outcome, costs: RouteCosts) -> list[tuple[str, str]]:
        """Lines of a table. Raises ValueError for an outcome without requests."""
        if not told.requests:
            raise ValueError("the simulator answered no request: there is nothing to plan by")
        per_second = self.sessions * self.turns / 3600
        new, fetched = told.new / told.requests, told.fetched / told.requests
        written = per_second * (new * self.per_token + self.fixed)
        read = per_second * (fetched * self.per_token + self.fixed)
        lost, left = self.sessions / self.regions, self.replicas * (1 - 1 / self.regions)
        again = lost * self.tokens * costs.read / left
        return [
            ("state of a session", f"{self.session_bytes / 1e6:,.0f} MB"),
            ("states of all sessions", f"{self.sessions * self.session_bytes / 1e12:,.0f} TB"),
            ("tokens of all sessions", f"{self.sessions * self.tokens * ID / GIGA:,.0f} GB"),
            ("turns", f"{per_second:,.0f} a second"),
            ("states written to the store", f"{written / GIGA:,.1f} GB a second"),
            ("states read from it, at most", f"{read / GIGA:,.1f} GB a second"),
            ("tokens alone to another region", f"{per_second * new * ID / 1e6:,.1f} MB a second"),
            ("sessions of a lost region", f"{lost:,.0f}"),
            ("fetching their states", f"{lost * self.session_bytes / 1e12:,.0f} TB"),
            ("reading their tokens again", f"{again / 60:,.0f} minutes of all that are left"),
        ]


PLANS = (
    # 2 (keys and values) x layers x heads x dimension x bytes of a number
    FleetPlan("attention: 32 layers, 8 heads of 128, bfloat16", 2 * 32 * 8 * 128 * 2),
    FleetPlan("the same with 8-bit keys and values", 2 * 32 * 8 * 128 * 1),
    FleetPlan(
        "hybrid: 8 of 32 layers attend, 24 keep 32 heads of 128 x 128", 2 * 8 * 8 * 128 * 2, 24 * 32 * 128 * 128 * 4
    ),
)


def counts(replicas: int, turns: int) -> Outcome:
    """The work of 12 agents a replica, with a store, routed by state."""
    machine = Machine(costs=RouteCosts(fetch=0.02))
    return simulate(POLICIES["by state"](machine.costs), agents(12 * replicas, turns), replicas, machine)


def show(replicas: int, turns: int) -> None:
    """Print the counts and the plans."""
    told, costs = counts(replicas, turns), Machine().costs
    print(
        f"{replicas} replicas, {told.requests:,} turns: computed / new {told.ratio:.3f}, fetched "
        f"{told.fetched / told.requests:,.0f} tokens a turn, new {told.new / told.requests:,.0f}, TTFT p50 / p99 "
        f"{told.ttft[0]:.2f} / {told.ttft[2]:.2f} s, balance {told.balance:.2f}\n"
    )
    named = [dict(plan.rows(told, costs)) for plan in PLANS]
    print("| | " + " | ".join(plan.name for plan in PLANS) + " |")
    print("|---" * (1 + len(PLANS)) + "|")
    for line in named[0]:
        print(f"| {line} | " + " | ".join(told[line] for told in named) + " |")
