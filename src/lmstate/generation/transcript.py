"""Transcripts of sounds: what is asked of a model, and what it answers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmstate.audio.speech import Task
from lmstate.generation.params import SamplingParams
from lmstate.vision.reader import PicturePrompt


@dataclass(frozen=True, kw_only=True)
class TranscriptOptions:
    """Wishes for a transcript.

    language     of what is said, "en" or "english"; None finds it out
    task         "transcribe", or "translate" into English
    times        whether segments say when they are said; a sound longer than one window has them anyway
    prompt       a text before it, whose words and style it goes on with
    temperature  0.0 takes the most likely tokens
    seed         of the draws, where it is not 0.0
    silence      whether each segment tells how likely it is that nothing is said
    """

    language: str | None = None
    task: Task = "transcribe"
    times: bool = False
    prompt: str | None = None
    temperature: float = 0.0
    seed: int | None = None
    silence: bool = False


@dataclass(frozen=True)
class Segment:
    """A part of a transcript. `start` and `end` in seconds; `avg_logprob`: the mean of its window's tokens.

    `seek`: frame that its window begins at. `compression_ratio`: of the text's bytes to them packed.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    seek: int
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True)
class Transcript:
    """A whole transcript. `language`: as "en"; None of a model of one language. `duration` in seconds."""

    text: str
    language: str | None
    duration: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class SoundQuestion:
    """Something to ask a model. `spoken`: whether the answer is of the transcript."""

    prompt: PicturePrompt
    params: SamplingParams
    spoken: bool = False


@dataclass(frozen=True)
class SoundAnswer:
    """The answer: its tokens, and their log probabilities."""

    tokens: Sequence[int]
    logprobs: Sequence[float]


class TranscriptWork(Protocol):
    """A transcript in the making: `ask()` until there is no more, and `take` each answer.

    segments  of the answers so far
    times     whether they tell when they are said
    """

    segments: list[Segment]
    times: bool

    @property
    def text(self) -> str:
        """All that the answers so far say."""
        ...

    @property
    def transcript(self) -> Transcript: ...

    def ask(self) -> SoundQuestion | None:
        """The next question; None where the transcript is whole."""
        ...

    def take(self, heard: SoundAnswer) -> None:
        """The answer to the last question."""
        ...

    def begun(self, answer: str) -> str:
        """All that is said so far, with the beginning of the answer to the last question."""
        ...


def compression_ratio(text: str) -> float:
    """Bytes of a text to those of it packed: high where it repeats itself."""
    return len(data := text.encode()) / len(zlib.compress(data))
