"""Transcripts of sounds: what is asked of a model, and what it answers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmstate.audio.speech import Task
from lmstate.generation.params import SamplingParams
from lmstate.vision.reader import PicturePrompt

FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # the temperatures of OpenAI's own program


@dataclass(frozen=True, kw_only=True)
class TranscriptOptions:
    """Wishes for a transcript.

    language     of what is said, "en" or "english"; None finds it out
    task         "transcribe", or "translate" into English
    times        whether segments say when they are said; a sound longer than one window has them anyway
    prompt       a text before it, whose words and style it goes on with
    temperature  0.0 takes the most likely tokens; of several (`FALLBACK`) the next is tried where an answer is bad
    seed         of the draws, where it is not 0.0; without one, those of several temperatures are always the same
    silence      whether each segment tells how likely it is that nothing is said
    words        whether segments say when each word is said

    And as in OpenAI's own program; None leaves a rule out:

    compression_ratio_threshold  an answer whose text packs better repeats itself, and is bad
    logprob_threshold            one whose tokens are less likely on average is bad
    no_speech_threshold          such a one is left out where silence is likelier than this
    condition_on_previous_text   whether a window goes on with the text of those before it
    """

    language: str | None = None
    task: Task = "transcribe"
    times: bool = False
    prompt: str | None = None
    temperature: float | tuple[float, ...] = 0.0
    seed: int | None = None
    silence: bool = False
    words: bool = False
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_previous_text: bool = False

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ValueError("temperature is (); give a number, or several in the order in which they are tried")

    @property
    def temperatures(self) -> tuple[float, ...]:
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)

    @property
    def seed_of_draws(self) -> int | None:
        """The seed, where a transcript would else be another one each time that an answer is tried again."""
        return 0 if self.seed is None and len(self.temperatures) > 1 else self.seed


@dataclass(frozen=True)
class Word:
    """A word of a transcript, with the marks at it. `start` and `end` in seconds."""

    text: str
    start: float
    end: float


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
    words: tuple[Word, ...] = ()


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
class WordsQuestion:
    """A question for the times of the tokens of an answer to a prompt. `heads`: see `SpeechTokens.alignment`.

    `positions`: of the encoder, up to the end of the sound. Answered by `token_ends` of the weights.
    """

    prompt: PicturePrompt
    answer: Sequence[int]
    heads: Sequence[tuple[int, int]]
    positions: int
    median: int


@dataclass(frozen=True)
class SoundAnswer:
    """The answer: its tokens, and their log probabilities; or where its tokens end, if that was asked."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    ends: Sequence[int] = ()


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

    def ask(self) -> SoundQuestion | WordsQuestion | None:
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
