"""The families that lmstate runs: one small file each, and a line in this table.

The table is read without torch; `build` imports it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lmstate.errors import ModelError

if TYPE_CHECKING:
    from lmstate.checkpoints.loader import WeightLoader
    from lmstate.models.model import Model

MOST_STRETCHED = 32
"""Times the tokens that a model was made for, up to which YaRN's paper (2309.00071) measured what it gives."""

# model_type of a config -> the module that builds it.
FAMILIES = {
    "afmoe": "afmoe",
    "apertus": "apertus",
    "apertus1p5_text": "apertus",
    "arcee": "llama",
    "aria_text": "aria",
    "axk1": "deepseek",
    "axk2": "axk2",
    "bailing_hybrid": "bailing_hybrid",
    "bamba": "bamba",
    "bart": "bart",
    "beam": "beam",
    "biogpt": "opt",
    "bitnet": "bitnet",
    "bloom": "bloom",
    "codegen": "gptj",
    "cohere": "cohere",
    "cohere2": "cohere",
    "cohere2_moe": "cohere2_moe",
    "cohere_compass_text": "cohere",
    "cwm": "mistral",
    "dbrx": "dbrx",
    "deepseek": "deepseek_moe",
    "deepseek_ocr2_text": "deepseek_moe",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v32": "deepseek",
    "deepseek_v4": "deepseek_v4",
    "diffllama": "diffllama",
    "doge": "doge",
    "dory": "dory",
    "dots1": "dots1",
    "dots3_note_text": "dots3_note",
    "emu3_text_model": "llama",
    "ernie4_5": "llama",
    "ernie4_5_moe": "ernie4_5_moe",
    "ernie4_5_vl_moe_text": "ernie4_5_moe",
    "exaone": "exaone",
    "exaone4": "exaone4",
    "exaone_moe": "exaone_moe",
    "falcon": "falcon",
    "falcon_h1": "falcon_h1",
    "falcon_mamba": "mamba",
    "flex_olmo": "olmo2",
    "flint": "flint",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma2",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "glm": "glm",
    "glm4": "glm",
    "glm4_moe": "glm4_moe",
    "glm4_moe_lite": "deepseek",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm",
    "glm_ocr_text": "glm",
    "glm5_next_text": "glm5_next",
    "glm_moe_dsa": "deepseek",
    "gpt2": "gpt2",
    "gpt_bigcode": "gpt_bigcode",
    "gpt_neo": "gpt_neo",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "gptj": "gptj",
    "granite": "granite",
    "granite4_vision_text": "granite",
    "granite_docling_text": "granite",
    "granite_swa": "granite_swa",
    "granitemoe": "granite",
    "granitemoe_swa": "granite_swa",
    "granitemoehybrid": "granite",
    "granitemoeshared": "granite",
    "helium": "llama",
    "hunyuan_v1_dense": "hunyuan",
    "hunyuan_v1_moe": "hunyuan",
    "hunyuan_vl_text": "hunyuan",
    "hy_v3": "hy_v3",
    "hy_v4": "hy_v4",
    "hyperclovax": "hyperclovax",
    "inkling2_loop_text": "inkling2",
    "inkling2_text": "inkling2",
    "inkling_text": "inkling",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "jais2": "jais2",
    "jamba": "jamba",
    "jetmoe": "jetmoe",
    "kimi_k2": "deepseek",
    "kimi_linear": "kimi_linear",
    "kolibri1": "kolibri1",
    "laguna": "laguna",
    "lara_mini": "lara_mini",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "lfm3": "lfm3",
    "llama": "llama",
    "llama4_text": "llama4",
    "longcat_flash": "longcat_flash",
    "m2m_100": "bart",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "marian": "bart",
    "mbart": "bart",
    "mellum": "mellum",
    "mimo": "qwen2",
    "mimo_v2_flash": "mimo_v2_flash",
    "minicpm3": "minicpm3",
    "minimax": "minimax",
    "minimax_m2": "minimax_m2",
    "minimax_m3_vl_text": "minimax_m3",
    "ministral": "mistral",
    "ministral3": "mistral",
    "mistral": "mistral",
    "mistral4": "deepseek",
    "mixtral": "mistral",
    "mllama_text_model": "llama",
    "modernbert-decoder": "modernbert_decoder",
    "mpt": "mpt",
    "mt5": "t5",
    "muse_glimmer_text": "muse_glimmer",
    "nanochat": "nanochat",
    "nemotron": "nemotron",
    "nemotron_h": "nemotron_h",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmo_hybrid": "olmo_hybrid",
    "olmoe": "olmoe",
    "opt": "opt",
    "paddleocr_vl_text": "llama",
    "pegasus": "bart",
    "persimmon": "persimmon",
    "phi": "phi",
    "phi3": "phi3",
    "phi4_multimodal": "phi3",
    "phi4mm": "phi3",
    "phimoe": "phimoe",
    "qwen2": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_moe": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5_moe_text": "qwen3_next",
    "qwen3_5_text": "qwen3_next",
    "qwen3_moe": "qwen3",
    "qwen3_next": "qwen3_next",
    "qwen3_omni_moe_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen4_exp_text": "qwen4_exp",
    "recurrent_gemma": "recurrent_gemma",
    "rwkv": "rwkv",
    "rwkv7": "rwkv7",
    "sarvam_mla": "deepseek",
    "sarvam_moe": "glm4_moe",
    "seed_oss": "llama",
    "smallthinker": "smallthinker",
    "smollm3": "smollm3",
    "solar_open": "glm4_moe",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "step3p5": "step3p5",
    "t5": "t5",
    "t5gemma": "t5gemma",
    "umt5": "t5",
    "vaultgemma": "gemma2",
    "whisper": "whisper",
    "xglm": "opt",
    "xlstm": "xlstm",
    "youtu": "deepseek",
    "zamba": "zamba",
    "zamba2": "zamba2",
    "zaya": "zaya",
}

