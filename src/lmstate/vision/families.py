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


def _given(inputs: Inputs, name: str, ndim: int) -> Tensor:
    value = inputs.get(name)
    if not isinstance(value, Tensor) or value.ndim != ndim:
        shown = list(value.shape) if isinstance(value, Tensor) else value
        raise StateError(f"{name} of the pictures is {shown!r:.80}; this model's processor makes {ndim} axes of it")
    return value


# Whose pictures are one tile each, and stand in a text as one run of places and nothing else.
UNTILED = frozenset({"llava", "qwen2_5_vl", "qwen2_vl"})
# model_type of a config -> how its pictures are parted.
FAMILIES: dict[str, Tiles] = {
    "idefics3": padded_rows,
    "internvl": rows,
    "llava": rows,
    "qwen2_5_vl": grids,
    "qwen2_vl": grids,
    "smolvlm": padded_rows,
}
