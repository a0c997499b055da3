"""A folder of snapshots that stores what they have in common once.

index.sqlite3      each snapshot: its name, what a file's metadata would say, and the parts that it is made of
parts/ab/abcd...   safetensors files, named by the SHA-256 of what they hold
damaged/           parts that hold something else, to find out why

A part holds the positions of a run of tokens, of every layer that keeps an entry a token: two snapshots with a common
prefix have these parts in common. The memory that layers have of all tokens together is one more part.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import torch
from torch import Tensor

from lmstate.errors import SnapshotError, UnsupportedError
from lmstate.files.blob_folder import DIGEST, BlobFolder
from lmstate.state.blocks import CapturedBlocks, Parts
from lmstate.state.layer_file import MOST_TOKENS, VersionError, by_layer, dump_layers, read_layers
from lmstate.state.media import read_spans, span_record, span_tensors
from lmstate.state.snapshot import VERSION as SNAPSHOT_VERSION
from lmstate.state.snapshot import Snapshot

FORMAT, VERSION = "lmstate-snapshot-part", 1
PART_TOKENS = 256
"""Positions of a part: prefixes are shared in whole parts."""
MOST_MANIFEST = 2**28  # characters of a manifest: a hostile index must not fill the memory
TABLE = "snapshots (name text primary key, manifest text not null, nbytes integer not null)"
LOCK_SECONDS = 30.0  # that a transaction waits for others


class Manifest(TypedDict):
    """The record of a snapshot in the index: `Snapshot` without tensors, and the digests of its parts."""

    version: int
    fingerprint: str
    model: str
    notes: str
    tokens: list[int]
    cached: int
    frequency_key: int
    layers: int
    parts: list[str]
    rest: str
    media: NotRequired[list[list[Any]]]
    opening: NotRequired[int]


class SnapshotFolder:
    """Snapshots by name, in a folder that several processes may share.

    Parts are content-addressed, written whole or not at all, and checked against their name when they are read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """The folder is made where there is none. Raises `OSError` where it cannot be made, or is not a folder of
        snapshots."""
        self.path = Path(path)
        self._blobs = BlobFolder(self.path, "parts", (TABLE,), "index of snapshots", LOCK_SECONDS)
        with self._blobs.transaction():
            pass  # opening it makes it

    def save(self, name: str, snapshot: Snapshot) -> None:
        """Store a snapshot under a name, instead of what had it. Raises `OSError` where it cannot be written."""
        if not isinstance(name, str) or not isinstance(snapshot, Snapshot):
            raise SnapshotError(f"save was given {name!r:.80}, {snapshot!r:.80}; it takes a name and a snapshot")
        if snapshot.source is not None:
            raise UnsupportedError(
                f"{name!r:.80} is conditioned on a source, and a folder shares snapshots by their tokens alone; save "
                "it to a file: snapshot.save(path)"
            )
        spans = _per_position(snapshot)
        rest = {
            f"layers.{index}.{key}": layer[key]
            for index, layer in enumerate(snapshot.layers)
            for key in layer
            if key not in spans[index]
        }
        rest |= span_tensors(snapshot.media)
        if snapshot.logits is not None:
            rest["logits"] = snapshot.logits
        with self._blobs.transaction() as index:
            index.execute("begin immediate")  # no process removes a part that is not in the index yet
            parts = []
            for start in range(0, snapshot.cached if any(spans) else 0, PART_TOKENS):
                stop = min(start + PART_TOKENS, snapshot.cached)
                parts.append(self._write(_run(snapshot, spans, start, stop)))
            manifest = Manifest(
                version=SNAPSHOT_VERSION, fingerprint=snapshot.fingerprint, notes=snapshot.notes, model=snapshot.model,
                tokens=list(snapshot.tokens), cached=snapshot.cached, frequency_key=snapshot.frequency_key,
                layers=len(snapshot.layers), parts=parts, rest=self._write(rest), media=span_record(snapshot.media),
                opening=snapshot.opening,
            )  # fmt: skip
            index.execute(
                "insert or replace into snapshots values (?, ?, ?)", (name, json.dumps(manifest), snapshot.nbytes)
            )

    def load(self, name: str) -> Snapshot:
        """A snapshot by its name, in tensors of its own. Raises `SnapshotError` for none, or a damaged one."""
        while True:
            told = self._manifest(name)
            try:
                return self._snapshot(name, told)
            except SnapshotError:
                if self._manifest(name) == told:  # else another one was saved meanwhile, and parts of this one removed
                    raise

    def names(self) -> list[str]:
        """Those of all snapshots, in order."""
        with self._blobs.transaction() as index:
            return [str(name) for (name,) in index.execute("select name from snapshots order by name")]

    def remove(self, name: str) -> None:
        """Forget a snapshot, and the parts that no other one is made of. Raises `SnapshotError` where there is none."""
        self._manifest(name)
        with self._blobs.transaction() as index:
            index.execute("begin immediate")
            index.execute("delete from snapshots where name = ?", (name,))
            used: set[str] = set()
            for (text,) in index.execute("select manifest from snapshots"):
                used |= set(DIGEST.findall(str(text)))
            self._blobs.remove_unknown(used)

    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(found.st_size for _, found in self._blobs.files())

    # ---- the parts of it

    def _manifest(self, name: str) -> Manifest:
        with self._blobs.transaction() as index:
            query = "select manifest from snapshots where name = ? and length(manifest) <= ?"
            row = index.execute(query, (name, MOST_MANIFEST)).fetchone()
        if row is None:
            known = ", ".join(self.names()[:8]) or "none"
            raise SnapshotError(f"{self.path} has no snapshot {name!r}; there are: {known}")
        try:
            told = json.loads(row[0])
        except (ValueError, RecursionError):
            told = None
        if isinstance(told, dict) and told.get("version") not in (None, SNAPSHOT_VERSION):
            raise SnapshotError(
                f"{self.path} holds {name!r} as a snapshot of version {told['version']!r:.40}; this lmstate "
                f"reads version {SNAPSHOT_VERSION}"
            )
        try:
            kinds = {
                "fingerprint": str,
                "notes": str,
                "model": str,
                "tokens": list,
                "cached": int,
                "frequency_key": int,
                "layers": int,
            }
            told = {"model": "", **told}
            sound = all(type(told[key]) is kind for key, kind in kinds.items()) and 0 <= told["layers"] <= 100_000
            sound = sound and all(type(token) is int for token in told["tokens"])
            sound = sound and all(DIGEST.fullmatch(digest) for digest in [*told["parts"], told["rest"]])
            opening = told.get("opening", 0)
            sound = sound and type(opening) is int and 0 <= opening <= MOST_TOKENS
            sound = sound and 0 <= told["cached"] <= opening + len(told["tokens"])
            sound = sound and len(told["parts"]) in (0, -(-told["cached"] // PART_TOKENS))
        except (KeyError, TypeError):
            sound = False
        if not sound:
            raise SnapshotError(f"{self.path} is damaged: its record of {name!r} is not a snapshot")
        return cast(Manifest, told)

    def _snapshot(self, name: str, told: Manifest) -> Snapshot:
        known: dict[str, dict[str, Tensor]] = {}
        pieces = []
        for start, digest in zip(range(0, told["cached"], PART_TOKENS), told["parts"]):
            if digest not in known:
                known[digest] = self._read(digest)
            pieces.append(known[digest])
            count = min(PART_TOKENS, told["cached"] - start)
            if any(part.ndim < 2 or part.shape[-2] != count for part in pieces[-1].values()):
                raise SnapshotError(f"{self.path} is damaged: a part of {name!r} is of other positions")
        if any(set(piece) != set(pieces[0]) for piece in pieces):
            raise SnapshotError(f"{self.path} is damaged: the parts of {name!r} are of different layers")
        try:
            joined = {key: torch.cat([piece[key] for piece in pieces], dim=-2) for key in (pieces or [{}])[0]}
        except (RuntimeError, IndexError) as error:
            raise SnapshotError(f"{self.path} is damaged: the parts of {name!r} do not fit each other") from error
        rest = self._read(told["rest"])
        logits = rest.pop("logits", None)
        media = read_spans(self.path, told.get("media", []), rest)
        layers = by_layer(self.path, {**joined, **rest}, told["layers"])
        tokens, frequency_key = tuple(told["tokens"]), told["frequency_key"]
        named = told["fingerprint"], told["notes"], told["model"]
        return Snapshot(
            tokens, told["cached"], frequency_key, logits, layers, *named, media=media, opening=told.get("opening", 0)
        )

    def _write(self, tensors: Mapping[str, Tensor]) -> str:
        whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        digest = _digest(whole)
        if not self._blobs.file(digest).exists():
            with self._blobs.writing(digest) as part, part.open("wb") as file:
                dump_layers(file, {"format": FORMAT, "version": str(VERSION)}, whole)
        return digest

    def _read(self, digest: str) -> dict[str, Tensor]:
        try:
            _, tensors = read_layers(self._blobs.file(digest), FORMAT, VERSION, "part of a snapshot")
            if _digest(tensors) != digest:
                raise SnapshotError(f"{self.path} is damaged: its part {digest} holds something else")
        except FileNotFoundError:
            raise SnapshotError(f"{self.path} is damaged: its part {digest} is missing") from None
        except RuntimeError as error:  # more than there is memory for
            raise SnapshotError(f"{self.path}: its part {digest} cannot be read: {str(error)[:200]}") from error
        except VersionError:
            raise
        except SnapshotError:
            self._blobs.quarantine(digest)  # the next save writes it again
            raise
        return tensors


def _per_position(snapshot: Snapshot) -> list[frozenset[str]]:
    """Of each layer, the tensors that hold every position from 0 on."""
    return [frozenset(_whole(layer, snapshot.cached)) for layer in snapshot.layers]


def _whole(layer: Mapping[str, Tensor], length: int) -> Iterator[str]:
    if isinstance(layer, CapturedBlocks):
        if layer.start == 0 and layer.stop == length and not layer.unfinished:
            yield from layer
    elif isinstance(layer, Parts):
        for i, member in enumerate(layer.members):
            yield from (f"{i}.{name}" for name in _whole(member, length))


def _run(snapshot: Snapshot, names: list[frozenset[str]], start: int, stop: int) -> dict[str, Tensor]:
    return {
        f"layers.{index}.{name}": _slice(layer, name, start, stop)
        for index, (layer, own) in enumerate(zip(snapshot.layers, names))
        for name in sorted(own)
    }


def _slice(layer: Mapping[str, Tensor], name: str, start: int, stop: int) -> Tensor:
    if isinstance(layer, Parts):
        member, _, rest = name.partition(".")
        return _slice(layer.members[int(member)], rest, start, stop)
    assert isinstance(layer, CapturedBlocks)
    return layer.cut(start, stop)[name]


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and content."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
