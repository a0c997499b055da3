"""A model over several devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lmstate.models.mapped import moved
from lmstate.models.network import Network


def spread(network: Network, devices: Sequence[torch.device]) -> Network:
    """The network with each block on its device, all before them with the first, and all after them with the last.

    A weight that parts on several devices share (a tied embedding, a block that several layers use) is copied to each.
    """
    done: dict[torch.device, dict[int, Any]] = {device: {} for device in devices}
    first, last = devices[0], devices[-1]
    blocks = [
        block if block.offload is not None else replace(moved(block, on, done[on]), device=on)
        for block, on in zip(network.blocks, devices, strict=True)
    ]
    return replace(
        network,
        embed=moved(network.embed, first, done[first]),
        entry=moved(network.entry, first, done[first]),
        encoder=moved(network.encoder, first, done[first]),
        blocks=tuple(blocks),
        norm=moved(network.norm, last, done[last]),
        head=moved(network.head, last, done[last]),
        head_bias=moved(network.head_bias, last, done[last]),
        exit=moved(network.exit, last, done[last]),
        heads=moved(network.heads, last, done[last]),
    )
