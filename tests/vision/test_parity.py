"""Pictures through transformers' towers: the logits of transformers, at every cut of the text."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from lmstate.vision import Tower, families
from lmstate.vision.tower import has_tower
from tests.zoo import randomize
from tests.zoo import text as words

IMAGE = 98
PREFIX = 11  # tokens of a question that are one piece with the pictures in front of it (PaliGemma)
MARKS = (80, 81, 82, 83, 84)  # tokens around a picture that have embeddings of its tower (Ovis2)
TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SEEING = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 2]}}
VISUAL = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "patch_size": 4, "out_hidden_size": 48,
}  # fmt: skip
DEEP = {"num_position_embeddings": 16, "deepstack_visual_indexes": [1, 0]}
# Class of the config, and what its tower's has beside `VISUAL`.
WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4v": ("Glm4v", {"image_size": 16}),
    "glm4v_moe": ("Glm4vMoe", {"image_size": 16}),
    "glm46v": ("Glm46V", {"image_size": 16}),
    "glm_ocr": ("GlmOcr", {"image_size": 16}),
    "qwen3_5": ("Qwen3_5", {"num_position_embeddings": 16}),
    "qwen3_5_moe": ("Qwen3_5Moe", {"num_position_embeddings": 16}),
    "qwen3_vl": ("Qwen3VL", DEEP),
    "qwen3_vl_moe": ("Qwen3VLMoe", DEEP),
}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}


def sections(*counts: int, fraction: float = 1.0) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": fraction}
    return {"rope_parameters": {**rope, "mrope_section": list(counts)}}


MORE: dict[str, dict[str, Any]] = {  # of the text's config
    "qwen3_vl": {**sections(4, 2, 2), "head_dim": 16},
    "qwen3_vl_moe": {
        **sections(4, 2, 2),
        "head_dim": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "glm4v": sections(1, 1, 1, fraction=0.75),
    "glm4v_moe": {**sections(1, 1, 2, fraction=0.5), **EXPERTS, "head_dim": 16},
    "glm46v": sections(1, 1, 1, fraction=0.75),
    "glm_ocr": {**sections(4, 2, 2), "head_dim": 16},
    "qwen3_5": {**sections(1, 2, 1, fraction=0.25), **DELTA, "head_dim": 32},
    "qwen3_5_moe": {
        **sections(1, 2, 1, fraction=0.25),
        **DELTA,
        "head_dim": 32,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
}
SIZES = [(4, 6), (8, 4), (2, 2)]  # rows and columns of patches, of pictures of several sizes


def config(name: str) -> Any:
    import transformers as t

    if name == "llava":
        seeing = t.CLIPVisionConfig(**SEEING, image_size=16)
        return t.LlavaConfig(vision_config=seeing, text_config=t.LlamaConfig(**TEXT), image_token_id=IMAGE)
    if name == "internvl":
        seeing = t.InternVLVisionConfig(**{**SEEING, "patch_size": [4, 4]}, image_size=[16, 16])
        return t.InternVLConfig(vision_config=seeing, text_config=t.Qwen2Config(**TEXT), image_token_id=IMAGE)
    if name == "mllama":
        seeing = t.models.mllama.MllamaVisionConfig(
            hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_global_layers=1, attention_heads=4,
            image_size=16, patch_size=4, vision_output_dim=96, intermediate_layers_indices=[0, 2],
        )  # fmt: skip
        text = t.models.mllama.MllamaTextConfig(
            **{**TEXT, "vocab_size": IMAGE, "num_hidden_layers": 4}, cross_attention_layers=[1, 3],
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        )  # fmt: skip
        return t.MllamaConfig(vision_config=seeing, text_config=text, image_token_index=IMAGE)
    if name in ("idefics3", "smolvlm"):
        kind = "Idefics3" if name == "idefics3" else "SmolVLM"
        seeing = getattr(t, f"{kind}VisionConfig")(**SEEING, image_size=16)
        return getattr(t, f"{kind}Config")(
            vision_config=seeing, text_config=t.LlamaConfig(**TEXT), image_token_id=IMAGE, scale_factor=2
        )
    if name == "llava_next":
        seeing = t.CLIPVisionConfig(**SEEING, image_size=16)
        return t.LlavaNextConfig(
            vision_config=seeing, text_config=t.LlamaConfig(**TEXT), image_token_id=IMAGE,
            image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        )  # fmt: skip
    if name == "llava_onevision":
        seeing = t.SiglipVisionConfig(**SEEING, image_size=16, vision_use_head=False)
        return t.LlavaOnevisionConfig(
            vision_config=seeing, text_config=t.Qwen2Config(**TEXT), image_token_index=IMAGE,
            image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        )  # fmt: skip
    if name == "granite4_vision":
        seeing = t.SiglipVisionConfig(**{**SEEING, "hidden_size": 64}, image_size=16, vision_use_head=False)
        text = t.models.granite4_vision.Granite4VisionTextConfig(
            **{**TEXT, "num_hidden_layers": 8}, embedding_multiplier=3.0, residual_multiplier=0.5,
            attention_multiplier=0.3, logits_scaling=2.0,
        )  # fmt: skip
        return t.Granite4VisionConfig(
            vision_config=seeing, text_config=text, image_token_index=IMAGE, vision_feature_select_strategy="full",
            image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]], downsample_rate="1/2",
            deepstack_layer_map=[[-2, 0], [-1, 1]], spatial_target_layers=[2, 3, 4, 6],
        )  # fmt: skip
    if name == "llama4":
        seeing = t.Llama4VisionConfig(
            **{**SEEING, "intermediate_size": 128}, image_size=16, vision_output_dim=24, projector_input_dim=24,
            projector_output_dim=24,
        )  # fmt: skip
        text = t.Llama4TextConfig(
            **TEXT, intermediate_size_mlp=64, head_dim=16, num_local_experts=3, attention_chunk_size=16,
            interleave_moe_layer_step=2, no_rope_layers=[1, 0],
        )  # fmt: skip
        return t.Llama4Config(vision_config=seeing, text_config=text, image_token_index=IMAGE)
    if name == "idefics2":
        parts = t.models.idefics2.configuration_idefics2
        resampler = parts.Idefics2PerceiverConfig(
            hidden_size=48, resampler_n_latents=4, resampler_depth=1, resampler_n_heads=4, resampler_head_dim=12,
            num_key_value_heads=2,
        )  # fmt: skip
        seeing = parts.Idefics2VisionConfig(**SEEING, image_size=16)
        return t.Idefics2Config(
            vision_config=seeing, perceiver_config=resampler, text_config=t.MistralConfig(**TEXT), image_token_id=IMAGE
        )
    if name in ("deepseek_vl", "deepseek_vl_hybrid"):
        seeing = t.SiglipVisionConfig(**SEEING, image_size=16, vision_use_head=False)
        parts = {"vision_config": seeing, "text_config": t.LlamaConfig(**TEXT), "image_token_id": IMAGE}
        if name == "deepseek_vl":
            return t.DeepseekVLConfig(**parts)
        high = t.SamVisionConfig(
            hidden_size=24, output_channels=8, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=4,
            global_attn_indexes=[1], window_size=4, mlp_dim=32,
        )  # fmt: skip
        return t.DeepseekVLHybridConfig(**parts, high_res_vision_config=high)
    if name == "ovis2":
        seeing = t.models.ovis2.configuration_ovis2.Ovis2VisionConfig(
            **SEEING, image_size=16, vocab_size=30, hidden_stride=2
        )
        return t.Ovis2Config(
            vision_config=seeing, text_config=t.Qwen2Config(**TEXT), image_token_id=IMAGE, vocab_size=99,
            hidden_size=48, visual_indicator_token_ids=[*MARKS],
        )  # fmt: skip
    if name == "minicpmv4_6":
        seeing = t.models.minicpmv4_6.configuration_minicpmv4_6.MiniCPMV4_6VisionConfig(**SEEING, image_size=32)
        text = t.Qwen3_5TextConfig(**TEXT, **MORE["qwen3_5"])
        return t.MiniCPMV4_6Config(vision_config=seeing, text_config=text, image_token_id=IMAGE, insert_layer_id=0)
    if name in ("aya_vision", "cohere2_vision"):  # transformers scales no logits of theirs
        text = t.Cohere2Config(**TEXT, sliding_window=7, logit_scale=1.0)
        seeing = t.SiglipVisionConfig(**SEEING, image_size=16, vision_use_head=False)
        kind, width = (
            ("AyaVision", {}) if name == "aya_vision" else ("Cohere2Vision", {"alignment_intermediate_size": 64})
        )
        return getattr(t, f"{kind}Config")(vision_config=seeing, text_config=text, image_token_id=IMAGE, **width)
    if name == "lighton_ocr":
        seeing = t.PixtralVisionConfig(**SEEING, image_size=16)
        return t.LightOnOcrConfig(
            vision_config=seeing, text_config=t.Qwen3Config(**TEXT, head_dim=8), image_token_id=IMAGE
        )
    if name == "mistral3":
        seeing = t.PixtralVisionConfig(**SEEING, image_size=16)
        return t.Mistral3Config(vision_config=seeing, text_config=t.MistralConfig(**TEXT), image_token_id=IMAGE)
    if name == "gemma3":
        text = t.Gemma3TextConfig(
            **TEXT, head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
        )
        seeing = t.SiglipVisionConfig(**SEEING, image_size=16)
        return t.Gemma3Config(vision_config=seeing, text_config=text, image_token_id=IMAGE, mm_tokens_per_image=4)
    if name in ("gemma4", "gemma4_small", "gemma4_unified"):
        kind = "Gemma4Unified" if name == "gemma4_unified" else "Gemma4"
        text = getattr(t, f"{kind}TextConfig")(
            **{**TEXT, "num_hidden_layers": 4}, head_dim=8, global_head_dim=16, sliding_window=5,
            layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
            hidden_size_per_layer_input=0 if name == "gemma4_unified" else 12, vocab_size_per_layer_input=99,
            use_bidirectional_attention=None if name == "gemma4_small" else "vision",
        )  # fmt: skip
        if name == "gemma4_unified":
            seeing = t.Gemma4UnifiedVisionConfig(
                patch_size=2, pooling_kernel_size=2, mm_embed_dim=48, mm_posemb_size=20, output_proj_dims=48
            )
        else:
            seeing = t.Gemma4VisionConfig(
                **SEEING, head_dim=8, num_key_value_heads=4, pooling_kernel_size=2, position_embedding_size=60
            )
        return getattr(t, f"{kind}Config")(text_config=text, vision_config=seeing, image_token_id=IMAGE)
    if name == "gemma3n":
        pytest.importorskip("timm")
        text = t.Gemma3nTextConfig(
            **{**TEXT, "num_hidden_layers": 5}, head_dim=8, sliding_window=17,
            layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
            num_kv_shared_layers=2, hidden_size_per_layer_input=12, vocab_size_per_layer_input=85, laurel_rank=6,
            activation_sparsity_pattern=[0.9, 0.5, 0.0, 0.0, 0.0],
        )  # fmt: skip
        return t.Gemma3nConfig(
            text_config=text, image_token_id=IMAGE, audio_token_id=97, vision_soft_tokens_per_image=4,
            vision_config=t.Gemma3nVisionConfig(
                architecture="test_resnet", hidden_size=96, vocab_offset=85, vocab_size=7, do_pooling=False
            ),
            audio_config=t.Gemma3nAudioConfig(
                hidden_size=32, vocab_offset=92, vocab_size=7, conf_num_hidden_layers=1, conf_num_attention_heads=2
            ),
        )  # fmt: skip
    if name.startswith("paligemma"):
        seeing = t.SiglipVisionConfig(**SEEING, image_size=8, vision_use_head=False, projection_dim=48)
        text = t.GemmaConfig(**TEXT, head_dim=8)
        if name == "paligemma2":
            text = t.Gemma2Config(**TEXT, head_dim=8, sliding_window=9, query_pre_attn_scalar=8)
        return t.PaliGemmaConfig(vision_config=seeing, text_config=text, image_token_index=IMAGE, projection_dim=48)
    if name == "lfm2_vl":
        seeing = t.Siglip2VisionConfig(**SEEING, num_patches=16)
        text = t.Lfm2Config(**TEXT, block_multiple_of=32, layer_types=["conv", "full_attention"])
        return t.Lfm2VlConfig(vision_config=seeing, text_config=text, image_token_id=IMAGE, projector_hidden_size=24)
    if name in WRAPPED:
        own, beside = WRAPPED[name]
        default = getattr(t, f"{own}Config")()
        seeing = {**VISUAL, **beside}
        text = type(default.text_config)(**TEXT, **MORE[name])
        return type(default)(
            vision_config=type(default.vision_config)(**seeing), text_config=text, image_token_id=IMAGE
        )
    if name == "qwen2_vl":
        seeing = t.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
            depth=2, embed_dim=32, hidden_size=48, num_heads=4, patch_size=4, mlp_ratio=2
        )
        text = t.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLTextConfig(**TEXT, **AXES)
        return t.Qwen2VLConfig(vision_config=seeing.to_dict(), text_config=text.to_dict(), image_token_id=IMAGE)
    seeing = t.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
        depth=2, hidden_size=32, intermediate_size=40, num_heads=4, patch_size=4, out_hidden_size=48, window_size=16,
        fullatt_block_indexes=[1],
    )  # fmt: skip
    text = t.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLTextConfig(**TEXT, **AXES)
    return t.Qwen2_5_VLConfig(vision_config=seeing.to_dict(), text_config=text.to_dict(), image_token_id=IMAGE)


def pictures(name: str) -> tuple[dict[str, Tensor], list[int]]:
    """Random pixels of three pictures as the family's processor gives them, and the positions that each takes."""
    generator = torch.Generator().manual_seed(3)
    if name in GRIDS:
        grid = torch.tensor([[1, *size] for size in SIZES])
        pixels = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": grid}, [int(each.prod()) // 4 for each in grid]
    if name == "mllama":  # pictures of 3, 1 and 4 tiles
        mask = torch.arange(4) < torch.tensor([[3], [1], [4]])
        pixels = torch.randn(1, 3, 4, 3, 16, 16, generator=generator) * mask[..., None, None, None]
        shapes = torch.tensor([[3, 1, 6]])
        return {"pixel_values": pixels, "aspect_ratio_ids": shapes, "aspect_ratio_mask": mask.long()[None]}, [1, 1, 1]
    if name == "lfm2_vl":
        shapes = torch.tensor([[4, 4], [2, 6], [2, 2]])
        mask = torch.arange(16) < shapes.prod(-1, keepdim=True)
        pixels = torch.randn(3, 16, 3 * 4 * 4, generator=generator) * mask[..., None]
        inputs = {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask.long()}
        return inputs, [4, 3, 1]
    if name in ("mistral3", "lighton_ocr"):
        sizes = torch.tensor([[16, 16], [8, 16], [16, 8]])
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator), "image_sizes": sizes}, [4, 2, 2]
    if name.startswith("gemma4"):
        pooled = 1 if name == "gemma4_unified" else 2
        shapes = [(4, 6), (2, 6), (4, 4)] if pooled == 2 else [(2, 3), (1, 3), (2, 2)]
        longest = max(rows * columns for rows, columns in shapes)
        pixels = torch.rand(3, longest, 3 * 4 * 4, generator=generator)
        places = torch.full((3, longest, 2), -1)
        for picture, (rows, columns) in enumerate(shapes):
            grid = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
            places[picture, : rows * columns] = torch.stack(grid, -1).reshape(-1, 2)
        return {"pixel_values": pixels, "image_position_ids": places}, [6, 3, 4]
    if name == "minicpmv4_6":
        sizes = torch.tensor([[4, 4], [8, 4], [4, 12]], dtype=torch.int32)
        pixels = torch.randn(1, 3, 4, 4 * int(sizes.prod(-1).sum()), generator=generator)
        return {"pixel_values": pixels, "target_sizes": sizes}, [1, 2, 3]
    if name in (
        "llava_next",
        "llava_onevision",
        "granite4_vision",
    ):  # pictures of 3, 3 and 5 tiles, and what is padding in the larger grid is left out
        sizes = torch.tensor([[16, 32], [30, 12], [20, 32]])
        pixels = torch.randn(3, 5, 3, 16, 16, generator=generator)
        counts = (
            [4 + 2 * 5, 4 + 4 * 3, 4 + 2 * 5] if name == "granite4_vision" else [16 + 4 * 9, 16 + 8 * 5, 16 + 6 * 9]
        )
        return {"pixel_values": pixels, "image_sizes": sizes}, counts
    pixels = torch.randn(3, 3, 16, 16, generator=generator)
    if name in ("idefics2", "idefics3", "smolvlm"):
        mask = torch.ones(1, 3, 16, 16, dtype=torch.bool)
        mask[0, 1, 8:] = False
        return {"pixel_values": pixels[None], "pixel_attention_mask": mask}, [4, 4, 4]
    if name == "gemma3n":
        return {"pixel_values": torch.randn(3, 3, 64, 64, generator=generator)}, [4, 4, 4]
    if name.startswith("paligemma"):
        return {"pixel_values": pixels[..., :8, :8]}, [4, 4, 4]
    if name == "deepseek_vl_hybrid":
        high = torch.randn(3, 3, 64, 64, generator=generator)
        return {"pixel_values": pixels, "high_res_pixel_values": high}, [16, 16, 16]
    return {"pixel_values": pixels}, [16, 16, 16] if name in ("llava", "deepseek_vl") else [4, 4, 4]


