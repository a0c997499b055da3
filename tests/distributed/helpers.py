"""Models over several ranks, as threads of one process or as processes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.distributed.channel import RankChannel
from lmstate.distributed.follower import Follower, loaded
from lmstate.distributed.matrices import ParallelMode
from lmstate.distributed.model import ParallelModel
from lmstate.distributed.open import open_parallel
from lmstate.distributed.ranks import Ranks
from lmstate.models.families import build
from tests.zoo import CASES, auto, pair, randomize

WAIT = 30.0


class Meeting:
    """Where threads that stand for ranks meet."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=WAIT)
        self.brought: list[Tensor] = [torch.empty(0)] * ranks
        self.gathers = self.sums = 0
        self.followers: list[Follower] = []


class ThreadGroup:
    """A group of ranks that are threads of one process."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.ranks = meeting, rank, meeting.barrier.parties

    def gather(self, own: Tensor, widths: Sequence[int], dim: int = -1) -> Tensor:
        assert own.shape[dim] == widths[self.rank]
        self.meeting.gathers += self.rank == 0
        return torch.cat(self._each(own), dim)

    def sum(self, own: Tensor) -> Tensor:
        self.meeting.sums += self.rank == 0
        return reduce(torch.add, self._each(own))

    def broadcast(self, tensor: Tensor) -> None:
        first = self._each(tensor)[0]
        if self.rank:
            tensor.copy_(first)

    def _each(self, own: Tensor) -> list[Tensor]:
        self.meeting.brought[self.rank] = own.clone()
        self.meeting.barrier.wait()
        each = list(self.meeting.brought)
        self.meeting.barrier.wait()
        return each


WIDE: dict[str, dict[str, int]] = {
    "llama": {"num_attention_heads": 4, "head_dim": 32},
    "qwen3_moe": {"num_attention_heads": 4, "head_dim": 32, "moe_intermediate_size": 64},
    "qwen3_next-dense": {"num_attention_heads": 4, "head_dim": 32, "linear_value_head_dim": 32},
    "mamba2-groups": {"head_dim": 32, "num_heads": 4, "n_groups": 2},
    "mamba": {"intermediate_size": 128},
    "rwkv": {"attention_hidden_size": 64},
}
"""Sizes of which each of two ranks has whole groups of a quantized matrix."""


def saved(case: str, folder: Path, wide: bool = False, **sizes: float) -> Path:
    """The folder with the checkpoint of a case, of other sizes; a wide one is quantized as large models are."""
    theirs, _ = pair(case)
    if wide or sizes:
        sizes = {"hidden_size": 64, "intermediate_size": 192, **WIDE[case]} if wide else sizes
        config = type(theirs.config)(**{**CASES[case]().to_dict(), **sizes})
        theirs = auto(config).from_config(config, dtype=torch.float32)
        randomize(theirs)
    theirs.save_pretrained(folder)
    return folder


def one_process(folder: Path, kind: str, heads: bool = False) -> lmstate.Model:
    return build(WeightLoader(open_source(folder), kind, heads=heads))


@contextmanager
def over_threads(
    folder: Path, kind: str, ranks: int, mode: ParallelMode = "exact", heads: bool | Path = False
) -> Iterator[tuple[ParallelModel, Meeting]]:
    """The model of a folder over ranks that are threads. heads: its own ones, or the folder of a published one."""
    meeting = Meeting(ranks)
    channels, threads = [], []
    for rank in range(1, ranks):
        ours, theirs = socket.socketpair()
        channels.append(RankChannel(ours))
        thread = threading.Thread(target=_followed, args=(RankChannel(theirs), ThreadGroup(meeting, rank)), daemon=True)
        thread.start()
        threads.append(thread)

    def close() -> None:
        for channel in channels:
            channel.close()

    held = Ranks(ThreadGroup(meeting, 0), channels, close)
    try:
        opened = WeightLoader(open_source(folder), kind, heads=heads is True)
        yield open_parallel(opened, held, mode, (heads, kind) if isinstance(heads, Path) else None), meeting
    finally:
        held.close()
        for thread in threads:
            thread.join(WAIT)
        assert not any(thread.is_alive() for thread in threads)


def _followed(channel: RankChannel, group: ThreadGroup) -> None:
    try:
        if (follower := loaded(channel, group)) is not None:
            group.meeting.followers.append(follower)
            follower.follow(channel)
    except Exception as error:
        group.meeting.barrier.abort()
        channel.send("failed", repr(error))
    finally:
        channel.close()


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all bits are the same, NaN included."""
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(found, expected, strict=True))
