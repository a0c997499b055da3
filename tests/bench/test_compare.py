"""The comparison goes on when an engine's process ends, and its cells say so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench.compare import Case, Peer, markdown

from bench import compare

WORKER = """
import json, os, sys
engine = sys.argv[1]
if engine == "absent":
    os._exit(3)
print(json.dumps({"version": "1"}), flush=True)
for line in sys.stdin:
    if engine == "frail" and json.loads(line)["at"] == 20:
        os._exit(7)
    print(json.dumps({"seconds": 0.5, "peak": 2**20, "reads": 0}), flush=True)
"""


def test_an_engine_that_crashes_is_left_out_from_there_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(compare, "WORKER", tmp_path / "worker.py")
    cases = tuple(Case(f"prefill {at}", "prefill", at) for at in (10, 20, 30))
    engines = dict.fromkeys(("steady", "frail", "absent"), Peer(sys.executable, ""))
    result = compare.compare(engines, cases, rounds=2)
    assert result["failures"] == {"frail": "prefill 20: ended with exit code 7", "absent": "ended with exit code 3"}
    table = markdown(result).splitlines()
    assert table[2:5] == [
        "| prefill 10 | 20 (20-20) | 20 (20-20) | crashed |",
        "| prefill 20 | 40 (40-40) | crashed | crashed |",
        "| prefill 30 | 60 (60-60) | crashed | crashed |",
    ]
    assert "frail crashed: prefill 20: ended with exit code 7." in table
    compare.plot(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size
