"""Transcripts by models that hear in conversations: one question about a sound, answered with its words."""

from __future__ import annotations

from typing import Any

from lmstate.audio.heard import SoundReader
from lmstate.audio.transcript_prompts import transcript_of
from lmstate.audio.wav import seconds_of
from lmstate.errors import UnsupportedError
from lmstate.generation.params import SamplingParams
from lmstate.generation.transcript import (
    Segment,
    SoundAnswer,
    SoundQuestion,
    Transcript,
    TranscriptOptions,
    compression_ratio,
)

TOKENS, TOKENS_PER_SECOND = 64, 16  # of the longest answer; Whisper's window of 30 seconds has 448


class ConversationTranscription:
    """A `TranscriptWork` of one question. Its only segment is the whole sound."""

    times = False

    def __init__(self, reader: Any, sound: Any, options: TranscriptOptions) -> None:
        """reader: the model's `SoundReader`. sound: the bytes of a WAV file.

        Raises `StateError` for a bad sound, `UnsupportedError` for a family or a wish without a transcript.
        """
        if not isinstance(reader, SoundReader):
            family = reader.tower.family
            raise UnsupportedError(
                f"a transcript was asked for, and {family} models hear in conversations alone: ask for one in a chat"
            )
        if options.task != "transcribe":
            raise UnsupportedError("a translation was asked for, and this model transcribes: ask for one in a chat")
        if options.times or options.silence or options.words:
            raise UnsupportedError("times were asked for, and this model's transcripts have none: ask for the text")
        prompt, request = reader.transcript_prompt(sound, options.language, options.prompt)
        self.segments: list[Segment] = []
        self.duration, self.language = seconds_of(sound), request.language
        self._reader = reader
        most = TOKENS + int(TOKENS_PER_SECOND * self.duration)
        self._temperature = options.temperatures[0]
        params = SamplingParams(max_new_tokens=most, temperature=self._temperature, seed=options.seed, logprobs=0)
        self._question = SoundQuestion(prompt, params, spoken=True)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def transcript(self) -> Transcript:
        return Transcript(self.text, self.language, self.duration, tuple(self.segments))

    def ask(self) -> SoundQuestion | None:
        return None if self.segments else self._question

    def take(self, heard: SoundAnswer) -> None:
        text, language = self._words(self._reader.tokenizer.decode(heard.tokens), True)
        self.language = self.language or language
        segment = Segment(
            start=0.0,
            end=self.duration,
            text=text,
            tokens=tuple(heard.tokens),
            seek=0,
            temperature=self._temperature,
            avg_logprob=sum(heard.logprobs) / max(len(heard.logprobs), 1),
            compression_ratio=compression_ratio(text),
            no_speech_prob=0.0,
        )
        self.segments.append(segment)

    def begun(self, answer: str) -> str:
        return self._words(answer, False)[0]

    def _words(self, answer: str, whole: bool) -> tuple[str, str | None]:
        asked = self.language is not None  # then the answer begins after it
        return transcript_of(self._reader.tower.family, self._reader.processor, answer, asked, whole)