def prompt(counts: list[int], name: str) -> list[int]:
    """A text that begins and ends with a picture. Rows of tiles have tokens between them where the family has."""
    first, second, third = counts
    if name.startswith("paligemma"):
        return [IMAGE] * sum(counts) + [min(token, IMAGE - 1) for token in words(30)[0].tolist()]
    ids = [IMAGE] * first + words(9)[0].tolist() + [IMAGE] * second + words(5, seed=1)[0].tolist() + [IMAGE] * third
    if name == "ovis2":
        for at, mark in ((first + 3, MARKS[4]), (first, MARKS[2]), (first - 2, MARKS[3]), (0, MARKS[0])):
            ids.insert(at, mark)
    if name in ("idefics2", "idefics3", "smolvlm", "mistral3"):
        ids.insert(first - 2, 5)  # what one tile makes may stand in several places
    return [token if token == IMAGE or token < IMAGE else 4 for token in ids]


@lru_cache(maxsize=1)
def pair(name: str) -> tuple[Any, lmstate.Model, Tower]:
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(config(name), dtype=torch.float32).eval()
    randomize(theirs)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, build(WeightLoader(open_source(Path(folder)), "float32")), Tower.open(Path(folder))


GRIDS = ["qwen2_vl", "qwen2_5_vl", *WRAPPED]
WHOLE = ["gemma3", "gemma4", "gemma4_unified", "paligemma", "paligemma2"]  # whose pictures are computed as one piece
FAMILIES = [
    *WHOLE, "gemma3n", "gemma4_small",
    "llava", "llava_next", "internvl", "idefics3", "smolvlm", "mistral3", "lfm2_vl", *GRIDS,
    "llama4", "idefics2", "llava_onevision", "deepseek_vl", "deepseek_vl_hybrid", "minicpmv4_6", "granite4_vision",
    "ovis2", "mllama", "lighton_ocr", "aya_vision", "cohere2_vision",
]  # fmt: skip


