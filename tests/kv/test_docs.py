"""The page on policies runs as it is written, and its policies keep what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.kv.watch import Watch
from tests.zoo import ours, text

PAGE = Path(__file__).parents[2] / "docs" / "kv-policies.md"


def test_the_page_runs_and_its_policies_see_what_they_keep(tmp_path: Path) -> None:
    model = ours("llama")
    names: dict[str, Any] = {"model": model, "__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M):
        exec(compile(block.replace("from __future__", "#"), str(PAGE), "exec", dont_inherit=True), names)
        state = names["state"]
        model([text(120)[0].tolist()], state)
        assert state.lengths == [120]
    assert len(state.kept(0, 0)[0]) < 120
    for policy in (names["SmallKeys"](budget=20, recent=4), names["Noticed"](patience=8)):
        watch = Watch(model, policy, rows=2, rewind=4)
        watch.feed([text(40)[0].tolist(), [5]])
        watch.feed([[3], text(9)[0].tolist()])
        watch.feed([[3, 4, 5], [6, 7, 8]], accept=[1, 2])
        watch.rewind(0, 39)
        watch.check()
        if policy.most == 20:
            assert all(len(head) <= 20 for head in watch.state.kept(0, 0))
