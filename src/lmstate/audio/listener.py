"""Features of sounds, as the encoder of a checkpoint reads them: transformers' own feature extractor makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmstate.audio.wav import read_wav
from lmstate.errors import ModelError, StateError, UnsupportedError
from lmstate.state import SourceFeatures

FILE = "preprocessor_config.json"
MOST_RATE, MOST_SECONDS = 192_000, 60  # of a feature extractor: more is a damaged file


class Listener:
    """transformers' feature extractor of a checkpoint. Safe for any thread.

    `rate`: samples per second that it hears at. `window`: samples of one source, those of 30 seconds for Whisper.
    """

    def __init__(self, extractor: Any) -> None:
        self._extractor = extractor
        self.rate, self.window = int(extractor.sampling_rate), int(extractor.n_samples)

    @staticmethod
    def open(path: Path) -> Listener:
        """Raises `UnsupportedError` without the extra `lmstate[audio]`, `ModelError` for files that cannot be read."""
        try:
            from transformers import WhisperFeatureExtractor
        except ImportError as error:
            raise UnsupportedError("sounds need transformers: pip install 'lmstate[audio]'") from error
        try:
            fields = json.loads((path / FILE).read_bytes())
            extractor: Any = WhisperFeatureExtractor.from_dict(fields)
            sizes = extractor.sampling_rate, extractor.chunk_length
            if not (0 < sizes[0] <= MOST_RATE and 0 < sizes[1] <= MOST_SECONDS):
                raise ValueError(f"it hears {sizes[1]} seconds at {sizes[0]} samples each")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
            raise ModelError(f"transformers cannot read {path / FILE}: {str(error)[:200]}") from error
        return Listener(extractor)

    def samples(self, data: bytes) -> Tensor:
        """The samples of a WAV file, float32 `[N]` at `rate`. Raises as `read_wav`."""
        return read_wav(data, self.rate)

    def features(self, samples: Tensor) -> SourceFeatures:
        """Those of 1 to `window` samples, float32 `[N]`, with silence behind them. Raises `StateError` for others."""
        if not isinstance(samples, Tensor) or samples.ndim != 1 or not samples.is_floating_point():
            raise StateError(f"samples of a sound are {samples!r:.80}; they are float32 [N]")
        if not 0 < len(samples) <= self.window:
            raise StateError(
                f"a sound of {len(samples) / self.rate:.1f} seconds was given; a source has at most "
                f"{self.window / self.rate:g}, and some sound: Model.transcribe takes longer ones"
            )
        with torch.inference_mode(False), torch.no_grad():
            made = self._extractor(samples.cpu().float().numpy(), sampling_rate=self.rate, return_tensors="pt")
        return SourceFeatures.of(made["input_features"][0].T)
