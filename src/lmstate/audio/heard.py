"""Sounds in conversations: a tower of transformers makes a run of positions of each, as others do of a picture.

The road is that of pictures: a part of a message, a mark in the chat template, `Media` in the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lmstate.audio.listener import open_extractor
from lmstate.audio.transcript_prompts import ASKED, SOUND, TranscriptRequest
from lmstate.audio.wav import read_wav
from lmstate.errors import ModelError, StateError, UnsupportedError
from lmstate.text.tokenizer import Tokenizer
from lmstate.vision.families import Tile
from lmstate.vision.reader import PicturedTexts, PicturePrompt, PictureReader, kind_of_file, name_of, picture_part
from lmstate.vision.tower import Tower, family_of, hears_beside, lacking, load_tower

MOST_SOUNDS = 16  # of a conversation
MOST_SECONDS = 600  # of all of them together
LEAST_SECONDS = 0.1  # of a sound: shorter ones make no position, or no step of a tower
LONGEST_BESIDE = 30  # seconds of a sound of a model that sees too: its processor cuts longer ones
# model_type of a config -> seconds of the longest sound that its processor does not cut.
FAMILIES: dict[str, Callable[[Any], float]] = {
    "audioflamingo3": lambda processor: processor.max_audio_len,
    "glmasr": lambda processor: processor.max_audio_len,
    "musicflamingo": lambda processor: processor.max_audio_len,
    "qwen2_audio": lambda processor: processor.feature_extractor.chunk_length,
    "qwen3_asr": lambda processor: MOST_SECONDS,
    "voxtral": lambda processor: MOST_SECONDS,
}
NEEDED = ("transformers",)  # packages of their towers and processors
WINDOWED = ("voxtral",)  # whose processor leaves sounds to mistral-common: windows of its feature extractor, all whole
BOUNDED = ("musicflamingo",)  # whose processor, and not the template, writes where a sound begins and ends


class _Overlaid(Exception):
    """The stream that a text model was given."""

    def __init__(self, stream: Tensor) -> None:
        self.stream = stream


class _NoText(nn.Module):
    """In the place of a text model: embeds every token as zeros, and ends the forward with the stream that it gets.

    So a wrapper's own forward tells what it puts at the places of a sound, whatever its family does for it.
    """

    def __init__(self, width: int, config: Any) -> None:
        super().__init__()
        self.width, self.config = width, config

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        return lambda ids: torch.zeros(*ids.shape, self.width, device=ids.device)

    def forward(self, *, inputs_embeds: Tensor, **others: Any) -> Any:
        raise _Overlaid(inputs_embeds)


class SoundTower(Tower):
    """The sound tower of a checkpoint. A tile is a whole sound: `input_ids` of its places, and its features."""

    @staticmethod
    def open(path: Path, device: torch.device | str = "cpu") -> SoundTower:
        """Raises as `Tower.open`."""
        whole, config = load_tower(path, "sounds", FAMILIES)
        hearing = whole.base_model
        hearing.language_model = _NoText(config.text_config.hidden_size, config.text_config)
        config.image_token_id = config.audio_token_id
        tower = hearing.to(device).eval().requires_grad_(False)
        return SoundTower(config.model_type, tower, config, torch.device(device))

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        try:
            self.module(**inputs)
        except _Overlaid as end:
            return end.stream[0].float()
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"the tower does not take what its processor made: {str(error)[:200]}") from error
        raise ModelError(f"transformers' {self.family} did not ask for its text model")


class SoundReader(PictureReader):
    """The tower, transformers' processor and the tokenizer of a checkpoint that hears in a conversation.

    `pixels`: the feature extractor; `processor`: None for the families of `WINDOWED`.
    """

    kinds = ("audio",)

    @classmethod
    def open(cls, path: Path, tokenizer: Tokenizer, device: Any = "cpu") -> SoundReader:
        """Raises what `SoundTower.open` does, and `ModelError` where transformers cannot read the processor's files."""
        tower = SoundTower.open(path, device)
        if tower.family in WINDOWED:
            return SoundReader(tower, open_extractor(path), None, tokenizer)
        from transformers import AutoProcessor

        try:
            made = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            raise ModelError(f"transformers cannot read the processor of {path}: {str(error)[:200]}") from error
        return SoundReader(tower, made.feature_extractor, made, tokenizer)

    @property
    def mark(self) -> str:
        return super().mark if self.processor is None else str(self.processor.audio_token)

    def texts(self, pictures: Sequence[bytes]) -> PicturedTexts:
        """A tokenizer for conversations with these sounds: runs the tower. Raises `StateError` for bad ones."""
        if (count := len(pictures)) > MOST_SOUNDS:
            raise StateError(f"the conversation has {count} sounds; it may have {MOST_SOUNDS}")
        begin, left = perf_counter(), float(MOST_SECONDS)
        rate, longest = int(self.pixels.sampling_rate), FAMILIES[self.tower.family](self.processor)
        tiles, places = [], []
        with self._one:
            for content in pictures:
                samples = _samples(content, rate, min(left, longest))
                left -= len(samples) / rate
                try:
                    made = self._features(samples.numpy(), rate)
                except (ValueError, TypeError, KeyError, RuntimeError) as error:
                    raise StateError(f"the model's processor does not take a sound: {str(error)[:200]}") from error
                ids = made.pop("input_ids")
                ids = ids[ids == self.tower.placeholder][None]
                given = {name: value for name, value in made.items() if isinstance(value, Tensor)}
                tile = Tile({**given, "input_ids": ids, "attention_mask": torch.ones_like(ids)})
                if len(self.tower.embed(tile)) != ids.shape[1]:
                    raise ModelError(f"transformers' {self.tower.family} made other positions than its processor said")
                tiles.append(tile)
                places.append(self._places(ids.shape[1]))
        return PicturedTexts(self, tiles, list(map(name_of, pictures)), places, perf_counter() - begin)

    def transcript_prompt(
        self, sound: bytes, language: str | None, prompt: str | None
    ) -> tuple[PicturePrompt, TranscriptRequest]:
        """The question for the transcript of a sound. language, prompt: as of `TranscriptOptions`.

        Raises as `texts`, `UnsupportedError` for a family that writes none, and for wishes that it has no words for.
        """
        if (ask := ASKED.get(self.tower.family)) is None:
            raise UnsupportedError(
                f"a transcript was asked for, and {self.tower.family} models hear in conversations alone: ask for one "
                f"in a chat; transcripts are written by {', '.join(sorted(ASKED))} and Whisper models"
            )
        request = ask(self.processor, language, prompt)
        if request.token and self.tokenizer.id_of(request.token) is None:
            raise ModelError(f"the tokenizer has no token {request.token}, which transcripts are asked for with")
        texts, control = self.texts([sound]), self.tokenizer.control_tokens()
        place = picture_part(name_of(sound), "audio")
        messages = [
            {**message, "content": [place if part is SOUND else part for part in message["content"]]}
            for message in request.messages
        ]
        text = texts.chat_text(control.hide(messages)) + request.opening + request.token
        return texts.prompt(texts.encode_rendered(text, control)), request

    def _places(self, count: int) -> str:
        """The text of a sound that takes `count` positions."""
        if self.tower.family in BOUNDED:
            return f"{self.processor.audio_bos_token}{self.mark * count}{self.processor.audio_eos_token}"
        return self.mark * count

    def _features(self, samples: Any, rate: int) -> Any:
        """The features of a sound, float32 `[windows, bins, frames]`, with the `input_ids` of its places."""
        if self.processor is not None:
            return self.processor(text=[self.mark], audio=[samples], sampling_rate=rate, return_tensors="pt")
        options = {"truncation": False, "padding": True, "pad_to_multiple_of": self.pixels.n_samples}
        made = self.pixels(samples, sampling_rate=rate, return_tensors="pt", **options)["input_features"]
        windows = made[0].unflatten(1, (-1, self.pixels.nb_max_frames)).transpose(0, 1).contiguous()
        config = self.tower.config.audio_config
        # As many frames of the encoder as fill a vector of its feed-forward layer make one position.
        count = len(windows) * config.max_source_positions * config.hidden_size // config.intermediate_size
        return {"input_ids": torch.full((1, count), self.tower.placeholder), "input_features": windows}


