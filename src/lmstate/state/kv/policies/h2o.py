"""Heavy hitters (H2O; Zhang et al. 2023, 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

from lmstate.state.kv.policies.base import Budget


@dataclass(frozen=True)
class H2O(Budget):
    """Keeps the slots that have received the most attention, and the `recent` newest ones.

    Scores are column sums of the attention probabilities, of the prompt's queries too, averaged over the query heads of
    a group. Evicted slots receive none any more, so what survives depends on where steps end.
    """

    budget: int = 2048
    recent: int = 256
    sinks: int = 4

    observes = True
