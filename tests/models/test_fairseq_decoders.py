"""What OPT, BioGPT and XGLM may ask for and lmstate cannot do is refused by name, before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lmstate
from lmstate.errors import ModelError
from tests.zoo import pair


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("opt", {"do_layer_norm_before": False}, "'do_layer_norm_before' = False"),
        ("opt", {"_remove_final_layer_norm": True}, "'_remove_final_layer_norm' = True"),
        ("opt", {"word_embed_proj_dim": 24}, "embeddings of width 24 in a model of width 48"),
        ("opt", {"num_attention_heads": 5, "num_key_value_heads": 5}, "5 heads cannot share a width of 48"),
        ("xglm", {"d_model": 2**20, "attention_heads": 4}, "embed_tokens.weight"),
        ("xglm", {"max_position_embeddings": 2**40}, "max_position_embeddings"),
    ],
)
def test_what_is_not_supported_is_refused(case: str, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    theirs, _ = pair(case)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=said):
        lmstate.load(tmp_path)
