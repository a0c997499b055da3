"""A pretended GPU whose kernels are interpreted, and a stand-in for its CUDA graphs.

A recording keeps operations and launches with their very tensors, and a replay runs them again into the tensors that
they gave: no line of the recorded function runs a second time. What a CUDA graph cannot hold fails here too: numbers
read on the host, and tensors sent from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lmstate.ops.cuda.graphs import GraphPool
from tests.other_device import PretendedDevice, elsewhere, tensors_in

READS = {
    Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    Tensor.__index__, Tensor.nonzero, torch.nonzero, Tensor.bincount, torch.bincount,
}  # fmt: skip
"""Functions that wait for the device of their tensor."""
SENDS = {torch.tensor, torch.from_numpy, torch.as_tensor}


class Tape(TorchDispatchMode):
    """The operations and launches of a recorded function."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not func.is_view and "empty" not in func.__name__:
            self.steps.append(lambda: _again(func, args, kwargs, out))
        return out

    def replay(self) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for step in self.steps:
                step()


def _again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    new = func(*args, **kwargs)
    for own, other in zip(tensors_in(out), tensors_in(new), strict=True):
        if own is not other:
            own.copy_(other)


class GraphDevice(PretendedDevice):
    """A pretended GPU. `recorded`: tapes so far; `launches`: names of the kernels that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: Tape | None = None
        self.recorded: list[Tape] = []
        self.launches: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.tape is not None:
            if func in READS and elsewhere(args[0]):
                raise RuntimeError(f"{func.__name__} waits for the device while a graph is recorded")
            if func in SENDS and (kwargs or {}).get("device") is not None and not isinstance(args[0], Tensor):
                raise RuntimeError(f"{func.__name__} sends numbers of the host while a graph is recorded")
        return super().__torch_function__(func, types, args, kwargs)

    def _to(self, args: tuple[Any, ...], kwargs: dict[str, Any], places: list[torch.device]) -> Any:
        out = super()._to(args, kwargs, places)
        if self.tape is not None and out is not args[0] and out.device != args[0].device:
            raise RuntimeError("a tensor of the host is sent while a graph is recorded")
        return out

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """As `GraphPool.record`."""
        tape = self.tape = Tape()
        try:
            with tape:
                result = run()
        finally:
            self.tape = None
        self.recorded.append(tape)
        return tape.replay, result

    def launch(self, run: Callable[..., None], kernel: Any, *args: Any, **constants: Any) -> None:
        """As `lmstate.ops.cuda.device.launch`, which `run` is."""

        def launched() -> None:
            self.launches.append(kernel.fn.__name__)
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                run(kernel, *args, **constants)

        launched()
        if self.tape is not None:
            self.tape.steps.append(launched)


@contextmanager
def interpreted_gpu(monkeypatch: Any) -> Iterator[GraphDevice]:
    """A pretended GPU that launches the Triton kernels, interpreted, and whose steps are recorded and replayed."""
    from lmstate.ops.cuda import device

    pretended, run = GraphDevice(), device.launch
    for module in ("attention", "chosen", "dense", "experts", "recurrent", "sampling"):
        monkeypatch.setattr(
            f"lmstate.ops.cuda.{module}.launch",
            lambda kernel, *args, **constants: pretended.launch(run, kernel, *args, **constants),
        )
    monkeypatch.setattr(device, "usable", lambda index: True)
    monkeypatch.setattr(device, "is_recording", lambda: pretended.tape is not None)
    monkeypatch.setattr(GraphPool, "record", lambda pool, run, device: pretended.record(run))
    with pretended:
        yield pretended