class MixedReader(PictureReader):
    """The reader of a checkpoint whose tower makes embeddings of pictures and of sounds."""

    kinds = ("image", "audio")

    @property
    def marks(self) -> dict[str, str]:
        return {self.mark: "image", str(self.processor.audio_token): "audio"}

    def texts(self, pictures: Sequence[bytes]) -> PicturedTexts:
        """As `PictureReader.texts`, with sounds among the pictures."""
        begin, kinds = perf_counter(), list(map(kind_of_file, pictures))
        if (count := kinds.count("audio")) > MOST_SOUNDS:
            raise StateError(f"the conversation has {count} sounds; it may have {MOST_SOUNDS}")
        images = [file for file, kind in zip(pictures, kinds) if kind == "image"]
        shown = iter(super().texts(images).parts() if images else ())
        with self._one:
            heard = iter([self._sound(file) for file, kind in zip(pictures, kinds) if kind == "audio"])
        each = [next(heard if kind == "audio" else shown) for kind in kinds]
        tiles, places = [tile for tile, _ in each], [place for _, place in each]
        return PicturedTexts(self, tiles, list(map(name_of, pictures)), places, perf_counter() - begin, kinds)

    def _sound(self, file: bytes) -> tuple[Tile, str]:
        """A sound for the tower, and the text of its places."""
        extractor = self.processor.feature_extractor
        rate = int(extractor.sampling_rate)
        samples = _samples(file, rate, LONGEST_BESIDE).numpy()
        try:
            made = self.processor(text=[self.processor.audio_token], audio=[samples], return_tensors="pt")
            place = str(self.processor.replace_audio_token(made, 0))
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise StateError(f"the model's processor does not take a sound: {str(error)[:200]}") from error
        tile = Tile({name: made[name] for name in ("input_features", "input_features_mask")}, token=self._audio_token)
        if len(self.tower.embed(tile)) != place.count(str(self.processor.audio_token)):
            raise ModelError(f"transformers' {self.tower.family} made other positions than its processor said")
        return tile, place

    @property
    def _audio_token(self) -> int:
        return int(self.tower.config.audio_token_id)


def _samples(file: bytes, rate: int, most: float) -> Tensor:
    """As `read_wav`. Raises `StateError` for a sound that is too short as well."""
    samples = read_wav(file, rate, most)
    if len(samples) < LEAST_SECONDS * rate:
        raise StateError(f"a sound has {len(samples) / rate:.4f} seconds; it must have {LEAST_SECONDS} or more")
    return samples


def lacking_for_sounds(path: Path) -> list[str] | None:
    """The packages that sounds in conversations need and that are not here; None of a folder that takes no sounds."""
    try:
        family = family_of(path)
    except ModelError:
        return None
    if family in FAMILIES:
        return [name for name in NEEDED if find_spec(name) is None]
    return lacking(family) if hears_beside(path) else None


def open_reader(path: Path, tokenizer: Tokenizer, device: Any = "cpu") -> PictureReader:
    """The reader of the pictures of a checkpoint, or of its sounds. Raises as `PictureReader.open`."""
    if hears_beside(path):
        return MixedReader.open(path, tokenizer, device)
    return (PictureReader if lacking_for_sounds(path) is None else SoundReader).open(path, tokenizer, device)