def seen_tiles(ids: list[int], tiles: list[int]) -> Tensor:
    """The tiles of pictures that tokens attend to, as transformers' processor of Llama 3.2 Vision has it."""
    from transformers.models.mllama import processing_mllama as theirs

    own = theirs.get_cross_attention_token_mask(ids, IMAGE)
    return torch.from_numpy(theirs.convert_sparse_cross_attention_mask_to_dense([own], [tiles], 4, len(ids)))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_at_any_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    # Llama 4 asks its text model's output for it, which does not have it.
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    theirs, model, tower = pair(name)
    inputs, counts = pictures(name)
    ids = prompt(counts, name)
    types = torch.tensor([[int(token == IMAGE) for token in ids]])
    beside = (
        {"mm_token_type_ids": types}
        if name in GRIDS or name.startswith("gemma4")
        else {"token_type_ids": types}
        if name == "gemma3"
        else {}
    )
    if name.startswith("paligemma"):
        beside["token_type_ids"] = (torch.arange(len(ids)) >= 12 + PREFIX).long()[None]
    if name == "mllama":
        beside["cross_attention_mask"] = seen_tiles(ids, [3, 1, 4])
    if name == "gemma4_unified":  # in its `generate` and in Gemma 4 layers that see everything stay causal
        beside["attention_mask"] = theirs.create_masks_for_generate(
            theirs.config, inputs_embeds=torch.zeros(1, len(ids), 48), attention_mask=None, cache=None,
            position_ids=torch.arange(len(ids))[None], mm_token_type_ids=types,
        )  # fmt: skip
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids]), **inputs, **beside).logits[0]
    spans = tower.media(inputs, ids[: 12 + PREFIX] if name.startswith("paligemma") else ids)
    assert sum(span.media.pictured for span in spans if span.media.token == IMAGE) == sum(counts)

    def fed(sizes: list[int]) -> Tensor:
        state, parts, at = model.new_state(), [], 0
        for span in spans:
            state.place(0, span.at, span.media)
        while at < len(ids):
            size = sizes[len(parts) % len(sizes)]
            if name in WHOLE:
                size = next((span.end for span in spans if span.at < at + size < span.end), at + size) - at
            part = model([ids[at : at + size]], state, logits="all")
            assert part is not None
            parts.append(part[0])
            at += size
        return torch.cat(parts)

    whole = fed([len(ids)])
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    for sizes in ([1], [3, 7], [20]):
        assert torch.equal(fed(sizes), whole)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_a_picture_that_was_seen_is_found_again(name: str) -> None:
    _, _, tower = pair(name)
    inputs, counts = pictures(name)
    first = tower.media(inputs, prompt(counts, name))
    runs = tower.runs
    again = tower.media(inputs, [3, *prompt(counts, name)])
    assert tower.runs == runs
    assert [span.media for span in again] == [span.media for span in first]
    assert len({span.media.hash for span in first}) == 3


