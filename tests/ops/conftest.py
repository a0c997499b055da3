"""Runs a test with each native variant that was built and that this processor runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmstate.ops import cpu, dispatch


@pytest.fixture(params=cpu.usable() or [pytest.param("none", marks=pytest.mark.skip("no native library was built"))])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    chosen = dispatch.Choice(request.param, "asked by the test", cpu.open_library(request.param))
    monkeypatch.setattr(dispatch, "choice", lambda: chosen)
    yield request.param
