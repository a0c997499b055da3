"""What configs leave out, say twice or say beside the weights means the same as in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.errors import ModelError
from lmstate.models.families import FAMILIES, bailing_hybrid, build, defaults
from lmstate.models.model import Model
from tests.zoo import CASES, auto, pair, randomize, text

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_kv_shared_layers",
    "laurel_rank",
    "n_positions",
    "moe_intermediate_size",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "q_lora_rank",
    "rotary_dim",
    "zero_expert_num",
    "kv_channels",
    "moe_num_experts",
    "moe_num_shared_experts",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "share_expert_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_experts_per_tok",
    "o_groups",
    "o_lora_rank",
    "shared_experts_intermediate_size",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_head_dim",
    "sliding_window_size",
    "d_rel",
    "rel_extent",
    "unpadded_vocab_size",
    "n_layers_per_attn_res_block",
    "loop_layer_index_start",
    "loop_layer_index_end",
    "loop_gate_rank",
    "n_input_layers",
    "n_recurrent_layers",
    "n_output_layers",
    # Of Dory, whose weights are made for it: by the default the scores of random ones are 72 times as large.
    "initializer_range",
)
LEARNED = ("biogpt", "gpt_neo", "opt")  # have a row of weights for each position
ROPES = ("rope_parameters", "rope_scaling", "rope_theta")
Config = dict[str, Any]


def saved(folder: Path, case: str, change: Callable[[Config], None], **fields: Any) -> tuple[Any, Model]:
    """A model of the zoo, some fields of its config changed before it is made and others after; theirs and ours."""
    config = CASES[case]()
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    made = auto(config).from_config(config, dtype=torch.float32)
    randomize(made)
    made.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))
    theirs = auto(config).from_pretrained(folder, dtype=torch.float32).eval()
    return theirs, build(WeightLoader(open_source(folder), "float32"))


def same(theirs: Any, ours: Model, length: int = 140) -> None:
    ids = text(length)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


# A case of each family with defaults, but for some: kimi_k2 has those of deepseek_v3, mimo those of qwen2; else see
# tests/models/test_older_checkpoints.py.
SPARSE = {
    family: family.removesuffix("_text")
    for family in sorted(
        {family for family in FAMILIES if defaults(family)} - {"gemma3_text", "kimi_k2", "llama", "mimo"}
    )
}
SPARSE["gpt_oss"] = "gpt_oss-gate"


@pytest.mark.parametrize("family", [family for family in SPARSE if SPARSE[family] in CASES])
def test_a_field_that_is_left_out_has_the_default_of_its_class(family: str, tmp_path: Path) -> None:
    def sparse(config: Config) -> None:
        config = config.get("text_config", config)
        assert config["model_type"] == family
        sections = (config.get("rope_parameters") or {}).get(
            "mrope_section"
        )  # of which no class knows for so small a head
        for name in defaults(family):
            if name not in SIZES and (name != "max_position_embeddings" or family not in LEARNED):
                config.pop(name, None)
        if any(name in defaults(family) for name in ROPES):
            for name in ROPES:
                config.pop(name, None)
            if sections:
                config["rope_scaling"] = {"rope_type": "default", "mrope_section": sections}

    same(*saved(tmp_path, SPARSE[family], sparse))


@pytest.mark.parametrize("family", ["cohere2", "exaone4", "ministral3", "mistral4", "qwen3_vl_moe_text"])
def test_a_size_that_a_wrapped_text_model_leaves_out_is_that_of_its_class(family: str, tmp_path: Path) -> None:
    theirs, _ = pair(family.removesuffix("_text"))
    theirs.save_pretrained(tmp_path)
    default = type(getattr(theirs.config, "text_config", theirs.config))()
    whole = (tmp_path / "config.json").read_text()
    for name in SIZES:
        config = json.loads(whole)
        if config.get("text_config", config).pop(name, None) is None or getattr(default, name) is None:
            continue
        assert defaults(family).get(name, getattr(default, name)) == getattr(default, name)
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            build(WeightLoader(open_source(tmp_path), "float32"))
        except ModelError as error:
            assert f"lacks {name!r}" not in str(error)


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


@pytest.mark.parametrize("case", ["gemma4", "gemma4-experts", "laguna", "lfm3", "zaya-windows"])
def test_a_family_with_ropes_by_kind_has_those_of_its_class(case: str, tmp_path: Path) -> None:
    same(*saved(tmp_path, case, lambda config: config.update(rope_parameters=None)))


def test_a_stretched_rope_of_mimo_turns_all_of_a_head(tmp_path: Path) -> None:
    def stretched(config: Config) -> None:
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        config["rope_parameters"] = {
            "full_attention": {**plain, "rope_type": "linear", "factor": 2.0},
            "sliding_attention": plain,
        }

    same(*saved(tmp_path, "mimo_v2_flash", stretched))


@pytest.mark.parametrize("kinds", [None, ["sliding_attention"] * 4])
def test_the_last_layer_of_gemma4_sees_everything(kinds: list[str] | None, tmp_path: Path) -> None:
    same(*saved(tmp_path, "gemma4-experts", lambda config: config.update(layer_types=kinds)))


@pytest.mark.parametrize(
    ("case", "field"),
    [
        ("afmoe", "num_shared_experts"),
        ("bailing_hybrid", "num_shared_experts"),
        ("glm4_moe", "n_shared_experts"),
        ("kimi_linear", "num_shared_experts"),
    ],
)
def test_experts_may_be_without_shared_ones(case: str, field: str, tmp_path: Path) -> None:
    same(*saved(tmp_path, case, lambda config: None, **{field: 0}))


@pytest.mark.parametrize("case", ["dots1-groups", "exaone_moe-groups", "glm4_moe-groups", "mistral4-groups"])
def test_one_group_of_experts_counts_where_a_config_does_not_say(case: str, tmp_path: Path) -> None:
    same(*saved(tmp_path, case, lambda config: config.pop("topk_group"), num_experts_per_tok=2))


@pytest.mark.parametrize(("case", "field"), [("dots1", "norm_topk_prob"), ("axk1", "rope_interleave")])
def test_an_option_that_is_null_is_off(case: str, field: str, tmp_path: Path) -> None:
    assert CASES[case]().to_dict()[field] is True
    same(*saved(tmp_path, case, lambda config: config.update({field: None})))


def test_a_rope_of_no_kind_beside_those_of_kinds_counts_for_nothing(tmp_path: Path) -> None:
    def published(config: Config) -> None:
        config["rope_parameters"]["rope_type"] = "default"

    same(*saved(tmp_path, "zaya-windows", published))


def test_ling_reads_its_fields_under_the_names_of_its_class_too(tmp_path: Path) -> None:
    def renamed(config: Config) -> None:
        for name, other, _ in bailing_hybrid.NAMES:
            config[other] = config.pop(name, None) or config[other]
        for name in ("layer_types", "mlp_layer_types", "rope_parameters"):
            del config[name]
        config["head_dim"] = config.pop("linear_head_dim")
        config["partial_rotary_factor"] = 0.5  # which its class takes no notice of

    same(*saved(tmp_path, "bailing_hybrid", renamed))


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
    model = build(WeightLoader(open_source(tmp_path), "float32"))
    assert model.head is model.embed


@pytest.mark.parametrize("case", ["llama4", "hunyuan_v1_dense", "nanochat"])
def test_a_rope_that_scales_heads_before_they_are_normalized(case: str, tmp_path: Path) -> None:
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
    ours = build(WeightLoader(open_source(tmp_path), "float32"))
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


@pytest.mark.parametrize("case", ["mamba", "falcon_mamba"])
def test_a_width_that_is_given_goes_before_a_factor_of_the_hidden_size(case: str, tmp_path: Path) -> None:
    theirs, ours = saved(tmp_path, case, lambda config: None, intermediate_size=32, expand=16)
    assert theirs.backbone.layers[0].mixer.D.shape == (32,)
    same(theirs, ours)


@pytest.mark.parametrize("case", ["granite", "granitemoe", "granitemoehybrid"])
def test_a_residual_multiplier_of_0_adds_nothing(case: str, tmp_path: Path) -> None:
    same(*saved(tmp_path, case, lambda config: None, residual_multiplier=0.0))


WINDOWED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize("kinds", [WINDOWED, None])
@pytest.mark.parametrize("switch", [True, False])
def test_windows_of_smollm3_are_those_of_its_layer_types_else_where_nothing_rotates(
    kinds: list[str] | None, switch: bool, tmp_path: Path
) -> None:
    more = {"use_sliding_window": switch, "sliding_window": 12, "layer_types": kinds}
    same(*saved(tmp_path, "smollm3", lambda config: config.update(more)))
