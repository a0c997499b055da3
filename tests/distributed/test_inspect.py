"""`lmstate inspect --parallel` tells what each process then holds, without weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import lmstate
from lmstate.cli.inspect_model import state_bytes
from lmstate.cli.inspect_ranks import planned, split_rows
from lmstate.models.model import Model
from tests.distributed.helpers import over_threads, saved


def held(model: Model) -> tuple[int, dict[str, int], dict[str, int]]:
    _, growing, fixed = state_bytes(model)
    return sum(model.weight_totals.nbytes.values()), growing, fixed


@pytest.mark.parametrize("kind", ["float32", "int4"])
@pytest.mark.parametrize(
    "case", ["llama", "qwen3_moe", "deepseek_v3", "mamba2-groups", "falcon_h1", "diffllama", "deepseek_v4", "inkling"]
)
def test_the_plan_is_what_processes_hold(case: str, kind: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path)
    model = lmstate.load(folder, weights=kind, device="meta")
    with over_threads(folder, kind, 2) as (two, meeting):
        two([[1]])  # the other is there
        first, second = planned(model, 2)
        assert held(first) == held(two)
        assert sum(second.weight_totals.nbytes.values()) == sum(
            meeting.followers[0].model.weight_totals.nbytes.values()
        )
        split = sum(int(count) for count, _, told in split_rows(model, 2) if told == "split")
        assert split == sum(map(bool, two.cuts))
