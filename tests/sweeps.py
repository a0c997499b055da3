"""Parameters of which the suite samples some, and the soak runs the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def sampled(cases: Sequence[str], suite: Collection[str]) -> list[Any]:
    """Parameters of a test for all the cases; those that are not of the `suite` are the soak's."""
    assert set(suite) <= set(cases)
    return [case if case in suite else pytest.param(case, marks=pytest.mark.soak) for case in cases]
