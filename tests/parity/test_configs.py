"""What configs leave out, say twice or say beside the weights means the same as in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmstate.models.decoder import Model
from lmstate.models.families import build
from lmstate.models.families.defaults import DEFAULTS
from lmstate.models.weights.source import open_source
from lmstate.models.weights.weights import Weights
from tests.zoo import CASES, auto, pair, randomise, text

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "n_positions",
    "num_local_experts",
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
    made = auto(config).from_config(config, dtype=torch.float32)
    randomise(made)
    made.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))
    theirs = auto(config).from_pretrained(folder, dtype=torch.float32).eval()
    return theirs, build(Weights(open_source(folder), "float32"))


def same(theirs: Any, ours: Model, length: int = 140) -> None:
    ids = text(length)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


# A case of each family with defaults, but for those that are sizes alone.
SPARSE = {
    "apertus": "apertus", "arcee": "arcee", "bamba": "bamba", "cohere": "cohere", "cohere2": "cohere2",
    "deepseek_v3": "deepseek_v3", "ernie4_5": "ernie4_5", "exaone4": "exaone4", "falcon": "falcon",
    "falcon_h1": "falcon_h1", "gemma": "gemma", "gemma2": "gemma2", "glm": "glm", "glm4": "glm4", "gpt2": "gpt2",
    "gpt_neox": "gpt_neox", "gpt_oss": "gpt_oss-gate", "granite_swa": "granite_swa", "helium": "helium",
    "hunyuan_v1_dense": "hunyuan_v1_dense", "kimi_linear": "kimi_linear", "llama4_text": "llama4",
    "minimax": "minimax", "ministral": "ministral", "ministral3": "ministral3", "mistral": "mistral",
    "mixtral": "mixtral", "nanochat": "nanochat", "nemotron": "nemotron", "olmo2": "olmo2", "olmo3": "olmo3",
    "phi": "phi", "phi3": "phi3", "qwen2": "qwen2", "qwen2_5_vl_text": "qwen2_5_vl", "qwen2_vl_text": "qwen2_vl",
    "qwen3": "qwen3", "qwen3_moe": "qwen3_moe", "qwen3_vl_text": "qwen3_vl", "seed_oss": "seed_oss",
    "smollm3": "smollm3", "stablelm": "stablelm", "starcoder2": "starcoder2", "zamba2": "zamba2",
    "axk1": "axk1", "dots1": "dots1", "ernie4_5_moe": "ernie4_5_moe", "glm4_moe": "glm4_moe",
    "glm4_moe_lite": "glm4_moe_lite", "minimax_m2": "minimax_m2", "mistral4": "mistral4", "olmoe": "olmoe",
    "qwen2_moe": "qwen2_moe", "solar_open": "solar_open", "afmoe": "afmoe", "exaone_moe": "exaone_moe",
    "flex_olmo": "flex_olmo", "laguna": "laguna", "longcat_flash": "longcat_flash", "mellum": "mellum",
    "mimo_v2_flash": "mimo_v2_flash", "phimoe": "phimoe", "granitemoe_swa": "granitemoe_swa",
    "hunyuan_v1_moe": "hunyuan_v1_moe",
}  # fmt: skip


@pytest.mark.parametrize("family", SPARSE)
def test_a_field_that_is_left_out_has_the_default_of_its_class(family: str, tmp_path: Path) -> None:
    def sparse(config: Config) -> None:
        config = config.get("text_config", config)
        assert config["model_type"] == family
        sections = (config.get("rope_parameters") or {}).get(
            "mrope_section"
        )  # of which no class knows for so small a head
        for name in DEFAULTS[family]:
            if name not in SIZES:
                config.pop(name, None)
        if any(name in DEFAULTS[family] for name in ROPES):
            for name in ROPES:
                config.pop(name, None)
            if sections:
                config["rope_scaling"] = {"rope_type": "default", "mrope_section": sections}

    same(*saved(tmp_path, SPARSE[family], sparse))


def test_every_family_with_defaults_is_tested() -> None:
    # kimi_k2 has those of deepseek_v3; for the others see tests/models/test_older_checkpoints.py
    assert set(DEFAULTS) - set(SPARSE) == {"gemma3_text", "kimi_k2", "llama"}


@pytest.mark.parametrize("case", ["mistral", "mixtral"])
@pytest.mark.parametrize("field", [{"use_sliding_window": False}, {"max_window_layers": 2}])
def test_every_layer_of_mistral_has_the_window(case: str, field: Config, tmp_path: Path) -> None:
    same(*saved(tmp_path, case, lambda config: config.update(field)))


def test_layer_types_of_mistral_are_those_of_ministral(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    same(*saved(tmp_path, "mistral", lambda config: config.update(layer_types=kinds)))


@pytest.mark.parametrize("case", ["exaone4", "granite_swa"])
def test_a_pattern_of_windows_that_is_left_out_is_that_of_its_class(case: str, tmp_path: Path) -> None:
    same(*saved(tmp_path, case, lambda config: config.pop("layer_types")))


def test_every_layer_of_qwen3_moe_has_the_window(tmp_path: Path) -> None:
    more = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}
    same(*saved(tmp_path, "qwen3_moe", lambda config: config.update(more)))


@pytest.mark.parametrize("case", ["llama", "gemma3", "nemotron_h", "kimi_linear"])
def test_a_head_of_its_own_goes_before_what_the_config_says(case: str, tmp_path: Path) -> None:
    def tie(config: Config) -> None:
        config["tie_word_embeddings"] = True

    theirs, ours = saved(tmp_path, case, tie, tie_word_embeddings=False)
    assert not torch.equal(theirs.lm_head.weight, theirs.get_input_embeddings().weight)
    same(theirs, ours)


def test_a_head_that_repeats_the_embedding_is_held_once(tmp_path: Path) -> None:
    saved(tmp_path, "llama", lambda config: config.update(tie_word_embeddings=True), tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    model = build(Weights(open_source(tmp_path), "float32"))
    assert model.head is model.embed


@pytest.mark.parametrize("case", ["llama4", "hunyuan_v1_dense", "nanochat"])
def test_a_rope_that_scales_heads_before_they_are_normalised(case: str, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    same(*saved(tmp_path, case, lambda config: config.update(rope_parameters=rope)))


def test_the_native_length_outside_goes_before_that_inside(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    more = {"rope_parameters": rope, "original_max_position_embeddings": 32}
    same(*saved(tmp_path, "llama", lambda config: config.update(more)))


def test_long_texts_of_phimoe_rotate_by_the_long_factors(tmp_path: Path) -> None:
    theirs, _ = pair("phimoe-longrope")
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] |= {"short_factor": [1.0, 2.0, 3.0, 4.0], "short_mscale": 2.0}
    path.write_text(json.dumps(config))
    ours = build(Weights(open_source(tmp_path), "float32"))
    same(theirs, ours)
    with pytest.raises(AssertionError):
        same(theirs, ours, length=60)


def test_phi3_calls_its_longrope_yarn(tmp_path: Path) -> None:
    def renamed(config: Config) -> None:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        rope.pop("rope_type")
        config["rope_scaling"] = {**rope, "type": "yarn"}

    case = next(case for case in CASES if case.startswith("phi3") and "longrope" in str(CASES[case]().rope_parameters))
    same(*saved(tmp_path, case, renamed))
