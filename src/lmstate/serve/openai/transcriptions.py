"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: what is said in a sound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from lmstate.audio.listener import language_names
from lmstate.audio.subtitles import as_srt, as_vtt
from lmstate.errors import ModelError, StateError, UnsupportedError
from lmstate.generation.transcript import (
    FALLBACK,
    Segment,
    SoundAnswer,
    SoundQuestion,
    TranscriptOptions,
    TranscriptWork,
    Word,
    WordsQuestion,
)
from lmstate.generation.transcription import transcription
from lmstate.serve.answer.handlers import json_response, log, unreadable
from lmstate.serve.answer.service import Service
from lmstate.serve.wire.errors import ApiError, as_api_error
from lmstate.serve.wire.schema.transcriptions import TranscriptionBody, TranslationBody
from lmstate.serve.wire.sse import EventStream, comment, data, unless_gone

TIMED = ("srt", "verbose_json", "vtt")  # formats that tell when things are said


async def transcriptions(service: Service, request: Request, body: TranscriptionBody) -> ASGIApp:
    told = body.timestamp_granularities or ["segment"]
    if "word" in told and body.response_format != "verbose_json":
        raise ApiError("times of words are in verbose_json: ask for that", param="timestamp_granularities")
    if body.include:
        raise ApiError("log probabilities are not supported here: leave include out", param="include")
    options = TranscriptOptions(language=body.language or None, words="word" in told, **_shared(body))
    return await _written(service, request, body, options, "segment" in told)


async def translations(service: Service, request: Request, body: TranslationBody) -> ASGIApp:
    return await _written(service, request, body, TranscriptOptions(task="translate", **_shared(body)))


def _shared(body: TranslationBody) -> dict[str, Any]:
    """The options that both have. Raises ApiError for those that do not go together."""
    if body.temperature_fallback and (body.stream or body.temperature):
        raise ApiError(
            "temperature_fallback tries temperatures from 0 on, and takes answers back: it goes with no other "
            "temperature and no stream",
            param="temperature_fallback",
        )
    return {
        "times": body.response_format in TIMED,
        "prompt": body.prompt,
        "seed": body.seed,
        "silence": body.response_format == "verbose_json",
        "condition_on_previous_text": bool(body.condition_on_previous_text),
        "temperature": FALLBACK if body.temperature_fallback else body.temperature or 0.0,
        **({"no_speech_threshold": None} if body.stream else {}),  # what was sent stays
    }


async def _written(
    service: Service, request: Request, body: TranslationBody, options: TranscriptOptions, segments: bool = True
) -> ASGIApp:
    """`segments`: whether verbose_json has them."""
    if body.stream and body.response_format not in (None, "json", "text"):
        raise ApiError(f"a stream has no {body.response_format}: ask for json", param="response_format")
    try:
        work = await asyncio.to_thread(transcription, service.model, body.file, options)
    except UnsupportedError as error:
        named = "language" if service.model.hears else None if service.model.takes_sounds else "model"
        raise ApiError(str(error), param=named) from None
    except StateError as error:
        raise ApiError(str(error), param="file", code="invalid_file") from None
    except ModelError as error:
        raise unreadable(error) from error
    task = TranscriptionTask(service, work)
    if body.stream:
        settings = service.settings
        return EventStream(task.events(), lambda: comment("ping"), settings.ping_interval, settings.write_timeout, {})
    await unless_gone(request.receive, task.finish())
    return _formatted(work, body.response_format or "json", options, segments)


@dataclass
class TranscriptionTask:
    """A transcript that the engine writes, one request after the other. `prompt`, `generated`: tokens of these."""

    service: Service
    work: TranscriptWork
    prompt: int = 0
    generated: int = 0

    async def finish(self) -> None:
        async for _ in self._texts():
            pass

    async def events(self) -> AsyncGenerator[bytes, None]:
        """OpenAI's events: the text as it comes, and all of it at the end."""
        sent = ""
        try:
            async for text in self._texts():
                text = text.strip()
                if len(text) > len(sent):
                    yield data({"type": "transcript.text.delta", "delta": text[len(sent) :]})
                    sent = text
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            yield data(as_api_error(error).openai())
            return
        usage = {"type": "tokens", "input_tokens": self.prompt, "output_tokens": self.generated}
        usage["total_tokens"] = self.prompt + self.generated
        yield data({"type": "transcript.text.done", "text": sent, "usage": usage})

    async def _texts(self) -> AsyncGenerator[str, None]:
        """All of the text, each time that it has grown. A sound of several windows grows by whole segments."""
        work = self.work
        while (asked := await asyncio.to_thread(work.ask)) is not None:
            if isinstance(asked, WordsQuestion):
                ends = await asyncio.wrap_future(self.service.engine.word_ends(asked))
                work.take(SoundAnswer(ends=ends))
                yield work.text
                continue
            request = self._submitted(asked)
            try:
                if asked.spoken and not work.times:
                    answer = ""
                    async for piece in request:
                        answer += piece.text
                        yield work.begun(answer)
                done = await request.wait()
            finally:
                request.cancel()
            assert done.logprobs is not None
            self.prompt += done.usage.prompt
            self.generated += done.usage.generated
            work.take(SoundAnswer(done.tokens[0], [each.logprob for each in done.logprobs[0]]))
            yield work.text

    def _submitted(self, asked: SoundQuestion) -> Any:
        return self.service.submit(asked.prompt, asked.params, max_new_tokens=asked.params.max_new_tokens)


def _formatted(work: TranscriptWork, format: str, options: TranscriptOptions, segments: bool) -> Response:
    made = work.transcript
    if format == "text":
        return Response(f"{made.text}\n", media_type="text/plain")
    if format == "srt":
        return Response(as_srt(made.segments), media_type="text/plain")
    if format == "vtt":
        return Response(as_vtt(made.segments), media_type="text/vtt")
    usage = {"type": "duration", "seconds": made.duration}
    if format == "json":
        return json_response({"text": made.text, "usage": usage})
    known = language_names()
    language = "english" if options.task == "translate" else known.get(made.language or "en", made.language)
    return json_response(
        {
            "task": options.task,
            "language": language,
            "duration": made.duration,
            "text": made.text,
            **({"words": [_word(word) for each in made.segments for word in each.words]} if options.words else {}),
            **({"segments": [_segment(index, each) for index, each in enumerate(made.segments)]} if segments else {}),
            "usage": usage,
        }
    )


def _word(word: Word) -> dict[str, Any]:
    return {"word": word.text, "start": word.start, "end": word.end}


def _segment(index: int, segment: Segment) -> dict[str, Any]:
    return {
        "id": index,
        "seek": segment.seek,
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }
