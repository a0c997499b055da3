"""The families whose pictures lmstate reads: how what a processor makes of several is parted into single ones.

A tower sees one picture, or one tile of it, at a time: its embeddings never depend on others beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lmstate.errors import StateError

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Tile:
    """Arguments of transformers' `get_image_features` for one picture, or for a tile of one.

    `grid`: frames, rows and columns of its embeddings, where they have positions of several axes. `token`: the id at
    its places, of a sound or a video; None for that of pictures. `pace`: how far the time goes from frame to frame.
    """

    inputs: dict[str, Tensor]
    grid: tuple[int, int, int] | None = None
    token: int | None = None
    pace: float = 1.0

    @property
    def positions(self) -> Tensor | None:
        """int64 `[3, N]`: time, height and width of each embedding."""
        if self.grid is None:
            return None
        time, height, width = map(torch.arange, self.grid)
        time = (time * self.pace).long()
        return torch.stack(torch.meshgrid(time, height, width, indexing="ij")).flatten(1)


Tiles = Callable[[Inputs, Any], Iterator[Tile]]


def rows(inputs: Inputs, config: Any) -> Iterator[Tile]:
    """Pixels `[tiles, 3, H, W]`."""
    for pixels in _given(inputs, "pixel_values", 4):
        yield Tile({"pixel_values": pixels[None]})


def padded_rows(inputs: Inputs, config: Any) -> Iterator[Tile]:
    """Pixels `[1, tiles, 3, H, W]`, of which some are padding (Idefics3)."""
    pixels = _given(inputs, "pixel_values", 5)[0]
    masks = inputs.get("pixel_attention_mask")
    for index, tile in enumerate(pixels):
        own = {"pixel_values": tile[None, None]}
        if masks is not None:
            own["pixel_attention_mask"] = masks[0, index][None, None]
        yield Tile(own)


def high_rows(inputs: Inputs, config: Any) -> Iterator[Tile]:
    """Pixels `[pictures, 3, H, W]`, and more of each picture for a second tower (DeepSeek-VL 7B)."""
    names = ("pixel_values", "high_res_pixel_values")
    for parts in zip(*(_given(inputs, name, 4) for name in names), strict=True):
        yield Tile({name: part[None] for name, part in zip(names, parts)})


def positioned(inputs: Inputs, config: Any) -> Iterator[Tile]:
    """Patches `[pictures, N, features]`, of which some are padding, and where each is (Gemma 4)."""
    names = ("pixel_values", "image_position_ids")
    for parts in zip(*(_given(inputs, name, 3) for name in names), strict=True):
        yield Tile({name: part[None] for name, part in zip(names, parts)})


def strips(inputs: Inputs, config: Any) -> Iterator[Tile]:
    """Patches of all tiles side by side `[1, 3, P, N * P]`, and the rows and columns of each (MiniCPM-V 4.6)."""
    pixels, sizes = _given(inputs, "pixel_values", 4), _given(inputs, "target_sizes", 2)
    patch, start = pixels.shape[2], 0
    if int(sizes.prod(-1).sum()) * patch != pixels.shape[3]:
        raise StateError(f"tiles of {sizes.tolist()} patches were given, and pixels {list(pixels.shape)}")
    for size in sizes:
        stop = start + int(size.prod()) * patch
        yield Tile({"pixel_values": pixels[..., start:stop], "target_sizes": size[None]})
        start = stop


def grids(inputs: Inputs, config: Any) -> Iterator[Tile]:
    """Patches `[N, features]` of all pictures, and how many frames, rows and columns each has (Qwen2-VL)."""
    pixels, known = _given(inputs, "pixel_values", 2), _given(inputs, "image_grid_thw", 2)
    merged, start = config.vision_config.spatial_merge_size, 0
    if int(known.prod(-1).sum()) != len(pixels):
        raise StateError(f"pictures of {known.tolist()} patches were given, and {len(pixels)} patches")
    for grid in known:
        frames, height, width = grid.tolist()
        stop = start + frames * height * width
        own = {"pixel_values": pixels[start:stop], "image_grid_thw": grid[None]}
        yield Tile(own, (frames, height // merged, width // merged))
        start = stop


def sized(inputs: Inputs, config: Any) -> Iterator[Tile]:
    """Pixels `[pictures, 3, H, W]`, padded after each picture's own height and width (Pixtral)."""
    pixels, sizes = _given(inputs, "pixel_values", 4), _given(inputs, "image_sizes", 2)
    for picture, size in zip(pixels, sizes, strict=True):
        height, width = size.tolist()
        yield Tile({"pixel_values": picture[None, :, :height, :width], "image_sizes": size[None]})


def tiled(inputs: Inputs, config: Any) -> Iterator[Tile]:
    """Pixels `[pictures, tiles, 3, H, W]`, padded after each picture's own tiles (LLaVA-NeXT).

    A picture is one here: the tower puts its tiles together.
    """
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    pixels, sizes = _given(inputs, "pixel_values", 5), _given(inputs, "image_sizes", 2)
    for picture, size in zip(pixels, sizes, strict=True):
        count = image_size_to_num_patches(size, config.image_grid_pinpoints, config.vision_config.image_size)
        yield Tile({"pixel_values": picture[None, :count], "image_sizes": size[None]})


def aspects(inputs: Inputs, config: Any) -> Iterator[Tile]:
    """Pixels `[1, pictures, tiles, 3, H, W]`, padded after each picture's own tiles, and their shape (Llama 3.2).

    A picture is one here: the tower sees its tiles together.
    """
    names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    given = (_given(inputs, name, ndim)[0] for name, ndim in zip(names, (6, 2, 3)))
    for parts in zip(*given, strict=True):
        yield Tile({name: part[None, None] for name, part in zip(names, parts)})


def patched(inputs: Inputs, config: Any) -> Iterator[Tile]:
    """Patches `[tiles, N, features]`, of which some are padding, and the rows and columns of each (LFM2-VL)."""
    names = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
    for parts in zip(*(_given(inputs, name, ndim) for name, ndim in zip(names, (3, 2, 2))), strict=True):
        yield Tile({name: part[None] for name, part in zip(names, parts)})


def pooled(seeing: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Embeddings of one tile by most towers: float32 `[N, (1 + D) E]`, see `Media`."""
    found = seeing.get_image_features(**inputs, return_dict=True)
    parts = [found.pooler_output, *(found.get("deepstack_features") or ())]
    return torch.cat([torch.cat([*part]).float().flatten(0, -2) for part in parts], -1)


def projected(seeing: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The same of Llama 4, whose projector is apart."""
    found = seeing.get_image_features(**inputs, return_dict=True)
    return torch.cat([*seeing.multi_modal_projector(found.last_hidden_state)]).float()


def at_blocks(seeing: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The same of Granite 4 Vision, which adds to the stream in front of blocks that its config names."""
    found = seeing.get_image_features(**inputs, return_dict=True).deepstack_features
    (first,) = found[0][1]
    parts = [torch.zeros_like(first) for _ in range(1 + max(block for block, _ in found))]
    for block, (own,) in found:
        parts[block] = own  # a later one is in the place of an earlier one, as in the model
    return torch.cat(parts, -1).float()


def filmed(seeing: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Embeddings of a whole video: float32 `[N, E]` (LLaVA-OneVision)."""
    found: Tensor = seeing.get_video_features(**inputs, return_dict=True).pooler_output
    return found.float().flatten(0, 1)


def of_tiles(seeing: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The same of Llama 3.2 Vision, without the tiles that are padding."""
    found = seeing.vision_model(**inputs).last_hidden_state[0, 0]
    count = int(inputs["aspect_ratio_mask"].sum())
    return seeing.multi_modal_projector(found[:count]).float().flatten(0, 1)


def heard(hearing: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Embeddings of one sound by a tower that sees too: float32 `[N, E]` (Gemma 3n, Gemma 4)."""
    features, valid = inputs["input_features"], inputs["input_features_mask"].bool()
    if hearing.config.model_type != "gemma3n":
        found = hearing.get_audio_features(features, valid, return_dict=True)
        return found.pooler_output[found.attention_mask].float()
    found = hearing.get_audio_features(features, ~valid, return_dict=True)
    table, count = hearing.embed_audio, hearing.config.audio_soft_tokens_per_image
    last = torch.tensor([[table.vocab_offset + table.vocab_size - 1]], device=features.device)
    filled = table(input_ids=last)[0].expand(count, -1).clone()  # every sound takes as many places
    own = found.pooler_output[0, ~found.audio_mel_mask[0]][:count]
    filled[: len(own)] = own
    return filled.float()


def visual_indicators(seeing: Any, config: Any) -> dict[int, Tensor]:
    """Embeddings `[1, E]` of tokens around pictures, by their ids, from the table of pictures' own words (Ovis2)."""
    table, ids = seeing.visual_embeddings_table, config.visual_indicator_token_ids
    last = torch.arange(table.num_embeddings - len(ids), table.num_embeddings, device=table.weight.device)
    return {int(token): own[None].float() for token, own in zip(ids, table(last))}


def hard_tokens(seeing: Any, config: Any) -> dict[int, Tensor]:
    """Embeddings `[1, E]` of the ids after the text's own, by id: pictures and sounds have some each (Gemma 3n)."""
    found = {}
    for part in (seeing.embed_vision, seeing.embed_audio):
        ids = torch.arange(part.vocab_offset, part.vocab_offset + part.vocab_size, device=part.embedding.weight.device)
        found.update({int(token): own[None].float() for token, own in zip(ids, part(input_ids=ids))})
    return {token: own for token, own in found.items() if token not in (config.image_token_id, config.audio_token_id)}


def numbered(processor: Any, inputs: Inputs, index: int) -> str:
    """The text of a picture's places of MiniCPM-V 4.6, with its number in front."""
    divisor = processor.image_token_divisor
    own = str(processor.replace_image_token(inputs, index, image_token_divisor=divisor))
    number = f"{processor.image_id_start_token}{index}{processor.image_id_end_token}"
    return number + own if processor.default_use_image_id else own


def bounded(processor: Any, inputs: Inputs, index: int) -> str:
    """The same of Idefics2: each tile between tokens of its own."""
    bound = processor.fake_image_token
    own = f"{bound}{processor.image_token * processor.image_seq_len}{bound}"
    return own * 5 if processor.image_processor.do_image_splitting else own


def between_bounds(processor: Any, text: str) -> str:
    """One bound between two tiles, and a space between a bound and a word (Idefics2)."""
    bound = processor.fake_image_token
    return re.sub(rf"{re.escape(bound)}(?=[^\s<])", f"{bound} ", text.replace(bound + bound, bound))


def _given(inputs: Inputs, name: str, ndim: int) -> Tensor:
    value = inputs.get(name)
    if not isinstance(value, Tensor) or value.ndim != ndim:
        shown = list(value.shape) if isinstance(value, Tensor) else value
        raise StateError(f"{name} of the pictures is {shown!r:.80}; this model's processor makes {ndim} axes of it")
    return value


# model_type of a config -> how its pictures are parted.
FAMILIES: dict[str, Tiles] = {
    "aya_vision": rows,
    "cohere2_vision": rows,
    "deepseek_vl": rows,
    "deepseek_vl_hybrid": high_rows,
    "gemma3": rows,
    "gemma3n": rows,
    "gemma4": positioned,
    "gemma4_unified": positioned,
    "glm46v": grids,
    "glm4v": grids,
    "glm4v_moe": grids,
    "glm_ocr": grids,
    "granite4_vision": tiled,
    "idefics2": padded_rows,
    "idefics3": padded_rows,
    "internvl": rows,
    "lfm2_vl": patched,
    "lighton_ocr": sized,
    "llama4": rows,
    "llava": rows,
    "llava_next": tiled,
    "llava_onevision": tiled,
    "minicpmv4_6": strips,
    "mistral3": sized,
    "mllama": aspects,
    "ovis2": rows,
    "paligemma": rows,
    "qwen2_5_vl": grids,
    "qwen2_vl": grids,
    "qwen3_5": grids,
    "qwen3_5_moe": grids,
    "qwen3_vl": grids,
    "qwen3_vl_moe": grids,
    "smolvlm": padded_rows,
}
# The function that makes embeddings of a tile, where it is not `pooled`.
FEATURES: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {
    "granite4_vision": at_blocks,
    "llama4": projected,
    "mllama": of_tiles,
}
# Whose pictures are beside the text, and take one place in it.
BESIDE = frozenset({"mllama"})
# Which may hear beside: their towers have one for sounds too.
HEARING = ("gemma3n", "gemma4")
# Whose tokens around a picture have embeddings of the tower too.
MARKS: dict[str, Callable[[Any, Any], dict[int, Tensor]]] = {"gemma3n": hard_tokens, "ovis2": visual_indicators}
# The package of a tower that transformers and Pillow do not make alone.
NEEDS = {"gemma3n": "timm"}
# The packages of a processor that these do not make alone.
PROCESSED = {
    **dict.fromkeys(
        ("cohere2_vision", "gemma4", "internvl", "lfm2_vl", "llama4", "llava_onevision", "minicpmv4_6", "mistral3"),
        ("torchvision",),
    ),
    "smolvlm": ("torchvision", "num2words"),
}
# The function that writes the places of a picture, where its processor does not beside its pixels.
WRITERS: dict[str, Callable[[Any, Inputs, int], str]] = {"idefics2": bounded, "minicpmv4_6": numbered}
# Options of a processor that are among those of its texts.
OPTIONS: dict[str, dict[str, Any]] = {"lfm2_vl": {"use_image_special_tokens": True}}
VideoForm = Literal["whole", "timed", "timed after", "run", "frames"]
"""Form of a video in a text.

whole         one run of positions of several axes
timed         groups of frames, each after its time
timed after   groups of frames, each in front of its time, which transformers' processor writes
run           one run
frames        frames as pictures, among words of that processor
"""

# Whose videos are read.
VIDEOS: dict[str, VideoForm] = {
    "glm46v": "timed after",
    "glm4v": "timed after",
    "glm4v_moe": "timed after",
    "internvl": "frames",
    "llava_onevision": "run",
    "qwen2_5_vl": "whole",
    "qwen2_vl": "whole",
    "qwen3_5": "timed",
    "qwen3_5_moe": "timed",
    "qwen3_vl": "timed",
    "qwen3_vl_moe": "timed",
    "smolvlm": "frames",
}
# Whose pictures are one piece with all of the prompt, which they begin.
PREFIXED = frozenset({"paligemma"})
# Changes of a text after the places of all pictures.
TIDIED: dict[str, Callable[[Any, str], str]] = {"idefics2": between_bounds}
# Whose pictures are one tile each, and are in a text as one run of places and nothing else.
UNTILED = frozenset(name for name, tiles in FAMILIES.items() if tiles in (grids, tiled)) | {
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "llava",
    "mllama",
}
