"""Pictures in a row: runs of positions that have embeddings of their own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from lmstate.errors import SnapshotError, StateError
from lmstate.state.sources import Source, named
from lmstate.state.validate import token_ids, whole_number

AXES = 3  # of positions: time, height, width
FARTHEST = 2**31  # a position on an axis is below
PICTURED = 2**62  # `identities` of positions of pictures, and of sources, are as large or larger, token ids are not


@dataclass(frozen=True)
class Media:
    """A picture as the text model sees it: N vectors of the stream, in place of the embeddings of N tokens.

    Made by `Media.of`. A value: nothing changes its tensors, and states, forks and snapshots share them. `hash` is the
    SHA-256 of all of it, so that two of the same hash are the same to a model. `token` is the id that is at each of
    its positions. `embeddings` float32 `[N, E]` are as they enter the first block; None where they were let go. In
    `[N, (1 + D) E]` the others are added to the stream after the first D blocks (DeepStack, 2406.04334).
    `positions` int64 `[3, N]` are those of the rope's axes (time, height, width), counted from its first token; None
    where a picture has positions as a text has. `text` are the ids of tokens after its embeddings that are one piece
    with it (PaliGemma's question): they are among its `count` positions, and have embeddings of their own. `beside`:
    its embeddings are in no token's place. It has one position, and layers of a kind of their own attend to it from
    there on (Llama 3.2 Vision).
    """

    hash: str
    token: int
    count: int
    embeddings: Tensor | None = field(compare=False, repr=False)
    positions: Tensor | None = field(default=None, compare=False, repr=False)
    text: tuple[int, ...] = ()
    beside: bool = False

    @staticmethod
    def of(
        embeddings: Tensor,
        token: int,
        positions: Tensor | None = None,
        text: Sequence[int] = (),
        beside: bool = False,
    ) -> Media:
        """A picture of these embeddings `[N, E]` or `[N, (1 + D) E]`. Raises `StateError` for anything else."""
        if not isinstance(embeddings, Tensor) or embeddings.ndim != 2 or not embeddings.is_floating_point():
            raise StateError(f"embeddings are {_shown(embeddings)}; those of a picture are float32 [N, E]")
        if not embeddings.numel():
            raise StateError(f"embeddings are {_shown(embeddings)}; a picture has at least one position")
        embeddings, token = embeddings.float(), whole_number(token, "a token id")
        behind = tuple(token_ids(text, "the text of a picture"))
        if beside and (behind or positions is not None):
            raise StateError("a picture beside the text has a text of its own, or positions of several axes")
        _check_positions(positions, len(embeddings), behind)
        count = 1 if beside else len(embeddings) + len(behind)
        return Media(
            _digest(embeddings, token, positions, behind, beside), token, count, embeddings, positions, behind, beside
        )

    @property
    def pictured(self) -> int:
        """Number of positions that have embeddings of the picture: N."""
        return self.count - len(self.text)

    @property
    def ids(self) -> list[int]:
        """The token at each of its positions."""
        return [*[self.token] * self.pictured, *self.text]

    @cached_property
    def extent(self) -> int:
        """Number of positions that the text after it stands farther on for it."""
        return self.count if self.positions is None else int(self.positions.max()) + 1

    @cached_property
    def numbers(self) -> list[int]:
        """A number for each position, which depends on `hash` and on the place in it: at least `PICTURED`."""
        digests = (hashlib.sha256(f"{self.hash} {at}".encode()).digest() for at in range(self.count))
        return [PICTURED | int.from_bytes(digest[:8], "big") >> 2 for digest in digests]

    @cached_property
    def derived(self) -> Derived:
        """Tensors that layers have made of it. All pictures of its hash share them, as long as there is one."""
        return _DERIVED.setdefault(self.hash, Derived())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        own = tuple(each for each in (self.embeddings, self.positions) if each is not None)
        return (*own, *self.derived.tensors) if self.beside else own

    def without_embeddings(self) -> Media:
        return replace(self, embeddings=None)

    def __deepcopy__(self, memo: object) -> Media:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


class Derived:
    """Tensors that layers have made of a picture, by layer and by the pictures that it stands behind."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[Any, dict[Any, tuple[Tensor, ...]]] = WeakKeyDictionary()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(each for made in [*self.of.values()] for tensors in [*made.values()] for each in tensors)


_DERIVED: WeakValueDictionary[str, Derived] = WeakValueDictionary()


def is_held(hash: str) -> bool:
    """Whether there is a picture of this hash whose `derived` was asked for."""
    return hash in _DERIVED


@dataclass(frozen=True)
class MediaSpan:
    """A picture at its place in a row."""

    at: int
    media: Media

    @property
    def end(self) -> int:
        """The position after its last one."""
        return self.at + self.media.count


Spans = tuple[MediaSpan, ...]


def read_by(spans: Spans, start: int, stop: int) -> Iterator[tuple[int, int, tuple[Media, ...], int]]:
    """Pictures beside the text that the positions `start .. stop - 1` of a row attend to.

    Yields the first of such positions, the one after the last, the pictures, and how many of them these see: those that
    follow each other up to there, and none before. Positions in front of all pictures are left out.
    """
    runs: list[list[MediaSpan]] = []
    for span in spans:
        if span.media.beside:
            if not runs or runs[-1][-1].end != span.at:
                runs.append([])
            runs[-1].append(span)
    for index, run in enumerate(runs):
        until = runs[index + 1][0].at if index + 1 < len(runs) else stop
        pictures = tuple(span.media for span in run)
        for seen, span in enumerate(run, start=1):
            first, end = max(start, span.at), min(stop, until if seen == len(run) else span.end)
            if first < end:
                yield first, end, pictures, seen


def within(spans: Spans, start: int, stop: int) -> Spans:
    """Pictures of which some position is in `start .. stop - 1`."""
    return tuple(span for span in spans if span.at < stop and start < span.end)


def inside(spans: Spans, position: int) -> MediaSpan | None:
    """The picture that a cut at `position` would part; None where it parts none."""
    return next((span for span in spans if span.at < position < span.end), None)


def before_picture(spans: Spans, position: int) -> int:
    """The last position up to this one that is inside no picture."""
    span = inside(spans, position)
    return position if span is None else span.at


def overlaid(x: Tensor, media: Sequence[Spans], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    """The stream x `[R, T, E]` of rows from `starts` to `ends`, with the embeddings of pictures at their places."""
    out = x
    for row, spans in enumerate(media):
        start, stop = starts[row], ends[row]
        for span in within(spans, start, stop):
            if span.media.beside:
                continue
            assert span.media.embeddings is not None  # a state plans no step without them
            first, last = max(start, span.at), min(stop, span.at + span.media.pictured)
            if first < last:
                out = x.clone() if out is x else out
                own = span.media.embeddings[first - span.at : last - span.at, : x.shape[-1]]
                out[row, first - start : last - start] = own.to(x)
    return out


def depth(media: Sequence[Spans], starts: Sequence[int], ends: Sequence[int], width: int) -> int:
    """Number of the first blocks after which pictures of a step add to a stream as wide as `width`."""
    widths = (
        span.media.embeddings.shape[-1] // width - 1
        for spans, start, stop in zip(media, starts, ends)
        for span in within(spans, start, stop)
        if span.media.embeddings is not None
    )
    return max(widths, default=0)


def deepened(x: Tensor, media: Sequence[Spans], starts: Sequence[int], ends: Sequence[int], block: int) -> Tensor:
    """The stream x `[R, T, E]` after a block, with what pictures add to it there."""
    out, width = x, x.shape[-1]
    for row, (spans, start, stop) in enumerate(zip(media, starts, ends)):
        for span in within(spans, start, stop):
            assert span.media.embeddings is not None
            first, last = max(start, span.at), min(stop, span.at + span.media.pictured)
            added = span.media.embeddings[first - span.at : last - span.at, (1 + block) * width : (2 + block) * width]
            if added.numel():
                out = x.clone() if out is x else out
                out[row, first - start : last - start] += added.to(x)
    return out


def axis_positions(spans: Spans, start: int, stop: int) -> Tensor:
    """Positions on the axes of a row's tokens `start .. stop - 1`: int64 `[3, n]`, all the same outside of pictures."""
    out, shift = torch.arange(start, stop).repeat(AXES, 1), 0
    for span in spans:
        if span.media.positions is None or span.at >= stop:
            continue
        first, last = max(start, span.at), min(stop, span.end)
        if first < last:
            own = span.media.positions[:, first - span.at : last - span.at]
            out[:, first - start : last - start] = own + (span.at - shift)
        shift += span.media.count - span.media.extent
        if span.end < stop:
            behind = max(start, span.end)
            out[:, behind - start :] = torch.arange(behind, stop) - shift
    return out


def identities(tokens: Sequence[int], spans: Spans, source: Source | None = None) -> list[int]:
    """The tokens of a row, with a number of the picture's own, above any id, at each position of one.

    The number of a position depends on the picture's hash and on the place in it: as many as a picture has positions
    must agree for another one to be taken for it. In a row that reads a source, such a number of the source and of the
    token is in place of the first one.
    """
    ids = list(tokens)
    if source and ids:
        digest = hashlib.sha256(f"source {ids[0]} {named(source)}".encode()).digest()
        ids[0] = PICTURED | int.from_bytes(digest[:8], "big") >> 2
    for span in within(spans, 0, len(ids)):
        stop = min(span.end, len(ids))
        ids[span.at : stop] = span.media.numbers[: stop - span.at]
    return ids


def refusal(spans: Spans, tokens: Sequence[int], vocab_size: int, width: int, layers: int, axes: bool) -> str | None:
    """Reason that pictures cannot be in a row of these tokens; None if they can.

    `width`, `layers`: E of the model, and the number of its blocks. `axes`: whether its rope has several.
    """
    behind = 0
    for span in sorted(spans, key=lambda span: span.at):
        media, where = span.media, f"a picture of {span.media.count} positions at {span.at}"
        if span.at < behind:
            return f"{where} begins before the one in front of it ends, at {behind}"
        behind = span.end
        if wrong := [token for token in (media.token, *media.text) if not 0 <= token < vocab_size]:
            return f"{where} has the token id {wrong[0]}; this model's ids are 0 to {vocab_size - 1}"
        whole = range(width, (1 if media.beside else 1 + layers) * width + 1, width)
        if media.embeddings is not None and media.embeddings.shape[-1] not in whole:
            return f"{where} has embeddings {list(media.embeddings.shape)}; this model's are as wide as {width}"
        if media.positions is not None and not axes:
            return f"{where} has positions of {AXES} axes; this model's rope has one"
        if (other := misplaced((span,), 0, tokens)) is not None:
            return other
    return None


def misplaced(spans: Spans, start: int, ids: Sequence[int]) -> str | None:
    """Reason that `ids`, the tokens of a row from `start` on, do not fit its pictures; None if they do."""
    for span in within(spans, start, start + len(ids)):
        own = span.media.ids
        for at in range(max(start, span.at), min(start + len(ids), span.end)):
            if ids[at - start] != own[at - span.at]:
                behind = " and a text" if span.media.text else ""
                return (
                    f"the token at {at} is {ids[at - start]}, and a picture of {span.media.count} positions stands at "
                    f"{span.at}: each of its tokens is {span.media.token}{behind}; to put another text there, rewind "
                    f"to {span.at} first"
                )
    return None


def held_tensors(media: Iterable[Spans]) -> dict[int, int]:
    """Bytes of each tensor of pictures, by where it is."""
    return {each.data_ptr(): each.nbytes for spans in media for span in spans for each in span.media.tensors}


def span_tensors(spans: Spans) -> dict[str, Tensor]:
    """The tensors of pictures by the names that files give them."""
    parts = ((f"media.{i}", span.media) for i, span in enumerate(spans))
    pairs = ((f"{name}.{part}", getattr(media, part)) for name, media in parts for part in ("embeddings", "positions"))
    return {name: tensor for name, tensor in pairs if tensor is not None}


def span_record(spans: Spans) -> list[list[Any]]:
    """The rest of pictures for a file: position, token id, number of positions and hash of each, and `_rest`."""
    return [[span.at, span.media.token, span.media.count, span.media.hash, *_rest(span.media)] for span in spans]


def _rest(media: Media) -> list[Any]:
    """The text of a picture, or that it is beside one; nothing for most."""
    return [list(media.text)] if media.text else [True] if media.beside else []


def read_spans(where: object, record: Any, tensors: dict[str, Tensor]) -> Spans:
    """Pictures of a file, whose tensors are taken out of `tensors`. Raises `SnapshotError` for damaged ones."""
    if isinstance(record, str):
        try:
            record = json.loads(record)
        except (ValueError, RecursionError):
            record = None
    spans = []
    for index, each in enumerate(record if isinstance(record, list) else [None]):
        kinds = tuple(map(type, each)) if isinstance(each, list) else ()
        text, beside = tuple(each[4]) if kinds[4:] == (list,) else (), kinds[4:] == (bool,) and each[4]
        numbers = [*each[:3], *text] if kinds[:4] == (int, int, int, str) else [-1]
        if len(kinds) > 5 or {*map(type, numbers)} != {int} or min(numbers) < 0 or max(numbers) >= FARTHEST:
            raise SnapshotError(f"{where} is damaged: its record of pictures is malformed")
        at, token, count, known = each[:4]
        if count <= len(text) or (len(kinds) == 5) != bool(text or beside) or (beside and count != 1):
            raise SnapshotError(f"{where} is damaged: its record of pictures is malformed")
        embeddings = tensors.pop(f"media.{index}.embeddings", None)
        positions = tensors.pop(f"media.{index}.positions", None)
        spans.append(MediaSpan(at, _read(where, Media(known, token, count, embeddings, positions, text, bool(beside)))))
    return tuple(spans)


def spans_to_json(spans: Iterable[MediaSpan]) -> list[Any]:
    """Pictures without their embeddings: as in `span_record`, and the positions of each, or None."""
    held = tuple(spans)
    positions = (None if span.media.positions is None else span.media.positions.tolist() for span in held)
    return [[*told, own] for told, own in zip(span_record(held), positions)]


def spans_from_json(told: Any, tokens: Sequence[int]) -> list[MediaSpan]:
    """Inverse of `spans_to_json`, of pictures among these tokens. Raises `SnapshotError` for damaged ones."""
    where, tensors = "a text", {}
    try:
        for index, (*_, positions) in enumerate(told):
            if positions is not None:
                tensors[f"media.{index}.positions"] = torch.tensor(positions, dtype=torch.int64)
        spans = read_spans(where, [each[:-1] for each in told], tensors)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SnapshotError(f"{where} is damaged: its record of pictures is malformed: {str(error)[:80]}") from None
    if wrong := misplaced(spans, 0, tokens):
        raise SnapshotError(f"{where} is damaged: {wrong}")
    if any(span.end > len(tokens) for span in spans):
        raise SnapshotError(f"{where} is damaged: a picture ends behind it")
    return list(spans)


def _read(where: object, media: Media) -> Media:
    """A picture of a file, checked. Without embeddings its hash cannot be, and is believed."""
    try:
        _check_positions(media.positions, media.count, media.text)
        tensors = media.embeddings, media.positions
        made = media if tensors[0] is None else Media.of(tensors[0], media.token, tensors[1], media.text, media.beside)
    except StateError as error:
        raise SnapshotError(f"{where} is damaged: {error}") from None
    if made != media:
        raise SnapshotError(f"{where} is damaged: a picture in it is not the one of its hash")
    return media


def _check_positions(positions: Tensor | None, count: int, text: Sequence[int]) -> None:
    if positions is None:
        return
    if text:
        raise StateError("a picture with positions of several axes has a text behind it; give one or the other")
    expected = (AXES, count)
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64 or positions.shape != expected:
        raise StateError(f"positions are {_shown(positions)}; those of this picture are int64 {list(expected)}")
    if int(positions.min()) < 0 or int(positions.max()) >= FARTHEST:
        raise StateError(f"positions of a picture are numbers from 0 to {FARTHEST - 1}")


def _digest(embeddings: Tensor, token: int, positions: Tensor | None, text: Sequence[int], beside: bool) -> str:
    behind = f" {list(text)}" if text else " beside" if beside else ""
    digest = hashlib.sha256(f"{token} {list(embeddings.shape)} {positions is not None}{behind}\n".encode())
    for tensor in (embeddings, positions):
        if tensor is not None:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _shown(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
