"""Options of a config that lmstate cannot do are refused by name, and never silently ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lmstate
from lmstate.errors import ModelError
from tests.zoo import pair

REFUSED = {
    "ALiBi": ("falcon", {"alibi": True}),
    "new architecture": ("falcon-grouped", {"parallel_attn": False}),
    "cannot share": ("falcon-grouped", {"num_kv_heads": 4}),
    "both directions": ("gemma", {"use_bidirectional_attention": True}),
    "'hidden_act' = 'quick_gelu'": ("apertus", {"hidden_act": "quick_gelu"}),
    "another text": ("gpt2", {"add_cross_attention": True}),
    "logits_scaling = 0": ("granite_swa", {"logits_scaling": 0.0}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_option_that_cannot_be_is_refused(message: str, tmp_path: Path) -> None:
    case, change = REFUSED[message]
    pair(case)[0].save_pretrained(tmp_path)
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        lmstate.load(tmp_path)
