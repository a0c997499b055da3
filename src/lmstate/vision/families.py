"""The families whose pictures lmstate reads: how what a processor makes of several is parted into single ones.

A tower sees one picture, or one tile of it, at a time: its embeddings never depend on others beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmstate.errors import StateError

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Tile:
    """Arguments of transformers' `get_image_features` for one picture, or for a tile of one.

    `grid`: frames, rows and columns of its embeddings, where they have positions of several axes.
    """

    inputs: dict[str, Tensor]
    grid: tuple[int, int, int] | None = None

    @property
    def positions(self) -> Tensor | None:
        """int64 `[3, N]`: time, height and width of each embedding."""
        if self.grid is None:
            return None
        return torch.stack(torch.meshgrid(*map(torch.arange, self.grid), indexing="ij")).flatten(1)


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
    """Pixels `[pictures, 3, H, W]`, padded behind each picture's own height and width (Pixtral)."""
    pixels, sizes = _given(inputs, "pixel_values", 4), _given(inputs, "image_sizes", 2)
    for picture, size in zip(pixels, sizes, strict=True):
        height, width = size.tolist()
        yield Tile({"pixel_values": picture[None, :, :height, :width], "image_sizes": size[None]})


def tiled(inputs: Inputs, config: Any) -> Iterator[Tile]:
    """Pixels `[pictures, tiles, 3, H, W]`, padded behind each picture's own tiles (LLaVA-NeXT).

    A picture is one here: the tower puts its tiles together.
    """
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    pixels, sizes = _given(inputs, "pixel_values", 5), _given(inputs, "image_sizes", 2)
    for picture, size in zip(pixels, sizes, strict=True):
        count = image_size_to_num_patches(size, config.image_grid_pinpoints, config.vision_config.image_size)
        yield Tile({"pixel_values": picture[None, :count], "image_sizes": size[None]})


def patched(inputs: Inputs, config: Any) -> Iterator[Tile]:
    """Patches `[tiles, N, features]`, of which some are padding, and the rows and columns of each (LFM2-VL)."""
    names = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
    for parts in zip(*(_given(inputs, name, ndim) for name, ndim in zip(names, (3, 2, 2))), strict=True):
        yield Tile({name: part[None] for name, part in zip(names, parts)})


def _given(inputs: Inputs, name: str, ndim: int) -> Tensor:
    value = inputs.get(name)
    if not isinstance(value, Tensor) or value.ndim != ndim:
        shown = list(value.shape) if isinstance(value, Tensor) else value
        raise StateError(f"{name} of the pictures is {shown!r:.80}; this model's processor makes {ndim} axes of it")
    return value


# model_type of a config -> how its pictures are parted.
FAMILIES: dict[str, Tiles] = {
    "gemma3": rows,
    "glm4v": grids,
    "glm4v_moe": grids,
    "glm_ocr": grids,
    "idefics3": padded_rows,
    "internvl": rows,
    "lfm2_vl": patched,
    "llava": rows,
    "llava_next": tiled,
    "mistral3": sized,
    "qwen2_5_vl": grids,
    "qwen2_vl": grids,
    "qwen3_5": grids,
    "qwen3_5_moe": grids,
    "qwen3_vl": grids,
    "qwen3_vl_moe": grids,
    "smolvlm": padded_rows,
}
# Whose chat templates write the token that begins a picture, and not that of its places.
BEGUN = frozenset({"gemma3"})
# Whose pictures are one tile each, and stand in a text as one run of places and nothing else.
UNTILED = frozenset(name for name, tiles in FAMILIES.items() if tiles in (grids, tiled)) | {"llava"}
