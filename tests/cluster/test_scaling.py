"""Replicas come when prompts wait, and go when what is left has room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lmstate.cluster.scaling import FULL, MOST_WAIT, OCCUPIED, WAITING, by_waiting_seconds, replicas_wanted

RUNNING, WAIT, ROWS = st.integers(0, 30), st.floats(0, 200), st.floats(0, 30)


@given(RUNNING, WAIT, ROWS)
def test_a_decision_stands_once_it_is_carried_out(running: int, waiting: float, occupied: float) -> None:
    """The work that made replicas come does not make them go again, and the other way round."""
    occupied = min(occupied, float(running))
    wanted = replicas_wanted(running, waiting, occupied)
    assert 1 <= wanted <= max(1, 2 * running)
    if wanted > running:
        assert running == 0 or waiting > MOST_WAIT * running
        assert wanted == 2 * running or replicas_wanted(wanted, waiting, occupied) >= wanted - 1
    if wanted < running:
        assert wanted == running - 1 and waiting <= MOST_WAIT / 2 and occupied <= FULL * wanted
        assert replicas_wanted(wanted, waiting, occupied) <= wanted


@given(RUNNING, WAIT, WAIT, ROWS)
def test_more_work_never_means_fewer_replicas(running: int, one: float, other: float, occupied: float) -> None:
    less, more = sorted((one, other))
    assert replicas_wanted(running, less, occupied) <= replicas_wanted(running, more, occupied)


def context(name: str, running: int, waiting: float = 0.0, occupied: float = 0.0) -> Any:
    told = {WAITING: {name: waiting}, OCCUPIED: {name: occupied}} if running else None
    return SimpleNamespace(deployment_name=name, current_num_replicas=running, aggregated_metrics=told)


def test_the_ranks_that_run_are_the_first_ones() -> None:
    def decided(*engines: Any) -> list[int]:
        contexts = {str(at): one for at, one in enumerate((*engines, context("front", 1)))}
        decisions, states = by_waiting_seconds(contexts)
        assert not states and decisions.keys() == {str(at) for at in range(len(engines))}, "the front is not scaled"
        return [decisions[str(at)] for at in range(len(engines))]

    idle = [context(f"engine-{rank}", rank < 2) for rank in range(4)]
    assert decided(*idle) == [1, 0, 0, 0]
    busy = [context("engine-0", 1, 1.0, 1.0), context("engine-1", 1, 7.0, 1.0), *idle[2:]]
    assert decided(*busy) == [1, 1, 1, 1]
    full = [context("engine-0", 1, 0.0, 1.0), context("engine-1", 1, 0.0, 0.9), *idle[2:]]
    assert decided(*full) == [1, 1, 0, 0]
