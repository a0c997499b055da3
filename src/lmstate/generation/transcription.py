"""Transcripts of sounds of any length, by a model that reads a window of one at a time or hears in a conversation.

With times the next window begins where the last whole piece of this one ends, as in transformers and in OpenAI's own
program; a sound that fits one window needs none. A model is asked one `SoundQuestion` after the other, so that
`transcribe` and a server, which has other requests beside it, run the same loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from lmstate.audio.listener import Listener, language_code
from lmstate.audio.speech import OneOf, SpeechGrammar, SpokenPiece, pieces_of
from lmstate.errors import UnsupportedError
from lmstate.generation.conversation_transcription import ConversationTranscription
from lmstate.generation.generate import Generation
from lmstate.generation.params import SamplingParams
from lmstate.generation.transcript import (
    Segment,
    SoundAnswer,
    SoundQuestion,
    Transcript,
    TranscriptOptions,
    TranscriptWork,
    compression_ratio,
)
from lmstate.language_model import LanguageModel
from lmstate.vision.reader import PicturePrompt, SeeingModel

FRAMES = 2  # of a step between two times


class Transcription:
    """A `TranscriptWork` of a model that reads a window at a time."""

    def __init__(self, listener: Listener, samples: Tensor, options: TranscriptOptions, max_positions: int) -> None:
        """samples: float32 `[N]` at the listener's rate. max_positions: tokens that a row may have.

        Raises `UnsupportedError` for a language or a task that the model does not have, ValueError for a prompt that it
        cannot read.
        """
        speech = listener.speech
        self.listener, self.speech, self.tokenizer, self.options = listener, speech, listener.tokenizer, options
        self.segments: list[Segment] = []
        self.duration = len(samples) / listener.rate
        self._max_positions = max_positions
        self._language = self._language_of(options.language)
        if options.task == "translate" and "translate" not in speech.tasks:
            raise UnsupportedError("a translation was asked for, and this model transcribes English alone")
        self._previous = self._prompt(options.prompt)
        self._frames = listener.frames(samples)
        self.times = options.times or len(samples) > listener.window
        self._seek, self._silence = 0, None if options.silence and speech.no_speech is not None else 0.0
        self._asked: SoundQuestion | None = None

    @property
    def language(self) -> str | None:
        """The language of what is said, once it is known."""
        return next((name for name, id in self.speech.languages.items() if id == self._language), None)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def transcript(self) -> Transcript:
        return Transcript(self.text.strip(), self.language, self.duration, tuple(self.segments))

    # ---- one question after the other

    def ask(self) -> SoundQuestion | None:
        """The next question; None where the transcript is whole."""
        speech, sampler = self.speech, SamplingParams(max_new_tokens=1, logprobs=0)
        if self._seek >= len(self._frames):
            return None
        source = self.listener.source_at(self._frames, self._seek)
        first = PicturePrompt([speech.start], source=source)
        if self._language is None and speech.languages:
            grammar = OneOf(speech.vocab_size, speech.languages.values())
            self._asked = SoundQuestion(first, replace(sampler, grammar=grammar))
        elif self._silence is None:
            assert speech.no_speech is not None
            self._asked = SoundQuestion(first, replace(sampler, grammar=OneOf(speech.vocab_size, [speech.no_speech])))
        else:
            tokens = [*self._previous, *speech.begin(self._language, self.options.task, self.times)]
            params = SamplingParams(
                max_new_tokens=max(self._max_positions - len(tokens), 1),
                temperature=self.options.temperature,
                seed=self.options.seed,
                logprobs=0,
                grammar=SpeechGrammar(speech, self.times),
                times_from=speech.first_time if self.times else None,
            )
            self._asked = SoundQuestion(PicturePrompt(tokens, source=source), params, spoken=True)
        return self._asked

    def take(self, heard: SoundAnswer) -> None:
        """The answer to the last question."""
        asked, speech = self._asked, self.speech
        assert asked is not None
        if asked.spoken:
            self._take_spoken(heard)
        elif self._language is None and speech.languages:
            self._language = heard.tokens[0]
        else:
            self._silence = math.exp(heard.logprobs[0])

    def _take_spoken(self, heard: SoundAnswer) -> None:
        width = min(self.listener.width, len(self._frames) - self._seek)
        steps = width // FRAMES
        pieces, reached = [SpokenPiece(0, steps, tuple(heard.tokens))], steps
        if self.times:
            pieces, reached = pieces_of(self.speech, heard.tokens, steps)
        step = self.listener.window / self.listener.rate / (self.listener.width / FRAMES)
        begin, mean = self._seek / FRAMES * step, sum(heard.logprobs) / max(len(heard.logprobs), 1)
        for piece in pieces:
            text = self.tokenizer.decode(self.speech.words(piece.tokens))
            segment = Segment(
                start=begin + piece.start * step,
                end=begin + piece.end * step,
                text=text,
                tokens=piece.tokens,
                seek=self._seek,
                temperature=self.options.temperature,
                avg_logprob=mean,
                compression_ratio=compression_ratio(text),
                no_speech_prob=self._silence or 0.0,
            )
            self.segments.append(segment)
        self._seek += width if reached == steps else reached * FRAMES
        self._silence = None if self.options.silence and self.speech.no_speech is not None else 0.0

    def begun(self, answer: str) -> str:
        """All that is said so far, with the beginning of the answer to the last question."""
        return self.text + answer

    # ---- what it begins with

    def _language_of(self, asked: str | None) -> int | None:
        if asked is None:
            return None
        known, code = self.speech.languages, language_code(asked)
        found = known.get(code)
        if found is None and (known or code != "en"):
            told = ", ".join(sorted(known)) or "en"
            raise UnsupportedError(f"the language {asked!r:.40} was asked for; this model knows {told}")
        return found

    def _prompt(self, prompt: str | None) -> list[int]:
        """The tokens of a text before the transcript, at most half of the positions, the last ones."""
        if not prompt or self.speech.previous is None:
            return []
        control = self.tokenizer.control_tokens()
        ids = self.tokenizer.encode_rendered(control.hide(f" {prompt.strip()}"), control)
        return [self.speech.previous, *ids[-(self._max_positions // 2 - 2) :]]


class Hearing(SeeingModel, Protocol):
    """The part of a model that hears which knows sounds; `lmstate.Model` may be one."""

    @property
    def config(self) -> Any: ...

    @property
    def max_positions(self) -> int | None:
        """Positions that it has learned."""
        ...

    @property
    def takes_sounds(self) -> bool:
        """Whether it takes sounds in a conversation."""
        ...

    def listener(self) -> Listener:
        """The maker of its features of sounds."""
        ...


class HearingModel(LanguageModel, Hearing, Protocol):
    """A model that writes what it hears."""


def transcribe(model: HearingModel, sound: bytes | Tensor, **options: Any) -> Transcript:
    """The words of a sound of any length up to half an hour, or of ten minutes by a model that hears in conversations.

    sound: the bytes of a WAV file; or for Whisper samples, float32 `[N]` at `model.listener().rate`. options: the
    fields of `TranscriptOptions`. Raises `StateError` for a sound that is damaged or too long, `UnsupportedError` for a
    model that writes no transcripts, and for a language, a task or another wish that it does not know.
    """
    work = transcription(model, sound, TranscriptOptions(**options))
    for _ in segments_of(model, work):
        pass
    return work.transcript


def segments_of(model: HearingModel, work: TranscriptWork) -> Iterator[Segment]:
    """The segments of a transcript as they are made."""
    state, read = model.new_state(), None
    while (ask := work.ask()) is not None:
        state.rewind(0, 0)
        if ask.prompt.source is None or ask.prompt.source != read:
            ask.prompt.place(state)
            read = ask.prompt.source
        run = Generation(model, [ask.prompt.tokens], state, ask.params, draft=None)
        for _ in run:
            pass
        told = len(work.segments)
        work.take(SoundAnswer(run.ids[0], [one.logprob for one in run.logprobs[0]]))
        yield from work.segments[told:]


def transcription(model: Hearing, sound: bytes | Tensor, options: TranscriptOptions) -> TranscriptWork:
    """A transcript to be made. Raises as `transcribe`."""
    if model.takes_sounds:
        return ConversationTranscription(model.pictures(), sound, options)
    listener = model.listener()
    if model.max_positions is None:
        raise UnsupportedError(f"a transcript was asked for, and a {model.config.family} model writes none")
    with listener.one:
        samples = sound if isinstance(sound, Tensor) else listener.samples(sound)
        return Transcription(listener, samples, options, model.max_positions)
