"""Transcripts of sounds of any length, by a model that reads a window of one at a time or hears in a conversation.

With times the next window begins where the last whole piece of this one ends, as in transformers and in OpenAI's own
program; a sound that fits one window needs none. A model is asked one `SoundQuestion` after the other, so that
`transcribe` and a server, which has other requests beside it, run the same loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from lmstate.audio.listener import Listener, language_code
from lmstate.audio.speech import OneOf, SpeechGrammar, SpokenPiece, pieces_of
from lmstate.audio.words import token_ends, words_of
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
    Word,
    WordsQuestion,
    compression_ratio,
)
from lmstate.language_model import LanguageModel
from lmstate.state import SourceFeatures, State
from lmstate.vision.reader import PicturePrompt, SeeingModel

FRAMES = 2  # of a step between two times
COLD = 0.5  # an answer that is drawn at a higher temperature is not gone on with
LEAST = 30  # part of a window (a second of Whisper's) by which windows go on, on average
SHORT = 32  # windows that may go on by less, of one sound


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
        self._prompt = self._read(options.prompt)
        self._frames = listener.frames(samples)
        self._heard = -(-len(samples) * listener.width // listener.window)  # frames up to the end of the sound
        self.times = options.times or options.words or len(samples) > listener.window
        self._seek, self._windows, self._try, self._said = 0, 0, 0, list[int]()
        self._silence = None if speech.no_speech is not None else 0.0  # how likely it is in the window, once known
        self._answer: SoundAnswer | None = None  # which is being judged
        self._goes_on = options.condition_on_previous_text
        self._asked: SoundQuestion | WordsQuestion | None = None

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

    def ask(self) -> SoundQuestion | WordsQuestion | None:
        """The next question; None where the transcript is whole."""
        speech, sampler = self.speech, SamplingParams(max_new_tokens=1, logprobs=0)
        if self._seek >= len(self._frames):
            return None
        source = self.listener.source_at(self._frames, self._seek)
        if self._language is None and speech.languages:
            grammar = OneOf(speech.vocab_size, speech.languages.values())
            self._asked = SoundQuestion(PicturePrompt([speech.start], source=source), replace(sampler, grammar=grammar))
        elif self._silence is None and (self.options.silence or self._answer is not None):
            assert speech.no_speech is not None
            first = PicturePrompt([*self._before(), speech.start], source=source)
            self._asked = SoundQuestion(first, replace(sampler, grammar=OneOf(speech.vocab_size, [speech.no_speech])))
        elif self._answer is not None:
            answer, heard = self._answer.tokens, max(self._heard - self._seek, 0) // FRAMES
            self._asked = WordsQuestion(self._spoken_prompt(source), answer, speech.alignment, heard, speech.median)
        else:
            prompt = self._spoken_prompt(source)
            params = SamplingParams(
                max_new_tokens=max(self._max_positions - len(prompt), 1),
                temperature=self.options.temperatures[self._try],
                seed=self.options.seed_of_draws,
                logprobs=0,
                allowed_logprobs=True,
                ignore_eos=True,  # the grammar ends with it: its probability counts
                grammar=SpeechGrammar(speech, self.times),
                times_from=speech.first_time if self.times else None,
            )
            self._asked = SoundQuestion(prompt, params, spoken=True)
        return self._asked

    def take(self, heard: SoundAnswer) -> None:
        """The answer to the last question."""
        asked, speech = self._asked, self.speech
        assert asked is not None
        if isinstance(asked, WordsQuestion):
            self._add(heard.ends)
        elif asked.spoken:
            tokens = heard.tokens[:-1] if heard.tokens[-1:] == [speech.end] else heard.tokens
            self._answer = replace(heard, tokens=tokens)
            self._judge()
        elif self._language is None and speech.languages:
            self._language = heard.tokens[0]
        else:
            self._silence = math.exp(heard.logprobs[0])
            self._judge()

    def _judge(self) -> None:
        """Take an answer, try again at the next temperature, or leave the window out; or wait for what that needs."""
        options, answer = self.options, self._answer
        if answer is None:
            return
        unlikely = options.logprob_threshold is not None and _mean(answer.logprobs) < options.logprob_threshold
        quiet = False  # whether nothing is said
        if options.no_speech_threshold is not None and (unlikely or options.logprob_threshold is None):
            if self._silence is None:
                return
            quiet = self._silence > options.no_speech_threshold
        ratio, most = compression_ratio(self._text_of(answer.tokens)), options.compression_ratio_threshold
        bad = unlikely or (most is not None and ratio > most)
        if quiet:
            self._go_on(self._window)
        elif bad and self._try + 1 < len(options.temperatures):
            self._try, self._answer = self._try + 1, None
        elif not (options.words and answer.tokens):
            self._add()

    def _add(self, ends: Sequence[int] = ()) -> None:
        """Add the segments of the answer. `ends`: the positions where its tokens end, where words are wanted."""
        answer, steps = self._answer, self._window // FRAMES
        assert answer is not None
        pieces, reached = [SpokenPiece(0, steps, tuple(answer.tokens))], steps
        if self.times:
            pieces, reached = pieces_of(self.speech, answer.tokens, steps)
        at, temperature = 0, self.options.temperatures[self._try]
        for piece in pieces:
            text = self._text_of(piece.tokens)
            segment = Segment(
                start=self._seconds(piece.start),
                end=self._seconds(piece.end),
                text=text,
                tokens=piece.tokens,
                seek=self._seek,
                temperature=temperature,
                avg_logprob=_mean(answer.logprobs),
                compression_ratio=compression_ratio(text),
                no_speech_prob=self._silence or 0.0,
                words=self._words(piece.tokens, [0, *ends][at : at + len(piece.tokens) + 1]) if ends else (),
            )
            self.segments.append(segment)
            at += len(piece.tokens)
        self._said += (token for piece in pieces for token in piece.tokens)
        goes_on = self.options.condition_on_previous_text and temperature < COLD
        self._go_on(self._window if reached == steps else reached * FRAMES, goes_on)

    def _words(self, tokens: Sequence[int], bounds: Sequence[int]) -> tuple[Word, ...]:
        """The words of a segment. `bounds`: the positions where each of its tokens begins, and the last one ends."""
        places = [at for at, token in enumerate(tokens) if token < self.speech.end]
        made = words_of([tokens[at] for at in places], self.tokenizer.decode, self.language)
        spans = ((text.strip(), bounds[places[own[0]]], bounds[places[own[-1]] + 1]) for text, own in made)
        return tuple(Word(text, self._seconds(start), self._seconds(end)) for text, start, end in spans)

    def _go_on(self, frames: int, goes_on: bool | None = None) -> None:
        """The next window begins after these frames. `goes_on`: whether with the text so far; None leaves it.

        Answers that end after a word again and again would make a window for each step of the sound: where too many
        are short, it begins later.
        """
        self._windows += 1
        least = (self._windows - SHORT) * max(self.listener.width // LEAST, 1)
        self._seek, self._try, self._answer = max(self._seek + frames, least), 0, None
        self._silence = None if self.speech.no_speech is not None else 0.0
        self._goes_on = self._goes_on if goes_on is None else goes_on

    @property
    def _window(self) -> int:
        """Frames of the sound in the window."""
        return min(self.listener.width, len(self._frames) - self._seek)

    def _seconds(self, step: int) -> float:
        """The time of a step of the window."""
        return (self._seek / FRAMES + step) * self.listener.window / self.listener.rate / (self.listener.width / FRAMES)

    def _text_of(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(self.speech.words(tokens))

    def _before(self) -> list[int]:
        """The tokens of a text before the transcript, at most half of the positions, the last ones."""
        said = [*self._prompt, *self._said] if self._goes_on else self._prompt
        if not said or self.speech.previous is None:
            return []
        return [self.speech.previous, *said[-(self._max_positions // 2 - 1) :]]

    def _spoken_prompt(self, source: SourceFeatures) -> PicturePrompt:
        begin = self.speech.begin(self._language, self.options.task, self.times)
        return PicturePrompt([*self._before(), *begin], source=source)

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

    def _read(self, prompt: str | None) -> list[int]:
        """The tokens of a text before the transcript."""
        if not prompt or self.speech.previous is None:
            return []
        control = self.tokenizer.control_tokens()
        return self.tokenizer.encode_rendered(control.hide(f" {prompt.strip()}"), control)


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

    @property
    def no_word_times(self) -> str | None:
        """The reason for which it does not tell when words are said; None where it does."""
        ...


class HearingModel(LanguageModel, Hearing, Protocol):
    """A model that writes what it hears."""

    def cross_weights(self, tokens: Sequence[int], state: State, heads: Sequence[tuple[int, int]]) -> Tensor:
        """As `lmstate.Model.cross_weights`."""
        ...


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
        told = len(work.segments)
        if isinstance(ask, WordsQuestion):
            work.take(SoundAnswer(ends=ends_of(model, state, ask)))
            yield from work.segments[told:]
            continue
        run = Generation(model, [ask.prompt.tokens], state, ask.params, draft=None)
        for _ in run:
            pass
        work.take(SoundAnswer(run.ids[0], [one.logprob for one in run.logprobs[0]]))
        yield from work.segments[told:]


def transcription(model: Hearing, sound: bytes | Tensor, options: TranscriptOptions) -> TranscriptWork:
    """A transcript to be made. Raises as `transcribe`."""
    if model.takes_sounds:
        return ConversationTranscription(model.pictures(), sound, options)
    listener = model.listener()
    if options.words and model.no_word_times is not None:
        raise UnsupportedError(model.no_word_times)
    if model.max_positions is None:
        raise UnsupportedError(f"a transcript was asked for, and a {model.config.family} model writes none")
    with listener.one:
        samples = sound if isinstance(sound, Tensor) else listener.samples(sound)
        return Transcription(listener, samples, options, model.max_positions)


def ends_of(model: HearingModel, state: State, ask: WordsQuestion) -> list[int]:
    """The position where each token of an answer ends. The row of the state holds the beginning of the prompt."""
    weights = model.cross_weights([*ask.prompt.tokens[state.lengths[0] :], *ask.answer], state, ask.heads)
    return token_ends(weights[:, -len(ask.answer) :, : ask.positions], ask.median)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / max(len(numbers), 1)
