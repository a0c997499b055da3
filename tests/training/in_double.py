"""All of lmstate's float32 as float64, so that what differs is the mathematics and not the rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lmstate.ops.weights import grouped
from lmstate.state.blocks import Buffer
from lmstate.state.layers import slots
from lmstate.training.chunked import Tape

WIDER = {torch.float32: torch.float64}


class InDouble(TorchFunctionMode):
    """Inside, what asks torch for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = [self._wider(arg) for arg in args]
        kwargs = {name: self._wider(arg) for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)

    @staticmethod
    def _wider(arg: Any) -> Any:
        return WIDER.get(arg, arg) if isinstance(arg, torch.dtype) else arg

    def __enter__(self) -> InDouble:
        torch.set_default_dtype(torch.float64)
        grouped._NAMES[torch.float64] = "float32"  # a matrix of float64 passes for one of float32
        # No mode sees tensors that are made of memory.
        slots.Buffer = lambda heads, width, dtype, device: Buffer(heads, width, self._wider(dtype), device)  # type: ignore
        # Autograd calls functions back without the mode.
        whole = self._backward = Tape.backward

        def backward(tape: Tape, models: Any, grad: torch.Tensor) -> None:
            TorchFunctionMode.__enter__(self)
            try:
                whole(tape, models, grad)
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)

        Tape.backward = backward  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Tape.backward = self._backward  # type: ignore[method-assign]
        slots.Buffer = Buffer  # type: ignore[misc]
        torch.set_default_dtype(torch.float32)
        del grouped._NAMES[torch.float64]
