"""Multimodal checkpoints load as their text model, whatever lies beside it; what lies in it is used or refused."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import lmstate
from lmstate.errors import ModelError
from tests.zoo import randomize
from tests.zoo import text as ids
from tests.zoo.small import tower

SPEECH = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 48,
    "downsample_hidden_size": 16, "n_window": 4,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

LATENT: dict[str, Any] = {
    "num_key_value_heads": 6, "kv_lora_rank": 20, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
# What text models get beside that; some are of another kind in their first layers alone.
MORE: dict[str, dict[str, Any]] = {
    "DeepseekV3": LATENT,
    "Lfm3": {"layer_types": ["conv", "sliding_attention"], "sliding_window": 9},
    "Mistral4": LATENT,
}

# A wrapper, its text model, and how the names of what is beside that begin.
WRAPPERS = {
    "Idefics2": ("Mistral", "model.connector."),
    "Idefics3": ("Llama", "model.connector."),
    "SmolVLM": ("Llama", "model.vision_model."),
    "LlavaNext": ("Mistral", "image_newline"),
    "LlavaNextVideo": ("Llama", "image_newline"),
    "LlavaOnevision": ("Qwen2", "image_newline"),
    "VideoLlava": ("Llama", "image_tower."),
    "VideoLlama3": ("Qwen2", "model.projector."),
    "GraniteSpeech": ("Granite", "encoder."),
    "DeepseekVL": ("Llama", "model.aligner."),
    "DeepseekVLHybrid": ("Llama", "model.high_res_vision_model."),
    "Janus": ("Llama", "model.generation_"),
    "Mistral3": ("Ministral3", "multi_modal_projector."),
    "LightOnOcr": ("Qwen3", "model.vision_encoder."),
    "HyperCLOVAXVisionV2": ("Granite", "model.vision_projector."),
    "Lfm3Vl": ("Lfm3", "model.multi_modal_projector."),
    "VibeVoiceAsr": ("Qwen2", "acoustic_tokenizer_encoder."),
}


def wrapper(name: str, text: str, tied: bool) -> Any:
    """A wrapper of transformers with small towers and random weights."""
    own = getattr(transformers, f"{name}Config")
    default = own()
    parts = {
        part: tower(value)
        for part, value in vars(default).items()
        if part != "text_config" and isinstance(value, transformers.PretrainedConfig)
    }
    known = default.to_dict()
    marks = {part: 98 for part in known if part.endswith(("token_id", "token_index")) and known[part] is not None}
    if "tie_word_embeddings" in known:
        marks["tie_word_embeddings"] = tied
    text_config = getattr(transformers, f"{text}Config")(**{**TEXT, **MORE.get(text, {})}, tie_word_embeddings=tied)
    torch.manual_seed(0)
    make = getattr(transformers, f"{name}ForConditionalGeneration")
    theirs = make(own(text_config=text_config, **parts, **marks)).float().eval()
    randomize(theirs)
    return theirs


def logits(theirs: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = theirs(input_ids=tokens).logits
    return found


def rewritten(folder: Path, theirs: Any, rename: Any = lambda name: name, **more: Tensor) -> Path:
    """A saved model, with other names for its tensors and more of them."""
    theirs.save_pretrained(folder)
    tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def omni(name: str) -> Any:
    """What thinks in a model that also speaks."""
    module = "qwen3_omni_moe" if name == "Qwen3OmniMoe" else "qwen2_5_omni"
    configs = import_module(f"transformers.models.{module}.configuration_{module}")
    own = getattr(configs, f"{name}ThinkerConfig")
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    experts = {"head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    text = getattr(configs, f"{name}TextConfig")(**TEXT, **rope, **(experts if name == "Qwen3OmniMoe" else {}))
    default = own()
    towers = {
        part: tower(value).to_dict()
        for part, value in vars(default).items()
        if part != "text_config" and isinstance(value, transformers.PretrainedConfig)
    }
    for part in towers.values():
        part |= {name: size for name, size in SPEECH.items() if name in part}
    marks = {part: 98 for part in default.to_dict() if part.endswith(("token_id", "token_index"))}
    made = import_module(f"transformers.models.{module}.modeling_{module}")
    torch.manual_seed(0)
    model = getattr(made, f"{name}ThinkerForConditionalGeneration")
    theirs = model(own(text_config=text.to_dict(), **towers, **marks)).float().eval()
    randomize(theirs)
    return theirs


@pytest.mark.parametrize("name", ["Qwen3OmniMoe", "Qwen2_5Omni"])
def test_a_model_that_speaks_loads_as_the_text_model_that_thinks(name: str, tmp_path: Path) -> None:
    theirs = omni(name)
    rewritten(tmp_path, theirs, lambda each: f"thinker.{each}", **{"talker.model.embed.weight": torch.ones(2, 2)})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name.lower(), "thinker_config": config}))
    tokens = ids(40) % 90
    ours = lmstate.load(tmp_path, weights="float32")
    assert (ours(tokens.tolist())[0] - logits(theirs, tokens)[0]).abs().max() < 1e-4


def llava(tied: bool = False) -> Any:
    return wrapper("Llava", "Llama", tied)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_loads_as_its_text_model(name: str, tmp_path: Path) -> None:
    text, beside = WRAPPERS[name]
    theirs = wrapper(name, text, tied=False)
    theirs.save_pretrained(tmp_path)
    assert any(each.startswith(beside) for each in load_file(tmp_path / "model.safetensors"))
    tokens = ids(40) % 90
    ours = lmstate.load(tmp_path, weights="float32")
    torch.testing.assert_close(ours(tokens), logits(theirs, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("text", ["Gemma", "Gemma2"])
def test_paligemma_reads_a_text_without_pictures_forward(text: str, tmp_path: Path) -> None:
    """Its text's config asks for both directions, which are those of a picture and its question."""
    theirs = wrapper("PaliGemma", text, tied=True)
    theirs.save_pretrained(tmp_path)
    tokens = ids(40) % 90
    for said in (True, None):
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["text_config"].pop("use_bidirectional_attention", None) is said
        ours = lmstate.load(tmp_path, weights="float32")
        with torch.no_grad():
            expected = theirs(input_ids=tokens, token_type_ids=torch.ones_like(tokens)).logits  # of an answer
        torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=1e-4)
        (tmp_path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "text", "family"), [("Kimi_K25", "DeepseekV3", "kimi_k2"), ("Mistral3", "Mistral4", "mistral4")]
)
def test_a_wrapper_of_experts_loads_as_its_text_model(name: str, text: str, family: str, tmp_path: Path) -> None:
    theirs = wrapper(name, text, tied=False)

    def rename(name: str) -> str:  # transformers 5.23 takes the name of the tower's layers for that of all
        return name.replace("language_model.model.blocks.", "language_model.model.layers.")

    rewritten(tmp_path, theirs, rename)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = family
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = ids(40) % 90
    ours = lmstate.load(tmp_path, weights="float32")
    torch.testing.assert_close(ours(tokens), logits(theirs, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Idefics3", "LlavaNext", "HyperCLOVAXVisionV2"])
def test_a_wrapper_may_tie_the_head(name: str, tmp_path: Path) -> None:
    theirs = wrapper(name, WRAPPERS[name][0], tied=True)
    theirs.save_pretrained(tmp_path)
    assert not any("lm_head" in each for each in load_file(tmp_path / "model.safetensors"))
    tokens = ids(40) % 90
    ours = lmstate.load(tmp_path, weights="float32")
    torch.testing.assert_close(ours(tokens), logits(theirs, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("model.language_model.", "lm_head."),
        ("model.language_model.", "model.lm_head."),
        ("model.text_model.", "language_model.lm_head."),
        ("text_model.", "lm_head."),
        ("model.", "lm_head."),
    ],
)
def test_the_text_model_and_its_head_are_found_wherever_wrappers_put_them(body: str, head: str, tmp_path: Path) -> None:
    theirs = llava()

    def rename(name: str) -> str:
        return name.replace("language_model.model.", body).replace("language_model.lm_head.", head)

    ours = lmstate.load(rewritten(tmp_path, theirs, rename), weights="float32")
    tokens = ids(40) % 90
    torch.testing.assert_close(ours(tokens), logits(theirs, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["LlavaNext", "Idefics3", "LightOnOcr"])
def test_a_wrapper_saved_without_its_head_loads_where_the_head_is_tied(name: str, tmp_path: Path) -> None:
    theirs = wrapper(name, WRAPPERS[name][0], tied=True)
    theirs.model.save_pretrained(tmp_path)
    tokens = ids(40) % 90
    ours = lmstate.load(tmp_path, weights="float32")
    torch.testing.assert_close(ours(tokens), logits(theirs, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["LlavaNext", "Idefics3", "LightOnOcr"])
def test_a_wrapper_saved_without_its_head_is_refused_where_it_is_not(name: str, tmp_path: Path) -> None:
    wrapper(name, WRAPPERS[name][0], tied=False).model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="without a language model head"):
        lmstate.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.adapter.weight",
        "language_model.adapter.weight",
        "language_model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "language_model.model.layers.7.input_layernorm.weight",
        "language_model.lm_head.bias",
        "lm_head.bias",
    ],
)
def test_a_tensor_inside_the_text_model_that_it_does_not_use_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=name.removeprefix("language_model.")):
        lmstate.load(rewritten(tmp_path, llava(), **{name: torch.zeros(3)}))


