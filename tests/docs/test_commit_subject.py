"""The commit hook takes subjects of the documented form."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

wrong = runpy.run_path(str(Path(__file__).parents[2] / ".github" / "commit_subject.py"))["wrong"]


@pytest.mark.parametrize("subject", ["engine: bound inter-token latency", "ops/cuda: add kernels", "fix: x"])
def test_subjects_with_an_area_are_taken(subject: str) -> None:
    assert wrong(subject) == ""


@pytest.mark.parametrize("subject", ["Bound latency", "engine bound", "engine: Bound", "engine: " + "x" * 70, ""])
def test_others_are_refused(subject: str) -> None:
    assert wrong(subject)
