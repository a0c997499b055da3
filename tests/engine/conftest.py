"""What tests of the engine share."""

from __future__ import annotations

import pytest

from tests.waiting import patient


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines wait for their tiers as long as that takes; tests of tiers that hang say otherwise."""
    patient(monkeypatch)