def test_every_family_is_compared() -> None:
    assert {*FAMILIES} - {"gemma4_small", "paligemma2"} == {*families.FAMILIES}


def test_places_that_do_not_fit() -> None:
    _, _, tower = pair("llava")
    inputs, _ = pictures("llava")
    with pytest.raises(lmstate.StateError, match="the pictures take 48 places, and the text has 1"):
        tower.media(inputs, [IMAGE])
    with pytest.raises(lmstate.StateError, match="pixel_values of the pictures is"):
        tower.media({"pixel_values": torch.zeros(3)}, [IMAGE])


def test_a_tower_that_needs_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_text('{"model_type": "gemma3n"}')
    monkeypatch.setitem(families.NEEDS, "gemma3n", "no_such_package")
    assert not has_tower(tmp_path)
    with pytest.raises(lmstate.UnsupportedError, match="pip install no_such_package"):
        Tower.open(tmp_path)
    monkeypatch.setitem(families.NEEDS, "gemma3n", "json")
    assert has_tower(tmp_path)
    monkeypatch.setitem(families.PROCESSED, "gemma3n", ("json", "no_such_package"))
    assert not has_tower(tmp_path)


def test_checkpoints_without_a_tower(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    theirs, _, _ = pair("llava")
    theirs.save_pretrained(tmp_path / "cut")
    tensors = load_file(tmp_path / "cut" / "model.safetensors")
    gone = next(name for name in tensors if "projector" in name)
    del tensors[gone]
    save_file(tensors, tmp_path / "cut" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(lmstate.ModelError, match="lacks 1 tensors of its tower"):
        Tower.open(tmp_path / "cut")
    theirs.config.text_config.save_pretrained(tmp_path / "text")
    with pytest.raises(lmstate.UnsupportedError, match="family 'llama'"):
        Tower.open(tmp_path / "text")
    with pytest.raises(lmstate.UnsupportedError, match="not a checkpoint folder"):
        Tower.open(tmp_path / "nothing")
