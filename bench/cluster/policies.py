"""Routing policies: ours, and those that are common elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable

from bench.cluster.simulator import SPACE, Asked, Replica, Router
from lmstate.cluster.placement import Placement, RouteCosts


class _Plain:
    """A policy that is told nothing."""

    name = ""

    def observe(self, replicas: list[Replica], resident: bool) -> None:
        pass

    def begun(self, asked: Asked, replica: Replica) -> None:
        pass


class RoundRobin(_Plain):
    name = "round robin"

    def __init__(self) -> None:
        self._count = 0

    def choose(self, asked: Asked, replicas: list[Replica]) -> Replica:
        self._count += 1
        return replicas[self._count % len(replicas)]


class PowerOfTwo(_Plain):
    """The one of two random replicas that has fewer requests, which it knows at once."""

    name = "power of two"

    def __init__(self, seed: int = 1) -> None:
        self._dice = random.Random(seed)

    def choose(self, asked: Asked, replicas: list[Replica]) -> Replica:
        two = self._dice.sample(replicas, min(2, len(replicas)))
        return min(two, key=lambda replica: len(replica.requests))


class HashedName(_Plain):
    """The replica that a hash of the session or of the beginning of the prompt tells, whatever its load."""

    name = "hash"

    def choose(self, asked: Asked, replicas: list[Replica]) -> Replica:
        return replicas[int(asked.key.name[:16], 16) % len(replicas)]


class Sticky:
    """`lmstate.cluster.placement`, with views as old as the machine's `stats` seconds."""

    name = "by state"

    def __init__(self, costs: RouteCosts) -> None:
        self._placement = Placement(costs)

    def observe(self, replicas: list[Replica], resident: bool) -> None:
        self._placement.observe([replica.view(resident) for replica in replicas])

    def choose(self, asked: Asked, replicas: list[Replica]) -> Replica:
        id = self._placement.choose(asked.key, SPACE)[0]
        asked.expected = self._placement.sent(asked.key, id)
        return next(replica for replica in replicas if replica.id == id)

    def begun(self, asked: Asked, replica: Replica) -> None:
        self._placement.begun(replica.id, asked.expected)


POLICIES: dict[str, Callable[[RouteCosts], Router]] = {
    RoundRobin.name: lambda _: RoundRobin(),
    PowerOfTwo.name: lambda _: PowerOfTwo(),
    HashedName.name: lambda _: HashedName(),
    Sticky.name: Sticky,
}
