"""Segments of a transcript as subtitles: SubRip and WebVTT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Timed(Protocol):
    """A text with its times in seconds."""

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...

    @property
    def text(self) -> str: ...


def as_srt(segments: Sequence[Timed]) -> str:
    """SubRip: numbered, with a comma before the milliseconds."""
    cues = (f"{index}\n{_cue(segment, ',', always=True)}" for index, segment in enumerate(segments, 1))
    return "\n".join(cues)


def as_vtt(segments: Sequence[Timed]) -> str:
    """WebVTT (W3C), with hours where there are some."""
    return "WEBVTT\n\n" + "\n".join(_cue(segment, ".", always=False) for segment in segments)


def _cue(segment: Timed, point: str, always: bool) -> str:
    """A cue: its times and its text, in which an arrow would end it."""
    start, end = (_time(seconds, point, always) for seconds in (segment.start, segment.end))
    return f"{start} --> {end}\n{segment.text.strip().replace('-->', '->')}\n"


def _time(seconds: float, point: str, always: bool) -> str:
    """Hours where there are some, or `always`, minutes, seconds and milliseconds."""
    whole = max(0, round(seconds * 1000))
    hours, rest = divmod(whole, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    told = f"{minutes:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
    return f"{hours:02d}:{told}" if hours or always else told