# Whose first checkpoints hold what is the text model's in the config itself -> the text model's own type.
FLAT = {
    "dots3_note": "dots3_note_text",
    "hunyuan_vl": "hunyuan_vl_text",
    "paddleocr_vl": "paddleocr_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
}


def build(w: WeightLoader) -> Model:
    """The model of an open checkpoint; of a multimodal one, its text model.

    Raises `ModelError` for a family that is not in the table, for a checkpoint without a head, and where prediction
    heads are wanted and there are none.
    """
    from lmstate.checkpoints.config import Config
    from lmstate.checkpoints.renamed import require_head
    from lmstate.checkpoints.text_model import TextModelSource
    from lmstate.models.families.builders.defaults import completed
    from lmstate.models.heads.published import is_drafter
    from lmstate.models.layers.rope import stretched

    whole = w.config.fields("thinker_config", default=w.config) or w.config  # of a model that also speaks
    text, family = whole.fields("text_config"), w.config.str("model_type", default="")
    if text is None and family in FLAT:
        text = Config({**w.config, "model_type": FLAT[family]}, w.config.where)
    if family == "paligemma" and text is not None:  # both directions in front of an answer, whatever the text's config
        text = Config({**text, "use_bidirectional_attention": False, "whole_pictures": True}, text.where)
    family = (w.config if text is None else text).str("model_type")
    if is_drafter(w.source.config):
        raise ModelError(
            f"{w.source.path} drafts for another model and is not one by itself; load that model with "
            "heads=... (--draft on the command line) and this path"
        )
    if family not in FAMILIES:  # said before anything is missed that such a model does not have
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"models of the family {family!r} are not supported; supported are {known}")
    if text is not None:
        w = w.over(TextModelSource(w.source, text))
    else:
        require_head(w.source, w.source.config)
    w.config = completed(w.config, defaults(family))
    if w.context_size is not None:
        w.config = stretched(w.config, w.context_size)
    model: Model = _module(family).build(w)
    model.context_size = _context_size(model, w.context_size)
    if w.heads and not model.heads:
        raise ModelError(
            f"heads=True was asked for, and {w.source.path} has no multi-token prediction heads that lmstate reads "
            f"in a {family} model; leave heads out"
        )
    return model


def _context_size(model: Model, asked: int | None) -> int | None:
    """Tokens that texts may have. Raises `ModelError` for more than the model was made for, and is not stretched to."""
    from lmstate.models.fingerprint import instances
    from lmstate.models.layers.rope import Rope

    made_for = model.config.max_positions
    if asked is None or made_for is None or asked <= made_for:
        return asked or made_for
    if all(rope.scale == 1.0 for _, rope in instances(model.blocks, Rope)):  # that of YaRN is above
        raise ModelError(
            f"context_size={asked} was asked for, and this {model.config.family} model was made for {made_for} tokens; "
            f"YaRN does not stretch its positions: use context_size={made_for} or less"
        )
    if asked > MOST_STRETCHED * made_for:
        warnings.warn(
            f"context_size={asked} was asked for, {asked / made_for:.0f} times the {made_for} tokens that the model "
            f"was made for; YaRN was measured up to {MOST_STRETCHED} times: answers may be nonsense, to short texts "
            f"too; use context_size={MOST_STRETCHED * made_for} or less",
            UserWarning,
            stacklevel=2,
        )
    return asked


def defaults(family: str) -> Mapping[str, Any]:
    """The defaults of a family's config class, for the fields that its configs may leave out."""
    found: Mapping[str, Any] = _module(family).DEFAULTS.get(family, {})
    return found


def _module(family: str) -> ModuleType:
    return import_module(f"lmstate.models.families.{FAMILIES[family]}")
