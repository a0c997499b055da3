"""Requests for transcripts to models that hear in conversations, and the words of their answers.

Each family is asked as its processor of transformers asks it (`apply_transcription_request`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmstate.audio.listener import language_code, language_names
from lmstate.errors import UnsupportedError

Ask = Callable[[Any, str | None, str | None], "TranscriptRequest"]
SOUND = {"type": "audio"}  # its place in a message
BEFORE_TEXT = "<asr_text>"  # Qwen3-ASR: "language English<asr_text>...", unless the language was given


@dataclass(frozen=True)
class TranscriptRequest:
    """A conversation, with `SOUND` where the sound is, and the text that its answer begins with.

    `token`: after that text, which the tokenizer must have. `language`: the code of what is said, if it was given.
    """

    messages: list[dict[str, Any]]
    opening: str = ""
    token: str = ""
    language: str | None = None


def _voxtral(processor: Any, language: str | None, prompt: str | None) -> TranscriptRequest:
    """As mistral-common writes it."""
    if prompt:
        raise UnsupportedError("a prompt was given, and Voxtral writes transcripts without one: leave it out")
    code = None if language is None else language_code(language)
    if code is not None and (len(code) != 2 or code not in language_names()):
        raise UnsupportedError(f"the language {language!r:.40} was asked for; expected a code of two letters, as en")
    return TranscriptRequest([_said(SOUND)], "" if code is None else f"lang:{code}", "[TRANSCRIBE]", code)


def _qwen3_asr(processor: Any, language: str | None, prompt: str | None) -> TranscriptRequest:
    from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME as NAMES

    context = [{"role": "system", "content": [_text(prompt)]}] if prompt else []
    if language is None:
        return TranscriptRequest([*context, _said(SOUND)])
    known = {code.lower(): code for code in NAMES} | {name.lower(): code for code, name in NAMES.items()}
    if (code := known.get(language.strip().lower())) is None:
        raise UnsupportedError(f"the language {language!r:.40} was asked for; this model knows {', '.join(NAMES)}")
    return TranscriptRequest([*context, _said(SOUND)], f"language {NAMES[code]}{BEFORE_TEXT}", language=code)


def _sound_first(processor: Any, language: str | None, prompt: str | None) -> TranscriptRequest:
    _refuse_language(language)
    return TranscriptRequest([_said(SOUND, _text(prompt or processor.default_transcription_prompt))])


def _sound_last(processor: Any, language: str | None, prompt: str | None) -> TranscriptRequest:
    _refuse_language(language)
    return TranscriptRequest([_said(_text(prompt or processor.default_transcription_prompt), SOUND)])


# model_type of a config -> how it is asked.
ASKED: Mapping[str, Ask] = {
    "audioflamingo3": _sound_last,
    "glmasr": _sound_first,
    "qwen3_asr": _qwen3_asr,
    "voxtral": _voxtral,
}


def transcript_of(
    family: str, processor: Any, answer: str, language_known: bool, whole: bool = True
) -> tuple[str, str | None]:
    """(the words of an answer, the code of the language that it names, if it does).

    `language_known`: it was asked with. `whole`: else the answer goes on, and no more is told than what only grows.
    """
    if family == "audioflamingo3":  # it may speak about the transcript
        return (processor._strip_assistant_prefix_and_quotes(answer) if whole else ""), None
    if family != "qwen3_asr" or language_known:
        return answer.strip(), None
    before, marked, words = answer.partition(BEFORE_TEXT)
    if not marked:
        return (answer.strip() if whole else ""), None
    name = before.strip().removeprefix("language").strip()
    return words.strip(), None if name in ("", "None") else language_code(name)


def _said(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _refuse_language(language: str | None) -> None:
    if language is not None:
        raise UnsupportedError("a language was given, and this model finds it out alone: leave it out")
