"""Videos as frames: checked within limits, and parted into what a tower sees."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lmstate.errors import ModelError, StateError, UnsupportedError
from lmstate.vision.families import VIDEOS, Tile
from lmstate.vision.pictures import MOST_BYTES, read_frame, read_picture
from lmstate.vision.video_files import MOST_BYTES as MOST_FILE_BYTES
from lmstate.vision.video_files import frames_of_file

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_FRAMES = 768  # of a conversation
FPS = (0.001, 1000.0)  # frames for each second of a video: least and most
USUAL_FPS = 2.0  # that are taken from a file
SHAPE = '{"type": "video", "video": [frames], "fps": 2.0}'


@dataclass(frozen=True)
class Video:
    """Frames of one size in RGB, and how many there are for each second. `name`: the SHA-256 of all of it."""

    frames: tuple[Image, ...]
    fps: float
    name: str

    @property
    def pixels(self) -> int:
        """Number of pixels of all frames."""
        return sum(frame.width * frame.height for frame in self.frames)


def read_video(part: Mapping[str, Any], most_frames: int, most_pixels: int, until: float | None = None) -> Video:
    """The video of a part of a message: a file, by its path or its bytes, or frames, which are pictures of Pillow,
    paths, or bytes of picture files. `until`: as in `frames_of_file`.

    Raises as `frames_of_file`, and `StateError` for frames of several sizes, for too many, and for other values.
    """
    given: Any = part.get("video")
    fps = part.get("fps")
    is_file = isinstance(given, str | Path | bytes | bytearray | memoryview)
    if not is_file and (not isinstance(given, list | tuple) or not given):
        raise StateError(f"a video is {given!r:.80}; give a file, or a list of its frames: {SHAPE}")
    fps = USUAL_FPS if is_file and fps is None else fps
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not FPS[0] <= fps <= FPS[1]:
        raise StateError(f"fps of a video is {fps!r:.80}; it is the number of its frames for each second: {SHAPE}")
    if is_file:
        given, fps = frames_of_file(_content(given), float(fps), max(1, most_frames), most_pixels, until)
    if len(given) > most_frames:
        raise StateError(f"the videos have {len(given) - most_frames + MOST_FRAMES} frames; all may have {MOST_FRAMES}")
    frames: list[Image] = []
    digest, pixels = hashlib.sha256(f"{float(fps)} {len(given)}\n".encode()), 0
    for index, one in enumerate(given):
        try:
            frame = _read(one)
        except StateError as error:
            raise StateError(f"frame {index} of a video: {error}") from None
        if frames and frame.size != frames[0].size:
            raise StateError(f"frame {index} of a video is {frame.size}, and the first {frames[0].size}: give one size")
        if (pixels := pixels + frame.width * frame.height) > most_pixels:
            raise StateError(f"the frames of videos have more than {most_pixels} pixels; give fewer or smaller ones")
        digest.update(f"{frame.size}\n".encode() + frame.tobytes())
        frames.append(frame)
    return Video(tuple(frames), float(fps), digest.hexdigest())


def _content(file: str | Path | bytes | bytearray | memoryview) -> bytes:
    if not isinstance(file, str | Path):
        return bytes(file)
    with Path(file).open("rb") as opened:
        return opened.read(MOST_FILE_BYTES + 1)


def _read(frame: Any) -> Image:
    if isinstance(frame, bytes | bytearray | memoryview):
        return read_picture(bytes(frame))
    if not isinstance(frame, str | Path):
        return read_frame(frame)
    with Path(frame).open("rb") as file:
        return read_picture(file.read(MOST_BYTES + 1))


class VideoWords(NamedTuple):
    """Texts around the places of a video: what begins and ends a group of frames, and the mark that a template
    writes."""

    begin: str
    mark: str
    end: str


class VideoProcessor:
    """transformers' processor of videos of a checkpoint folder. `mark`: the text that a template writes for a video."""

    def __init__(self, made: Any, config: Any, words: VideoWords, processor: Any) -> None:
        self.made, self.config, self.words, self.processor = made, config, words, processor
        self.form, self.mark = VIDEOS[config.model_type], words.mark

    @staticmethod
    def open(path: Path, config: Any, words: VideoWords, processor: Any) -> VideoProcessor:
        """processor: transformers' own of the family, where the reader of pictures has it: it writes words of videos.

        Raises `UnsupportedError` without torchvision.
        """
        if find_spec("torchvision") is None:
            raise UnsupportedError("videos need torchvision: pip install torchvision")
        from transformers import AutoProcessor, AutoVideoProcessor

        try:
            if processor is None and VIDEOS[config.model_type] == "timed after":
                processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            made = AutoVideoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            raise ModelError(
                f"transformers cannot read the processor of videos of {path}: {str(error)[:200]}"
            ) from error
        return VideoProcessor(made, config, words, processor)

    def tiles(self, video: Video) -> tuple[list[Tile], str]:
        """The tiles of a video, and the text of its places. Raises ValueError for one that is not taken.

        A tile is the whole video, a group of `temporal_patch_size` frames where texts of their times are between, or a
        frame.
        """
        import numpy as np

        frames = torch.from_numpy(np.stack([np.asarray(frame) for frame in video.frames])).permute(0, 3, 1, 2)
        made = self.made(videos=[frames], do_sample_frames=False, return_tensors="pt")
        if self.form == "frames":
            return self._pictures(video, made)
        pixels, token, (begin, mark, end) = (
            made["pixel_values_videos"],
            int(self.config.video_token_id),
            self.words,
        )
        if self.form == "run":
            side = -(-self.config.vision_config.image_size // self.config.vision_config.patch_size // 2)
            return [Tile({"pixel_values_videos": pixels}, token=token)], mark * (pixels.shape[1] * side**2 + 1)
        (grid,) = made["video_grid_thw"]
        groups, height, width = grid.tolist()
        merged = self.config.vision_config.spatial_merge_size
        rows, columns, together = height // merged, width // merged, int(self.made.temporal_patch_size)
        if self.form == "whole":
            pace = 1.0
            if (speed := getattr(self.config.vision_config, "tokens_per_second", None)) is not None:
                pace = float(speed * torch.tensor(together / video.fps, dtype=torch.float32))
            given = {"pixel_values": pixels, "image_grid_thw": grid[None]}
            return [Tile(given, (groups, rows, columns), token, pace)], mark * (groups * rows * columns)
        parts = pixels.chunk(groups)
        one = torch.tensor([[1, height, width]])
        grouped = [{"pixel_values": own, "image_grid_thw": one} for own in parts]
        if self.form == "timed after":  # in the places of pictures
            return [Tile(own, (1, rows, columns)) for own in grouped], self._written(video, made)
        times = group_times(len(video.frames), video.fps, together)
        text = "".join(f"<{time:.1f} seconds>{begin}{mark * (rows * columns)}{end}" for time in times)
        return [Tile(own, (1, rows, columns), token) for own in grouped], text

    def _pictures(self, video: Video, made: Any) -> tuple[list[Tile], str]:
        """Its frames as pictures, and transformers' text of them."""
        pixels = made.get("pixel_values_videos", made.get("pixel_values"))[0]
        masks = made.get("pixel_attention_mask")
        tiles = [Tile({"pixel_values": frame[None]}) for frame in pixels]
        if masks is not None:
            pairs = zip(pixels, masks[0], strict=True)
            tiles = [Tile({"pixel_values": p[None, None], "pixel_attention_mask": m[None, None]}) for p, m in pairs]
        return tiles, self._written(video, made)

    def _written(self, video: Video, made: Any) -> str:
        """The text of a video as transformers' processor writes it."""
        from transformers.video_utils import VideoMetadata

        count = len(video.frames)
        told = VideoMetadata(
            total_num_frames=count, fps=video.fps, duration=count / video.fps, frames_indices=list(range(count))
        )
        return str(self.processor.replace_video_token({**made, "video_metadata": [told]}, 0))


def group_times(count: int, fps: float, together: int) -> list[float]:
    """Seconds of each group of frames: the mean of its first and last one. The last frame fills the last group."""
    firsts = range(0, count, together)
    return [(first / fps + min(first + together - 1, count - 1) / fps) / 2 for first in firsts]


def frames_of(videos: Iterable[Video]) -> int:
    return sum(len(video.frames) for video in videos)
