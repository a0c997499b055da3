"""The pooling that a checkpoint was trained for, from sentence-transformers' settings and from GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.tokenizer import generation_of
from lmstate.checkpoints.huggingface.directory import _pooling
from lmstate.checkpoints.open import generation_defaults


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_max_tokens": True}, "max_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls+mean"),
        ({"word_embedding_dimension": 64}, None),
    ],
)
def test_a_folder_names_its_pooling(tmp_path: Path, settings: dict[str, object], pooling: str | None) -> None:
    assert _pooling(tmp_path) is None
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    assert _pooling(tmp_path) == pooling


@pytest.mark.parametrize(
    ("number", "pooling"), [(0, None), (1, "mean"), (2, "cls"), (3, "last"), (4, "rank"), (9, "type 9")]
)
def test_a_gguf_file_names_its_pooling(number: int, pooling: str | None) -> None:
    metadata = Config({"general.architecture": "llama", "llama.pooling_type": number}, "a.gguf")
    generation = generation_of(metadata, 8)
    assert generation.get("pooling") == pooling
    assert generation_defaults(generation, {}).get("pooling") == pooling
