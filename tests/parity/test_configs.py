"""What configs leave out, say twice or say beside the weights means the same as in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmstate.models.decoder import Model
from lmstate.models.families import build
from lmstate.models.families.defaults import DEFAULTS
from lmstate.models.weights.source import open_source
from lmstate.models.weights.weights import Weights
from tests.zoo import CASES, auto_class, model_class, randomise, text

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "zero_expert_num",
)
ROPES = ("rope_parameters", "rope_scaling", "rope_theta")
Config = dict[str, Any]


def saved(folder: Path, case: str, change: Callable[[Config], None], **fields: Any) -> tuple[Any, Model]:
    """A model of the zoo, some fields of its config changed before it is made and others after; theirs and ours."""
    config = CASES[case]()
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    made = model_class(config)._from_config(config, dtype=torch.float32)
    randomise(made)
    made.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))
    theirs = auto_class(config).from_pretrained(folder, dtype=torch.float32).eval()
    return theirs, build(Weights(open_source(folder), "float32"))


def same(theirs: Any, ours: Model, length: int = 140) -> None:
    ids = text(length)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


# A case of each family with defaults, but for those that are sizes alone.
SPARSE = {
    "bamba": "bamba", "cohere2": "cohere2", "deepseek_v3": "deepseek_v3", "falcon_h1": "falcon_h1", "gemma2": "gemma2",
    "gpt_oss": "gpt_oss-gate", "kimi_linear": "kimi_linear", "llama4_text": "llama4", "minimax": "minimax",
    "mistral": "mistral", "mixtral": "mixtral", "olmo2": "olmo2", "olmo3": "olmo3", "phi3": "phi3", "qwen2": "qwen2",
    "qwen3": "qwen3", "qwen3_moe": "qwen3_moe", "smollm3": "smollm3", "zamba2": "zamba2",
    "axk1": "axk1", "dots1": "dots1", "ernie4_5_moe": "ernie4_5_moe", "glm4_moe": "glm4_moe",
    "glm4_moe_lite": "glm4_moe_lite", "minimax_m2": "minimax_m2", "mistral4": "mistral4", "olmoe": "olmoe",
    "qwen2_moe": "qwen2_moe", "solar_open": "solar_open", "afmoe": "afmoe", "exaone_moe": "exaone_moe",
    "flex_olmo": "flex_olmo", "laguna": "laguna",
    "longcat_flash": "longcat_flash", "mellum": "mellum", "mimo_v2_flash": "mimo_v2_flash", "phimoe": "phimoe",
}  # fmt: skip


@pytest.mark.parametrize("family", SPARSE)
def test_a_field_that_is_left_out_has_the_default_of_its_class(family: str, tmp_path: Path) -> None:
    def sparse(config: Config) -> None:
        assert config["model_type"] == family
        for name in DEFAULTS[family]:
            if name not in SIZES:
                config.pop(name, None)
        if any(name in DEFAULTS[family] for name in ROPES):
            for name in ROPES:
                config.pop(name, None)

    same(*saved(tmp_path, SPARSE[family], sparse))


def test_every_family_with_defaults_is_tested() -> None:
    # kimi_k2 has those of deepseek_v3; for the others see tests/models/test_older_checkpoints.py
    assert set(DEFAULTS) - set(SPARSE) == {"gemma3_text", "kimi_k2", "llama"}
