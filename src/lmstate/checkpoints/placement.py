"""Devices of one process over which the blocks of a model are spread, in contiguous runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch

from lmstate.errors import ModelError

Devices: TypeAlias = str | int | torch.device | Sequence[str | torch.device] | Mapping[str | torch.device, int]
"""One device, several, several with their numbers of blocks, or "auto"; a string may hold each of these: "cuda:0",
"cuda:0,cuda:1", "cuda:0=20,cpu=12", "auto". With numbers of blocks, "offload" after a GPU names blocks of that GPU
whose weights are in host memory."""

OFFLOAD = "offload"

RESERVED = 0.1  # of the free memory of a GPU: activations and workspaces of its libraries


@dataclass(frozen=True)
class Sizes:
    """Bytes of the parts of a model: those before its blocks, of each block with its state, and those after."""

    before: int
    blocks: Sequence[int]
    behind: int


@dataclass(frozen=True)
class DevicePlacement:
    """The devices that a model was asked to be on, in the order of its blocks.

    counts: the blocks of each. room: the free bytes of each, None for one that takes the rest; the first devices are
    then filled, and the others are left out. Neither: every device gets blocks, so that the largest share is smallest.
    offloaded: the blocks whose weights are in host memory, and come to their device for each step.
    """

    devices: tuple[torch.device, ...]
    counts: tuple[int, ...] | None = None
    room: tuple[int | None, ...] | None = None
    offloaded: range = range(0)

    @staticmethod
    def of(asked: Devices | DevicePlacement | None) -> DevicePlacement:
        """The devices that `load(device=...)` names. Raises `ValueError` for one that torch cannot use here."""
        if isinstance(asked, DevicePlacement):
            return asked
        counts: list[int] | None = None
        names: list[str | torch.device]
        if asked is None:
            names = ["cpu"]
        elif isinstance(asked, torch.device | int):
            names = [torch.device(asked)]
        elif isinstance(asked, str):
            if asked == "auto":
                return _automatic()
            names, counts = _parsed(asked)
        elif isinstance(asked, Mapping):
            names, counts = list(asked), list(asked.values())
        else:
            names = list(asked) if isinstance(asked, list | tuple) else []
        if not names:
            raise ValueError(f"load(device={asked!r}) was asked for; name at least one device, or leave device out")
        for count in counts or ():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(
                    f"load(device={asked!r}) was asked for; give each device 1 block or more, a whole number"
                )
        offloaded = range(0)
        if OFFLOAD in names:
            at = names.index(OFFLOAD)
            if counts is None or not at or names.count(OFFLOAD) > 1 or torch.device(names[at - 1]).type == "cpu":
                raise ValueError(
                    f"load(device={asked!r}) was asked for; offload stands once, behind a GPU that computes its "
                    'blocks, with numbers of blocks for both: {"cuda:0": 20, "offload": 12}'
                )
            offloaded = range(sum(counts[:at]), sum(counts[: at + 1]))
            counts[at - 1] += counts.pop(at)
            names.pop(at)
        devices = tuple(map(checked_device, names))
        for device in devices:
            if devices.count(device) > 1:
                raise ValueError(f"load(device={asked!r}) was asked for; it names {device} twice, name it once")
        return DevicePlacement(devices, None if counts is None else tuple(counts), offloaded=offloaded)

    @property
    def spreads(self) -> bool:
        """Whether blocks may come to be on several devices."""
        return len(self.devices) > 1

    def of_blocks(self, sizes: Sizes, reads: Sequence[int | None] = ()) -> tuple[torch.device, ...]:
        """The device of each block.

        reads: for each block the earlier one without whose step it cannot run; they get one device. Raises `ModelError`
        where the model cannot be spread as it was asked for.
        """
        cuts = _cuts(len(sizes.blocks), reads)
        if self.room is not None:
            counts: Sequence[int] = _filled(sizes, self.room, cuts)
        elif self.counts is not None:
            counts = self._as_asked(len(sizes.blocks), cuts, reads)
        else:
            counts = _balanced(sizes, len(self.devices), cuts)
        return tuple(device for device, count in zip(self.devices, counts) for _ in range(count))

    def _as_asked(self, blocks: int, cuts: Sequence[int], reads: Sequence[int | None]) -> Sequence[int]:
        assert self.counts is not None
        told = ", ".join(f"{device}: {count}" for device, count in zip(self.devices, self.counts))
        if sum(self.counts) != blocks:
            raise ModelError(
                f"device={{{told}}} was asked for, which places {sum(self.counts)} blocks; the model has {blocks}"
            )
        for cut in list(accumulate(self.counts))[:-1]:
            if cut not in cuts:
                reader = next(at for at, read in enumerate(reads) if at >= cut and read is not None and read < cut)
                raise ModelError(
                    f"device={{{told}}} was asked for, which parts block {reader} from block {reads[reader]}, whose "
                    f"keys or choices it reads; a device may begin with blocks {ranges([0, *cuts])}"
                )
        return self.counts


def checked_device(name: str | torch.device) -> torch.device:
    """The device of a name, with its number. Raises `ValueError` for one that torch does not know or cannot use."""
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(
            f"load(device={str(name)!r}) was asked for, but torch cannot use it here ({str(error).splitlines()[0]}); "
            "leave device out for the CPU"
        ) from error
    return torch.device("cpu") if device.type == "cpu" else device


def _parsed(text: str) -> tuple[list[str | torch.device], list[int] | None]:
    """Names, and numbers of blocks where they are given, of "cuda:0=20,cpu=12"."""
    parts = [part.strip() for part in text.split(",")]
    if not any("=" in part for part in parts):
        return list(parts), None
    names: list[str | torch.device] = []
    counts: list[int] = []
    for part in parts:
        name, _, count = (each.strip() for each in part.partition("="))
        if not count.isdecimal():
            raise ValueError(
                f"load(device={text!r}) was asked for; give each device a number of blocks (cuda:0=20,cpu=12) or none"
            )
        names.append(name)
        counts.append(int(count))
    return names, counts


def _automatic() -> DevicePlacement:
    """All GPUs in their order, filled as far as they have room, then the processor."""
    gpus = [
        torch.device("cuda", index) for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    room = [int(torch.cuda.mem_get_info(gpu)[0] * (1 - RESERVED)) for gpu in gpus]
    return DevicePlacement((*gpus, torch.device("cpu")), room=(*room, None))


def _cuts(blocks: int, reads: Sequence[int | None]) -> list[int]:
    """The blocks with which a device may begin, but for the first: none after them reads one in front of them."""
    spans = [(read, at) for at, read in enumerate(reads) if read is not None]
    return [cut for cut in range(1, blocks) if not any(read < cut <= at for read, at in spans)]


def _balanced(sizes: Sizes, devices: int, cuts: Sequence[int]) -> list[int]:
    """Numbers of blocks per device, each at least 1, with the smallest possible largest share in bytes."""
    blocks = len(sizes.blocks)
    if len(cuts) < devices - 1:
        raise ModelError(
            f"{devices} devices were asked for; the model has {blocks} blocks, and a device may begin with block "
            f"{ranges([0, *cuts])}: name {len(cuts) + 1} devices at most"
        )
    ends = [0, *cuts, blocks]
    before = [0, *accumulate(sizes.blocks)]
    # For each number of devices and each end: the smallest largest share, and where the last device begins.
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for device in range(devices):
        row: dict[int, tuple[int, int]] = {}
        beside = (sizes.before if device == 0 else 0) + (sizes.behind if device == devices - 1 else 0)
        for end in ends[1:]:
            choices = [
                (max(share, before[end] - before[begin] + beside), begin)
                for begin, (share, _) in best[-1].items()
                if begin < end
            ]
            if choices:
                row[end] = min(choices)
        best.append(row)
    found, end = [], blocks
    for row in reversed(best[1:]):
        begin = row[end][1]
        found.append(end - begin)
        end = begin
    return found[::-1]


def _filled(sizes: Sizes, room: Sequence[int | None], cuts: Sequence[int]) -> list[int]:
    """Numbers of blocks per device when devices are filled in order; `room`: their free bytes, None takes the rest."""
    blocks, first, counts = len(sizes.blocks), 0, []
    for free in room:
        stops = [end for end in (*cuts, blocks) if end > first]
        fitting = [first]
        for stop in stops:
            needed = sum(sizes.blocks[first:stop]) + (0 if first else sizes.before)
            needed += sizes.behind if stop == blocks else 0
            if free is None or needed <= free:
                fitting.append(stop)
        counts.append(max(fitting) - first)
        first = max(fitting)
    return counts


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: "0-3, 7"."""
    told: list[list[int]] = []
    for number in numbers:
        if told and number == told[-1][-1] + 1:
            told[-1][1:] = [number]
        else:
            told.append([number])
    return ", ".join("-".join(map(str, each)) for each in told)


def runs_of(devices: Sequence[torch.device]) -> list[tuple[torch.device, int, int]]:
    """Runs of blocks on one device: device, first block, and the one after the last."""
    bounds = [0, *(at for at in range(1, len(devices)) if devices[at] != devices[at - 1]), len(devices)]
    return [(devices[first], first, stop) for first, stop in pairwise(bounds) if first < stop]
