"""Frames of a log-mel spectrogram as the stream of an encoder, made by convolutions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops import Weight


@dataclass(frozen=True, eq=False)
class SoundFrames:
    """Frames `[2 S, F]` -> the stream `[1, S, E]` in front of the first block (Whisper, 2212.04356).

    Two convolutions over 3 frames, the second at every other frame, each followed by a GELU; then positions `[S, E]`.
    """

    first: Weight  # [E, 3 F], each row frame by frame
    first_bias: Tensor
    second: Weight  # [E, 3 E]
    second_bias: Tensor
    positions: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Of the frames: how many, and how wide."""
        return 2 * self.positions.shape[0], self.first.shape[1] // 3

    @property
    def device(self) -> torch.device:
        return self.first.device

    def __call__(self, frames: Tensor) -> Tensor:
        act, x = ops.activation("gelu"), frames.to(self.device)
        x = act(ops.linear(_windows(x), self.first, self.first_bias))
        x = act(ops.linear(_windows(x)[::2].contiguous(), self.second, self.second_bias))
        return (x + self.positions)[None]


def _windows(x: Tensor) -> Tensor:
    """Each frame between its neighbors, zeros beyond the ends: `[N, F]` -> `[N, 3 F]`."""
    edge = x.new_zeros(1, x.shape[1])
    return torch.cat([torch.cat([edge, x[:-1]]), x, torch.cat([x[1:], edge])], 1)
