"""Features of sounds, as the encoder of a checkpoint reads them: transformers' own feature extractor makes them."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmstate.audio.speech import SpeechTokens
from lmstate.audio.wav import read_wav
from lmstate.errors import ModelError, StateError, UnsupportedError
from lmstate.state import SourceFeatures

if TYPE_CHECKING:
    from lmstate.text.tokenizer import Tokenizer

FILE = "preprocessor_config.json"
MOST_RATE, MOST_SECONDS = 192_000, 60  # of a feature extractor: more is a damaged file


class Listener:
    """transformers' feature extractor of a checkpoint. Safe for any thread.

    `rate`: samples per second that it hears at. `window`, `width`: samples and frames of one source, those of 30
    seconds for Whisper. `one`: held while a sound of any length is read, for half an hour takes a gigabyte.
    """

    def __init__(self, extractor: Any, path: Path, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._extractor, self._path, self._tokenizer, self._vocab_size = extractor, path, tokenizer, vocab_size
        self.rate, self.window = int(extractor.sampling_rate), int(extractor.n_samples)
        self.width = int(extractor.nb_max_frames)
        self.one = Lock()

    @staticmethod
    def open(path: Path, tokenizer: Tokenizer | None, vocab_size: int) -> Listener:
        """Raises `UnsupportedError` without the extra `lmstate[audio]`, `ModelError` for files that cannot be read."""
        return Listener(open_extractor(path), path, tokenizer, vocab_size)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises `StateError` for a model without one."""
        if self._tokenizer is None:
            raise StateError(f"{self._path} has no tokenizer, which a transcript is written with: add a tokenizer.json")
        return self._tokenizer

    @cached_property
    def speech(self) -> SpeechTokens:
        """The tokens that a transcript is written with. Raises as `SpeechTokens.open`."""
        return SpeechTokens.open(self._path, self.tokenizer, self._vocab_size)

    def samples(self, data: bytes) -> Tensor:
        """The samples of a WAV file, float32 `[N]` at `rate`. Raises as `read_wav`."""
        return read_wav(data, self.rate)

    def features(self, samples: Tensor) -> SourceFeatures:
        """Those of 1 to `window` samples, float32 `[N]`, with silence after them. Raises `StateError` for others."""
        if not isinstance(samples, Tensor) or samples.ndim != 1 or not samples.is_floating_point():
            raise StateError(f"samples of a sound are {samples!r:.80}; they are float32 [N]")
        if not 0 < len(samples) <= self.window:
            raise StateError(
                f"a sound of {len(samples) / self.rate:.1f} seconds was given; a source has at most "
                f"{self.window / self.rate:g}, and some sound: Model.transcribe takes longer ones"
            )
        return SourceFeatures.of(self._frames(samples))

    def frames(self, samples: Tensor) -> Tensor:
        """The frames of a sound of any length, float32 `[N, F]`: `source_at` makes sources of them.

        Those of a short one have silence after them, as in `features`.
        """
        return self._frames(samples) if len(samples) <= self.window else self._frames(samples, padding=False)

    def source_at(self, frames: Tensor, begin: int) -> SourceFeatures:
        """A source of the frames from one on, as many as the encoder reads, and zeros where there are too few."""
        own = frames[begin : begin + self.width]
        return SourceFeatures.of(torch.nn.functional.pad(own, (0, 0, 0, self.width - len(own))))

    def _frames(self, samples: Tensor, padding: bool = True) -> Tensor:
        options = {} if padding else {"truncation": False, "padding": "longest"}
        with torch.inference_mode(False), torch.no_grad():
            made = self._extractor(
                samples.cpu().float().numpy(), sampling_rate=self.rate, return_tensors="pt", **options
            )
        return made["input_features"][0].T.contiguous()


def language_names() -> dict[str, str]:
    """The English name of each language that Whisper knows, by its code: "en" is "english"."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return dict(LANGUAGES)


def language_code(name: str) -> str:
    """The code of a language: "en" of "English", and of "en" itself; a name that Whisper does not know as it is."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    name = name.strip().lower()
    return str(TO_LANGUAGE_CODE.get(name, name))


def open_extractor(path: Path) -> Any:
    """transformers' feature extractor of a checkpoint folder, made for Whisper. Raises as `Listener.open`."""
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
    return extractor
