"""The tables of docs/state.md name every kind of layer state, and say what each takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import lmstate
from lmstate import kv
from tests.zoo import ours, text

PAGE = Path(__file__).parents[2] / "docs" / "state.md"
CASES = ("gemma4", "deepseek_v3", "dots3_note", "minimax_m3", "glm5_next", "deepseek_v4", "bart")
ALONE = {  # models whose layers are of one kind
    "`attention`, `latent`": ("llama", "deepseek_v3"),
    "`window`, `latent window`": ("starcoder2", "dots3_note-window"),
    "`indexed latent`": ("deepseek_v32", "axk2"),
    "`indexed attention`": ("minimax_m3-groups",),
    "`recurrent`": ("mamba2", "rwkv"),
}


def table(head: str) -> dict[str, list[str]]:
    """The other cells of each row, by its first one, of the table whose first line begins so."""
    lines = PAGE.read_text(encoding="utf-8").partition(head)[2].splitlines()[2:]
    rows = [line.strip("|").split("|") for line in lines[: next(n for n, line in enumerate(lines) if line[:1] != "|")]]
    return {first.strip(): [cell.strip() for cell in others] for first, *others in rows}


def test_every_kind_has_its_row() -> None:
    states = [ours(case).new_state() for case in CASES]
    found = {leaf.kind for state in states for layer in state.layers for leaf in layer.leaves()}
    assert found == {kind.strip("`") for kind in table("| kind | families")}
    named = {kind for first in table("| kind | rewind") for kind in re.findall("`([a-z ]+)`", first)}
    assert found - {"shared", "compressor"} == named


@pytest.mark.parametrize("kind", ALONE)
def test_a_kind_takes_what_the_page_says(kind: str) -> None:
    _, drop, quantized, evicting, static, _ = table("| kind | rewind")[kind]
    for case in ALONE[kind]:
        model = ours(case)
        state = model.new_state()
        model([text(8)[0].tolist()], state)
        assert state.can_drop(0, 2, 4) == (drop != "no")
        asked: list[tuple[str, dict[str, Any]]] = [
            (quantized, {"kv": kv.Quantized(8)}),
            (evicting, {"kv": kv.Recent(200)}),
            (static, {"static": True, "capacity": 100}),
        ]
        for said, options in asked:
            if said == "no":
                with pytest.raises(lmstate.UnsupportedError):
                    model.new_state(**options)
            else:
                model.new_state(**options)
