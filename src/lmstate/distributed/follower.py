"""A rank behind rank 0: a process that does what it is told until its channel closes."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lmstate.distributed.block_numbers import HeldBlocks
from lmstate.distributed.calls import CALLS, Arguments
from lmstate.distributed.carries import round_apart
from lmstate.distributed.channel import RankChannel
from lmstate.distributed.cuts import LayerCuts
from lmstate.distributed.group import SocketGroup
from lmstate.distributed.identity import identity
from lmstate.distributed.open import open_part
from lmstate.distributed.ranks import Collectives
from lmstate.distributed.snapshots import gathered, heard_source, received, slot_states
from lmstate.models.heads.ahead import planned_draft
from lmstate.models.model import Model
from lmstate.state import Layout, Snapshot, State
from lmstate.state.blocks import BlockPool, pieces_of
from lmstate.state.inference_mode import ordinary_tensors
from lmstate.state.kv.policies.storage import Quantized
from lmstate.state.sources import SourceFeatures
from lmstate.state.step import integers
from lmstate.state.tree import PendingTree, TreePath

COMMANDS: dict[str, Callable[..., None]] = {}
"""The methods of `Follower` that rank 0 tells it to run, by their names."""


def command(method: Callable[..., None]) -> Callable[..., None]:
    COMMANDS[method.__name__] = method
    return method


class Follower:
    """The model of one rank and its states, by the numbers that rank 0 gave them."""

    def __init__(self, group: Collectives, model: Model, cuts: LayerCuts) -> None:
        self.group, self.model, self.cuts = group, model, cuts
        self.states: dict[int, State] = {}
        self.blocks = HeldBlocks()

    def follow(self, channel: RankChannel) -> None:
        """Do what is told until the channel closes."""
        with torch.no_grad():
            while (message := _heard(channel)) is not None:
                verb, *arguments = message
                COMMANDS[verb](self, *arguments)

    @command
    def new(
        self, number: int, rows: int, dtype: str, bits: int | None, capacity: int | None, rewind: int, chunk: int,
        carries: int, heads: bool,
    ) -> None:  # fmt: skip
        layout = Layout(
            rows, self.model.device, getattr(torch, dtype), capacity, rewind, chunk,
            max_positions=self.model.max_positions, pool=BlockPool(), carries=carries,
        )  # fmt: skip
        state = self.states[number] = self.model._new_state(layout, None if bits is None else Quantized(bits), heads)
        round_apart(state, self._cuts_of(state), self.group.rank)

    @command
    def free(self, number: int) -> None:
        del self.states[number]

    @command
    def copy(self, number: int, twin: int) -> None:
        self.states[twin] = copy.deepcopy(self.states[number])

    @command
    def call(self, number: int, method: str, arguments: Arguments) -> None:
        call, state = CALLS[method], self.states[number]
        call.method(state, **call.heard(state, arguments))

    @command
    def tree(
        self, number: int, grown: int, counts: list[int], parents: list[list[int]], branches: list[list[Any]]
    ) -> None:
        paths = tuple(TreePath(row, tuple(nodes)) for row, nodes in branches)
        tree = PendingTree(tuple(counts), tuple(map(tuple, parents)), paths, self.states[grown])
        self.states[number].record_tree(tree)

    @command
    @ordinary_tensors
    def run(self, number: int, offset: int, keep: list[int] | None) -> None:
        """Run the part of the planned step that begins at an offset."""
        state = self.states[number]
        part = next(part for at, part in state.planned.step.chunks() if at == offset)
        rows = [row[offset : offset + part.width] for row in state.planned.ids]
        tokens = integers([row + [0] * (part.width - len(row)) for row in rows])
        self.model._run(tokens, part, state, keep)

    @command
    @ordinary_tensors
    def head(self, shape: list[int]) -> None:
        hidden = torch.empty(shape)
        self.group.broadcast(hidden)
        self.model._head(hidden)

    @command
    @ordinary_tensors
    def draft(self, number: int, last: list[tuple[int, int]], depth: int) -> None:
        state = self.states[number]
        drafted = planned_draft(self.model.heads, state, dict(last), depth, self.model.output_device)
        drafted.decide = self.group.broadcast
        self.model._draft(state, drafted)

    @command
    def snapshot(self, number: int, row: int, numbers: list[int]) -> None:
        layers = self.states[number].snapshot(row).layers
        self.blocks.hold(numbers, [piece for layer in layers for piece in pieces_of(layer)])
        for layer, cut in zip(layers, self._cuts_of(self.states[number]), strict=True):
            gathered(self.group, layer, cut, lambda blocks, _: blocks)

    @command
    def condition(self, number: int, row: int, told: list[Any]) -> None:
        source = heard_source(told)
        if isinstance(source, SourceFeatures):
            values = torch.empty(source.shape)
            self.group.broadcast(values)
            source = replace(source, values=values)
        self.states[number].condition(row, source)

    @command
    def restore(self, number: int, row: int, header: list[Any]) -> None:
        self.states[number].restore(row, self._received(header))

    @command
    def add(self, number: int, row: int, header: list[Any] | None) -> None:
        found = self.states[number].add(None if header is None else self._received(header))
        assert found == row, f"row {found} was added where rank 0 added {row}"

    @command
    def in_blocks(self, number: int, place: int, start: int, told: dict[str, Any], numbers: list[int]) -> None:
        cut, slots = list(slot_states(self.states[number], self._cuts_of(self.states[number])))[place]
        read = received(self.group, told, cut, self.blocks)
        self.blocks.hold(numbers, list(pieces_of(slots.in_blocks(start, read))))

    @command
    def read(self, told: list[Any], name: str, widths: list[int]) -> None:
        self.group.gather(self.blocks.piece(told)[name], widths, dim=0)

    @command
    def follow_piece(self, told: list[Any], before: list[Any]) -> None:
        self.blocks.piece(told).follow(self.blocks.piece(before))

    @command
    def let_go(self, numbers: list[int]) -> None:
        self.blocks.let_go(numbers)

    def _cuts_of(self, state: State) -> LayerCuts:
        return self.cuts[: len(state.layers)]

    def _received(self, header: list[Any]) -> Snapshot:
        """The part of this rank of a snapshot that rank 0 sends. Its logits are zeros: rank 0 alone has those."""
        tokens, cached, frequency_key, known, told, source = header
        layers = [received(self.group, of, cut, self.blocks) for of, cut in zip(told, self.cuts)]
        logits = torch.zeros(self.model.config.vocab_size) if known else None
        return Snapshot(
            tuple(tokens), cached, frequency_key, logits, tuple(layers), self.model.fingerprint,
            source=None if source is None else heard_source(source),
        )  # fmt: skip


def _heard(channel: RankChannel) -> list[Any] | None:
    """The next command; None at the end. Raises `SystemExit` where rank 0 sends the others away."""
    message = channel.receive()
    if message is not None and message[0] == "leave":
        raise SystemExit(f"lmstate: {message[1]}")
    return message


def loaded(channel: RankChannel, group: Collectives) -> Follower | None:
    """The follower with the part of the model that rank 0 names; None where it goes away instead."""
    if (message := _heard(channel)) is None:
        return None
    model, cuts = open_part(group, *message[1:])
    channel.send("ready", model.fingerprint)
    return Follower(group, model, cuts)


def followed(channel: RankChannel, data: socket.socket) -> int:
    """Load and follow, with sockets for commands and for tensors, until the first is closed. Returns the exit code.

    An error is told to rank 0 on the way out. Signals that end a program wait for rank 0, which decides.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        channel.send("here", identity())
        if (message := _heard(channel)) is not None:
            _, rank, ranks, timeout, threads = message
            torch.set_num_threads(threads)
            follower = loaded(channel, SocketGroup(rank, ranks, [data], timeout))
            if follower is not None:
                follower.follow(channel)
    except Exception as error:
        with contextlib.suppress(OSError):
            channel.send("failed", f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    commands, tensors = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    try:
        code = followed(RankChannel(commands), tensors)
    except SystemExit:  # rank 0, which started this process, says why
        code = 1
    os._exit(code)  # nothing here is to be put away
