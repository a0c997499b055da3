"""Blocks that report each sublayer's input and output, run one by one: to find where a number comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from lmstate.models.block import Block

OnSublayer = Callable[[str, Tensor, Tensor], object]
"""Called with a sublayer's name, its input and its output. The tensors are the model's own: copy what you keep and
change, and write into none of them."""


class Traced:
    """A part of a model that reports its calls under a name; in all else it is that part."""

    def __init__(self, part: Any, name: str, on: OnSublayer):
        self._part, self._name, self._on = part, name, on

    def __call__(self, x: Tensor, *given: Any) -> Any:
        result = self._part(x, *given)
        self._on(self._name, x, result[0] if isinstance(result, tuple) else result)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def traced_blocks(blocks: Sequence[Block], on: OnSublayer) -> list[Any]:
    """The blocks, each of which reports itself as `blocks.3`, and its parts as `blocks.3.mixer`, `blocks.3.mlp`."""
    names = [f"blocks.{index}" for index in range(len(blocks))]
    return [Traced(_traced_parts(block, name, on), name, on) for block, name in zip(blocks, names)]


def _traced_parts(block: Block, name: str, on: OnSublayer) -> Block:
    parts = {each.name: getattr(block, each.name) for each in fields(block) if each.init}
    traced: dict[str, Any] = {at: Traced(part, f"{name}.{at}", on) for at, part in parts.items() if callable(part)}
    return replace(block, **traced)
