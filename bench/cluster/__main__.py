"""`python -m bench.cluster`: routing policies on simulated replicas, by counts and simulated seconds.

Deterministic: any machine gives these numbers. `--decision` measures one decision on this machine instead.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import thread_time

from bench.cluster.plan import show
from bench.cluster.policies import POLICIES
from bench.cluster.simulator import SPACE, Machine, Outcome, simulate
from bench.cluster.work import Client, agents, one_shots
from lmstate.cluster.key import route_key
from lmstate.cluster.placement import Placement, ReplicaView, RouteCosts

STORE = RouteCosts(fetch=0.02)


@dataclass(frozen=True)
class Case:
    """Work for so many replicas."""

    clients: Callable[[int], list[Client]]
    machine: Machine = field(default_factory=Machine)
    kill_every: int = 0


def long_prefixes(replicas: int) -> list[Client]:
    return list(one_shots(300 * replicas, 0.5 * replicas, prefixes=150, shared=6000, new=100, answer=30))


CASES = {
    "12 agents a replica": Case(lambda replicas: list(agents(12 * replicas))),
    "12 agents a replica, a store": Case(lambda replicas: list(agents(12 * replicas)), Machine(costs=STORE)),
    "4 agents a replica, a store, one kill per 20 turns": Case(
        lambda replicas: list(agents(4 * replicas)), Machine(costs=STORE), kill_every=20
    ),
    "150 prefixes of 6,000 tokens": Case(long_prefixes),
    "32 prefixes of 512 tokens": Case(
        lambda replicas: list(one_shots(400 * replicas, 7.0 * replicas, 32, 512, 128, 30)), Machine(memory=10_000)
    ),
    "one system prompt of 2,000 tokens": Case(
        lambda replicas: list(one_shots(400 * replicas, 7.0 * replicas, 1, 2000, 100, 30))
    ),
    "nothing shared": Case(lambda replicas: list(one_shots(300 * replicas, 2.5 * replicas, 1, 0, 600, 30))),
}


def run(case: Case, policy: str, replicas: int) -> Outcome:
    machine = case.machine
    if case.clients is long_prefixes:
        machine = replace(machine, memory=int(0.6 * 150 * 6100 / replicas))  # 60 % of all states in all memories
    return simulate(
        POLICIES[policy](machine.costs), case.clients(replicas), replicas, machine, kill_every=case.kill_every
    )


def decision(replicas: int = 16, keys: int = 10_000, rounds: int = 3) -> tuple[float, float]:
    """Median and 99th percentile of the CPU seconds of one decision, new keys and known ones alike."""
    placement = Placement()
    placement.observe([ReplicaView(f"replica {rank}", rank, SPACE) for rank in range(replicas)])
    named = [route_key([number % 30_000] * 640, session=str(number)) for number in range(keys)]
    times = []
    for _ in range(rounds):
        for key in named:
            begin = thread_time()
            id = placement.choose(key, SPACE)[0]
            times.append(thread_time() - begin)
            placement.begun(id, placement.sent(key, id))
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--case", action="append", help="only cases whose name has this in it; may be repeated")
    parser.add_argument("--decision", action="store_true", help="measure one decision at 16 replicas and 10,000 keys")
    parser.add_argument("--plan", type=int, metavar="TURNS", help="sizes of a fleet, by agents of so many turns")
    options = parser.parse_args()
    if options.plan:
        for replicas in options.replicas:
            show(replicas, options.plan)
        return
    if options.decision:
        median, late = decision()
        print(f"one decision, 16 replicas, 10,000 keys: median {median * 1e6:.0f} us, p99 {late * 1e6:.0f} us")
        return
    print(
        "| work | replicas | policy | computed / new | hits | moved | lost | seconds | TTFT p50 / p90 / p99 | balance |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, case in CASES.items():
        if options.case and not any(part in name for part in options.case):
            continue
        for replicas in options.replicas:
            for policy in POLICIES:
                told = run(case, policy, replicas)
                ttft = " / ".join(f"{seconds:.2f}" for seconds in told.ttft)
                print(
                    f"| {name} | {replicas} | {policy} | {told.ratio:.3f} | {told.hit_rate:.3f} | {told.moved} "
                    f"| {told.lost} | {told.seconds:.0f} | {ttft} | {told.balance:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
