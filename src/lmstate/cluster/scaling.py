"""The number of replicas by the work that waits for them: a policy for Ray Serve's autoscaling."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

ENGINE = "engine-"  # before the rank in the name of an engine's deployment
WAITING, OCCUPIED = "waiting_seconds", "occupied_rows"  # names of the numbers that replicas tell
MOST_WAIT = 2.0  # seconds of prefill that may wait at each replica before there is one more
FULL = 0.7  # part of the rows of those that would be left, below which the last replica goes


def by_waiting_seconds(contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
    """Decide which ranks run: an application's policy, from `AutoscalingContext`s by deployment.

    Each rank is a deployment with one replica or none, so that ranks stay contiguous and a new one moves few keys.
    """
    engines = {id: context for id, context in contexts.items() if context.deployment_name.startswith(ENGINE)}
    running = sum(context.current_num_replicas > 0 for context in engines.values())
    wanted = replicas_wanted(running, _sum(engines, WAITING), _sum(engines, OCCUPIED))
    return {id: int(_rank(context) < wanted) for id, context in engines.items()}, {}


def replicas_wanted(running: int, waiting: float, occupied: float) -> int:
    """Return how many replicas there should be when `running` run.

    waiting   seconds of prefill that wait at all of them together, which are shared out among more
    occupied  parts of their rows that are in use, added up: 2.0 is two full replicas
    """
    if waiting > MOST_WAIT * running:
        return min(ceil(waiting / MOST_WAIT), max(1, 2 * running))
    if running > 1 and waiting <= MOST_WAIT / 2 and occupied <= FULL * (running - 1):
        return running - 1
    return max(1, running)


def _rank(context: Any) -> int:
    return int(context.deployment_name.removeprefix(ENGINE))


def _sum(engines: Mapping[Any, Any], name: str) -> float:
    told = [(context.aggregated_metrics or {}).get(name, {}) for context in engines.values()]
    return sum(value for by_replica in told for value in by_replica.values())
