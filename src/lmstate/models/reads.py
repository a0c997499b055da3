"""Bytes that a decode step reads at least: weights, and of each layer's state what its token attends to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import add
from typing import NamedTuple

from lmstate.models.describe import stored_weights
from lmstate.models.fingerprint import instances
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.block_index import BlockAttention
from lmstate.models.layers.compressed_attention import CompressedAttention
from lmstate.models.layers.mla import MultiHeadLatentAttention
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.layers.ngrams import NgramTable
from lmstate.models.layers.pooled_index import PooledIndexAttention, PooledPositionIndex
from lmstate.models.network import Network
from lmstate.state import CompositeState, CrossState, LayerState, RecurrentState, SharedState
from lmstate.state.layers.compressed import Entries
from lmstate.state.layers.slots import SlotState


@dataclass(frozen=True)
class StateReads:
    """Bytes of a state that a step reads. whole: what `attended` would be if a token attended to all that is stored."""

    attended: int = 0  # keys, values, latents and entries
    index: int = 0  # keys by which positions are chosen
    fixed: int = 0  # whatever the length: carries, inputs of compressors, encoded sources, slots of policies that evict
    whole: int = 0

    def __add__(self, other: StateReads) -> StateReads:
        return StateReads(
            self.attended + other.attended, self.index + other.index, self.fixed + other.fixed,
            self.whole + other.whole,
        )  # fmt: skip

    @property
    def total(self) -> int:
        return self.attended + self.index + self.fixed

    @property
    def total_of_all(self) -> int:
        """Bytes that layers without an index would read."""
        return self.whole + self.fixed


class Chosen(NamedTuple):
    """The most positions, and the most entries, that a token attends to; None: all that it sees."""

    positions: int | None = None
    entries: int | None = None


def weight_reads(network: Network, rows: int) -> int:
    """Bytes of weights that a step of one token in each of `rows` rows reads.

    Of experts as many as the tokens can choose, each of the mean size; of the embedding and of tables of n-grams
    nothing, as a step reads a few of their rows.
    """
    read = [network.blocks, network.norm, network.head, network.exit]
    total = _nbytes(read) - sum(_nbytes(table.parts) for _, table in instances(read, NgramTable))
    for _, mixture in instances(network.blocks, MixtureOfExperts):
        left = max(0, mixture.count - rows * mixture.router.per_token)
        total -= _nbytes(mixture.experts) * left // mixture.count
    return total


def _nbytes(parts: object) -> int:
    return sum(weight.nbytes for weight in stored_weights(parts))


def state_reads(network: Network, layers: Sequence[LayerState], lengths: Sequence[int]) -> StateReads:
    """Bytes of a state's layers that the next token of each row reads, where rows have these lengths with it.

    The rows need not be so long yet: what grows is counted by the position.
    """
    found = [
        read
        for block, cache in zip(network.blocks, layers)
        for length in lengths
        for read in _read(cache, length, chosen_by(block.mixer), len(lengths))
    ]
    return reduce(add, found, StateReads())


def chosen_by(mixer: Mixer) -> Chosen:
    """Most positions and entries that the index of a layer chooses."""
    match mixer:
        case MultiHeadLatentAttention(index=PooledPositionIndex() as index):
            return Chosen(index.budget, index.blocks)
        case MultiHeadLatentAttention(index=index) if index is not None:
            return Chosen(positions=index.budget)
        case BlockAttention(index=index):
            return Chosen(positions=index.choice.budget * index.choice.size)
        case PooledIndexAttention(index=index):
            return Chosen(positions=(index.budget + 1) * index.rate - 1, entries=index.budget)
        case CompressedAttention(index=index) if index is not None:
            return Chosen(entries=index.budget)
        case _:
            return Chosen()


def bytes_per_position(cache: SlotState) -> dict[str, int]:
    """Of each buffer."""
    return {name: prod(each.heads) * each.width * each.dtype.itemsize for name, each in cache.buffers.items()}


def _read(cache: LayerState, length: int, most: Chosen, rows: int) -> Iterator[StateReads]:
    """Reads of one token in a row of `length` positions, from the state of a layer with `rows` rows."""
    match cache:
        case CompositeState():
            for member in cache.members:
                yield from _read(member, length, most, rows)
        case SharedState():
            yield from _read(cache.source, length, most, rows)
        case SlotState(kind="compressor"):  # an input is read once, for its entry
            yield StateReads(fixed=sum(bytes_per_position(cache).values()))
        case SlotState() if not isinstance(cache, CrossState):
            seen, limit = length, most.positions
            if isinstance(cache, Entries):
                seen, limit = length // cache.rate, most.entries
            elif cache.window_span is not None:
                seen = min(length, cache.window_span - cache.layout.rewind + 1)
            attended = seen if limit is None else min(seen, limit)
            sizes = bytes_per_position(cache)
            index = sizes.pop("index", 0) * (seen if attended < seen else 0)
            yield StateReads(sum(sizes.values()) * attended, index, whole=sum(sizes.values()) * seen)
        case RecurrentState():
            yield StateReads(fixed=sum(part[0].nbytes for part in cache.carry))
        case _:
            yield StateReads(fixed=cache.nbytes() // rows)