def test_an_unknown_tensor_beside_a_text_model_under_its_own_names_is_refused(tmp_path: Path) -> None:
    folder = rewritten(
        tmp_path, llava(), lambda name: name.removeprefix("language_model."), **{"model.x.weight": torch.zeros(3)}
    )
    with pytest.raises(ModelError, match=r"model\.x\.weight"):
        lmstate.load(folder)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("model.embed_tokens.weight", "no embedding of one is where lmstate looks"),
        ("model.layers.1.mlp.down_proj.weight", r"lacks the tensor 'model\.layers\.1\.mlp\.down_proj\.weight'"),
        ("model.norm.weight", r"lacks the tensor 'model\.norm\.weight'"),
    ],
)
def test_a_text_model_that_is_not_whole_is_refused(part: str, message: str, tmp_path: Path) -> None:
    folder = rewritten(tmp_path, llava(), lambda name: name.replace(f"language_model.{part}", f"vision.{part}"))
    with pytest.raises(ModelError, match=message):
        lmstate.load(folder)


def test_a_text_model_under_names_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    folder = rewritten(tmp_path, llava(), lambda name: name.replace("language_model.", "words."))
    with pytest.raises(ModelError, match=r"wraps a text model.*under language_model\."):
        lmstate.load(folder)


def test_a_text_model_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    more = {"model.language_model.model.norm.weight": torch.ones(48)}
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' twice, as 'language_model\.model\.norm\.weight'"):
        lmstate.load(rewritten(tmp_path, llava(), **more))


def test_a_quantization_that_the_text_config_names_is_refused_by_name(tmp_path: Path) -> None:
    more = {"language_model.model.layers.0.mlp.up_proj.numbers": torch.zeros(64, 6, dtype=torch.int32)}
    folder = rewritten(tmp_path, llava(), **more)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "elsewhere", "format": "of-its-own"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"'elsewhere' \('of-its-own'\)"):
        lmstate.load(folder)
