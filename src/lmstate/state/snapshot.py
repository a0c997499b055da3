"""One row of a state at one position, as an immutable value."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmstate.errors import SnapshotError, StateError
from lmstate.ops.types.block_table import KVBlock
from lmstate.state.blocks import CapturedBlocks, Parts, held_by, nbytes_of
from lmstate.state.gradients import CopiedGraphs
from lmstate.state.layer_file import MOST_TOKENS, by_layer, metadata_number, read_layers, write_layers
from lmstate.state.media import MediaSpan, Spans, held_tensors, identities, read_spans, span_record, span_tensors
from lmstate.state.rows import Row
from lmstate.state.sources import Source, SourceFeatures
from lmstate.state.validate import token_ids, whole_number

FORMAT = "lmstate-snapshot"
VERSION = 6
"""Of the tensors of layers, in files and in the tiers of an engine: those of another version are not read."""


@dataclass(frozen=True, repr=False)
class Snapshot:
    """All that a row needs to go on: token ids, last logits and every layer's memory. A value: nothing changes it.

    Keys, values and latents are held in blocks that rows and other snapshots may hold as well.

    `cached` of the `length` tokens are in `layers`; the rest (after a rewind that went far back, say) is recomputed by
    the first call after a restore. `frequency_key` tells which frequencies rotated the keys, see `State`. `logits`
    (float32 `[V]`) are those after the last token, None if they are not known. `fingerprint` names the model: words of
    the form name=value, of its config and of a sample of its weights; `model` is its name for people, which nothing
    checks. `notes` is text of the application that made it.
    `source`: what the row is conditioned on, of a model with an encoder: ids, or features without their values. The
    keys and values of it are in `layers`.
    `media` are the row's pictures, in order, with those that were placed and not read yet. `opening`: learned positions
    in front of the tokens, which `cached` counts, see `lmstate.state.opening`.
    """

    tokens: tuple[int, ...]
    cached: int
    frequency_key: int
    logits: Tensor | None
    layers: tuple[Mapping[str, Tensor], ...]
    fingerprint: str
    notes: str = ""
    model: str = ""
    source: Source | None = None
    media: Spans = ()
    opening: int = 0

    def __repr__(self) -> str:
        family = next((word[7:] for word in str(self.fingerprint).split() if word.startswith("family=")), "unknown")
        notes = f", notes {self.notes!r:.80}" if self.notes else ""
        size = f"{self.nbytes / 2**20:,.1f} MiB"
        return f"Snapshot({len(self.tokens)} tokens, {len(self.layers)} layers of a {family:.40} model, {size}{notes})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Snapshot:
        with CopiedGraphs():
            logits, layers = copy.deepcopy((self.logits, self.layers), memo)
        return replace(self, logits=logits, layers=layers)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def backlog(self) -> int:
        """Number of positions that the first call after a restore computes again."""
        return self.opening + self.length - self.cached

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to one safetensors file, whole or not at all. Raises `OSError` where the file cannot be written.

        Metadata: `format`, `version`, `fingerprint`, `cached`, `frequency_key`, `layers`, `notes`, `model` and
        `checksums`. Tensors: `tokens` int64 `[length]`, `logits` float32 `[V]` if known, and `layers.{index}.{name}`
        for the content of each layer. A source of text is a tensor `source` int64; of a sound the metadata has the
        hash. With pictures also metadata `media` and tensors `media.{index}.embeddings` and `media.{index}.positions`;
        with learned positions metadata `opening`, their number.
        """
        tensors = {"tokens": torch.tensor(self.tokens, dtype=torch.int64)}
        if self.logits is not None:
            tensors["logits"] = self.logits
        if isinstance(self.source, tuple):
            tensors["source"] = torch.tensor(self.source, dtype=torch.int64)
        for index, layer in enumerate(self.layers):
            tensors.update({f"layers.{index}.{name}": tensor for name, tensor in layer.items()})
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "fingerprint": self.fingerprint,
            "cached": str(self.cached),
            "frequency_key": str(self.frequency_key),
            "layers": str(len(self.layers)),
            "notes": self.notes,
            "model": self.model,
        }
        if isinstance(self.source, SourceFeatures):
            metadata["source"] = self.source.to_json()
        if self.opening:
            metadata["opening"] = str(self.opening)
        if self.media:
            metadata["media"] = json.dumps(span_record(self.media))
            tensors |= span_tensors(self.media)
        write_layers(path, metadata, tensors)

    @staticmethod
    def load(path: str | os.PathLike[str], *, mmap: bool = False) -> Snapshot:
        """Read a snapshot that `save` wrote, and verify its checksums. Whether it fits a model, `State.restore` checks.

        Its tensors are copies of the file. `mmap`: they are in the file mapped into memory, which reads it once for the
        checksums and holds none of it; the file must not change as long as they live. Raises `SnapshotError` if it is
        damaged or no snapshot, `OSError` if unreadable.
        """
        path = Path(path)
        metadata, tensors = read_layers(path, FORMAT, VERSION, "lmstate snapshot", mmap=mmap)
        tokens, logits = _tokens(path, tensors, "tokens"), tensors.pop("logits", None)
        source: Source | None = _tokens(path, tensors, "source") if "source" in tensors else None
        if "source" in metadata and source is None:
            source = SourceFeatures.from_json(path, metadata["source"])
        if logits is not None and (logits.dtype != torch.float32 or logits.ndim != 1):
            raise SnapshotError(f"{path} has logits {logits.dtype} {list(logits.shape)}; they are one float32 vector")
        opening = metadata_number(path, metadata, "opening", MOST_TOKENS) if "opening" in metadata else 0
        cached = metadata_number(path, metadata, "cached", opening + len(tokens))
        frequency_key = metadata_number(path, metadata, "frequency_key", MOST_TOKENS)
        media = read_spans(path, metadata.get("media", "[]"), tensors)
        layers = by_layer(path, tensors, metadata_number(path, metadata, "layers", 100_000))
        fingerprint, notes, model = (metadata.get(name, "") for name in ("fingerprint", "notes", "model"))
        return Snapshot(
            tokens, cached, frequency_key, logits, layers, fingerprint, notes, model, source, media, opening
        )

    def without_embeddings(self) -> Snapshot:
        """The same without the embeddings of pictures that were read, which only recomputation needs."""
        spans = (
            span
            if span.media.beside or span.end > self.cached - self.opening
            else MediaSpan(span.at, span.media.without_embeddings())
            for span in self.media
        )
        return replace(self, media=tuple(spans))

    @property
    def identities(self) -> list[int]:
        """Its tokens, with numbers of a picture's content where one stands: texts that are alike in them are alike."""
        return identities(self.tokens, self.media, self.source)

    def as_row(self, vocab_size: int, ids: int, device: torch.device) -> Row:
        """The record of the row apart from its layers, in tensors of its own. `ids`: number of those that it may hold.

        No field is trusted: a snapshot may have been made by hand. Raises `SnapshotError` if one cannot be. The tensors
        of `layers` are for each layer to check.
        """
        try:
            tokens = token_ids(self.tokens, "the snapshot", ids)
            source = _kept_source(self.source, ids)
            cached = whole_number(self.cached, "cached")
            frequency_key = whole_number(self.frequency_key, "frequency_key")
            opening = whole_number(self.opening, "opening")
        except StateError as error:
            raise SnapshotError(f"the snapshot is damaged: {error}") from None
        if opening < 0 or not 0 <= cached <= opening + len(tokens):
            raise SnapshotError(
                f"the snapshot is damaged: it says that {cached} of its {len(tokens)} tokens are in its layers"
            )
        if not isinstance(self.layers, tuple | list) or not all(map(_is_captured, self.layers)):
            raise SnapshotError("the snapshot is damaged: what it has of its layers is not tensors")
        if not isinstance(self.media, tuple) or not all(isinstance(span, MediaSpan) for span in self.media):
            raise SnapshotError("the snapshot is damaged: its pictures are not MediaSpans")
        media = tuple(sorted(self.media, key=lambda span: span.at))
        logits, row = self.logits, Row.of(tokens, cached, frequency_key)._replace(source=source, media=media)
        if logits is None:
            return row
        if not isinstance(logits, Tensor) or logits.shape != (vocab_size,) or not logits.is_floating_point():
            raise SnapshotError(f"the snapshot's logits are {_shown(logits)}; this model gives float32 [{vocab_size}]")
        return row._replace(logits=logits.to(device, torch.float32, copy=True))

    def held(self) -> Iterator[KVBlock | Tensor]:
        """Blocks, which others may hold too, and tensors."""
        for layer in self.layers:
            yield from held_by(layer)
        yield from (tensor for span in self.media for tensor in span.media.tensors)
        if self.logits is not None:
            yield self.logits

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, as in a file."""
        held = sum(map(nbytes_of, self.layers)) + sum(held_tensors([self.media]).values())
        return held + (0 if self.logits is None else self.logits.nbytes)


def differences(theirs: str, ours: str) -> str:
    """The parts that two fingerprints disagree on, in words; empty if none."""
    if theirs == ours:
        return ""
    there, here = (dict(word.partition("=")[::2] for word in str(text).split()) for text in (theirs, ours))
    named = [name for name in here | there if there.get(name) != here.get(name)]
    pairs = [(name, there.get(name, "not set")[:40], here.get(name, "not set")[:40]) for name in named]
    said = [f"{name} is {other} there and {own} here" for name, other, own in pairs]
    return ", ".join(said) or "its fingerprint cannot be read"


def _tokens(path: Path, tensors: dict[str, Tensor], name: str) -> tuple[int, ...]:
    tokens = tensors.pop(name, None)
    if tokens is None or tokens.dtype != torch.int64 or tokens.ndim != 1:
        raise SnapshotError(f"{path} has no token ids; a snapshot has them as one int64 vector")
    if len(tokens) and int(tokens.min()) < 0:
        raise SnapshotError(f"{path} has negative token ids")
    return tuple(tokens.tolist())


def _kept_source(source: Source | None, vocab_size: int) -> Source | None:
    """The source of a row, checked, and without the values of features. Raises `StateError` for a damaged one."""
    if isinstance(source, SourceFeatures):
        if not source.whole:
            raise StateError(f"its source is {source!r:.80}")
        return source.without_values()
    return None if source is None else tuple(token_ids(source, "the source", vocab_size))


def _is_captured(layer: object) -> bool:
    if isinstance(layer, CapturedBlocks | Parts):
        return True
    return isinstance(layer, Mapping) and all(isinstance(part, Tensor) for part in layer.values())


def _shown(thing: object) -> str:
    return f"{thing.dtype} {list(thing.shape)}" if isinstance(thing, Tensor) else f"{thing!r:.80}"
