"""Recorded results, and the page that is made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import record

RESULT = {
    "machine": "A processor; 2 threads",
    "versions": {"lmstate:int4": "0.1.0", "llama.cpp": "0.3"},
    "rounds": 3,
    "rows": [
        {"case": "prefill 512", "engine": "lmstate:int4", "median": 100.4, "least": 99.0, "most": 101.0},
        {"case": "prefill 512", "engine": "llama.cpp", "crashed": True},
    ],
}


@pytest.mark.parametrize(
    ("vendor", "family", "model", "flags", "name"),
    [
        ("AuthenticAMD", 25, 1, "avx2", "zen3"),
        ("AuthenticAMD", 25, 17, "avx2 avx512f", "zen4"),
        ("AuthenticAMD", 26, 2, "avx2 avx512f", "zen5"),
        ("GenuineIntel", 6, 143, "avx512f amx_tile", "intel-amx"),
        ("GenuineIntel", 6, 94, "avx2", "intel-avx2"),
    ],
)
def test_processors_have_short_names(vendor: str, family: int, model: int, flags: str, name: str) -> None:
    text = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: X\nflags\t\t: {flags}\n"
    assert record.processor(text) == name


def test_the_newest_result_of_each_processor_is_shown(tmp_path: Path) -> None:
    for processor, date in (("zen3", "2026-01-02"), ("zen3", "2026-01-01"), ("zen4", "2025-12-31")):
        stored = {"processor": processor, "date": date, "commit": "abc", **RESULT}
        (tmp_path / f"{processor}-{date}.json").write_text(json.dumps(stored))
    assert [result["date"] for result in record.newest(tmp_path)] == ["2026-01-02", "2025-12-31"]


def test_a_table_has_a_row_per_case_and_says_what_crashed() -> None:
    table = record.tables([{"processor": "zen3", "date": "2026-01-02", "commit": "abc", **RESULT}])
    assert "| prefill 512 | 100 (99-101) | crashed |" in table


def test_a_recorded_run_is_a_file_with_commit_and_date(tmp_path: Path) -> None:
    stored = json.loads(record.write(RESULT, tmp_path).read_text())
    assert {"processor", "date", "commit"} <= set(stored)
    assert stored["rows"] == RESULT["rows"]


def test_the_page_shows_the_recorded_results() -> None:
    text = record.PAGE.read_text(encoding="utf-8")
    assert text == record.page(text, record.newest()), "run `python -m bench.record`"
