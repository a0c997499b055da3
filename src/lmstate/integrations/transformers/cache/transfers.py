"""Layers of an offloading cache on their way between the host and their device."""

from __future__ import annotations

from typing import Any

import torch


class Transfers:
    """The layers of a cache, and the stream on which transformers fetches those that it sent away.

    Both directions are asynchronous. transformers asks for the next layer ahead, and waits for it where the next
    layer's keys are stored. That is too late for a recurrence in front of a layer's attention, and for a model in which
    one layer alone is sent away. transformers also never waits for copies that the host reads.
    """

    def __init__(self, layers: list[Any], stream: Any) -> None:
        self._layers, self._stream = layers, stream  # None: nothing is ever sent away

    def fetch(self, index: int) -> None:
        """Have a layer on its device, in the order of the device's work, before that reads it."""
        if self._stream is None or index >= len(self._layers):
            return
        layer = self._layers[index]
        if (device := _device(layer)) is not None:
            torch.cuda.default_stream(device).wait_stream(self._stream)
            layer.prefetch()

    def settle(self) -> None:
        """Wait for all that is on its way: the host is about to read it."""
        if self._stream is not None:
            for device in {_device(layer) for layer in self._layers} - {None}:
                torch.cuda.default_stream(device).synchronize()
            self._stream.synchronize()


def _device(layer: Any) -> Any:
    """The device that a layer computes on, also while it is elsewhere; None before its first token."""
    return getattr(layer, "device", None)
