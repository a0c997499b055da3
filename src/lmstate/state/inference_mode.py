"""Calls under `torch.inference_mode` that leave ordinary tensors in a state.

torch refuses writes outside of that mode into tensors made in it, and a state outlives the mode: a log, a slot or a
block that one call made is written by a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def ordinary_tensors(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """`function`, which under `torch.inference_mode` runs under `torch.no_grad` instead."""

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call
