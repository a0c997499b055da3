"""What tests of the engine share."""

from __future__ import annotations

import pytest

from lmstate.engine.tiers import Tier
from tests.waiting import GUARD, patient


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines wait for their tiers as long as that takes; tests of tiers that hang say otherwise."""
    patient(monkeypatch)
    monkeypatch.setattr(Tier.close, "__defaults__", (GUARD,))  # all is written, however slow the disk is
