"""Other devices: the GPU where there is one, else pretended ones.

On pretended ones tensors keep their numbers in ordinary memory and are only marked as lying elsewhere. Inside
`OtherDevice`, whatever is made on or sent to a CUDA device is marked with it, and so is what is computed from it. A
function that is given tensors of several devices together fails as on a real machine, and so does a body for the
processor that asks for the address of a marked one.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
PRETENDED = tuple(torch.device("cuda", index) for index in range(4))
DEVICE, *MORE = PRETENDED
"""The first of the devices, and others that are there where they are pretended."""
REAL = torch.cuda.is_available()
MARK = "lies_on"
# May take tensors of both: copies between devices, an index of integers on the host.
BOTH = {Tensor.copy_, Tensor.__getitem__}
ADDRESSES = {Tensor.data_ptr, Tensor.numpy, Tensor.__array__}
DEVICE_OF, IS_CPU, IS_CUDA = (getattr(Tensor, name).__get__ for name in ("device", "is_cpu", "is_cuda"))
ASKED = {DEVICE_OF, IS_CPU, IS_CUDA, *ADDRESSES}


def place_of(x: Tensor) -> torch.device:
    """The device of a tensor, pretended ones included. Pretended ones are always the same objects."""
    if not REAL:
        return x.__dict__.get(MARK, CPU)  # type: ignore[no-any-return]
    with torch._C.DisableTorchFunction():
        place: torch.device = x.device
    return place


def elsewhere(x: Tensor) -> bool:
    return place_of(x) != CPU


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if not isinstance(value, CausalBias) else []  # which is of no device
    found: list[Tensor] = []
    if isinstance(value, (list, tuple)):
        for item in value:
            if type(item) is Tensor:  # most are
                found.append(item)
            elif isinstance(item, (Tensor, list, tuple)):
                found += tensors_in(item)
    return found


def _mark(value: Any, place: torch.device) -> Any:
    for x in (value,) if type(value) is Tensor else tensors_in(value):
        x.__dict__[MARK] = place
    return value


def _pretended(device: Any) -> torch.device:
    """The place that a device names; the current GPU is the first."""
    named = torch.device(device)
    return PRETENDED[named.index or 0] if named.type == DEVICE.type else CPU


class PretendedDevice(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.moves: list[tuple[torch.device, torch.device, torch.Size]] = []
        """Of every copy of floats `[R, T, E]` between devices: from, to, shape."""
        self.sent: Counter[tuple[torch.device, torch.device]] = Counter()
        """Bytes that were copied from a device to another one, however they are shaped."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tensors_in((*args, *kwargs.values()) if kwargs else args)
        places = [x.__dict__.get(MARK, CPU) for x in given]
        elsewheres = {place for place in places if place is not CPU}
        if elsewheres and func in ASKED:
            if func == DEVICE_OF:
                return places[0]
            if func not in ADDRESSES:
                return func == IS_CUDA
            if str(sys._getframe(1).f_globals.get("__name__")).startswith("lmstate.ops.cpu"):
                raise RuntimeError(f"{func.__name__} of a tensor on {places[0]}")
        kwargs = dict(kwargs or {})
        if func is Tensor.cpu:
            return _mark(args[0].clone() if elsewheres else args[0], CPU)
        if func is Tensor.to:
            return self._to(args, kwargs, places)
        if (device := kwargs.get("device")) is not None:
            kwargs["device"] = "cpu"
            return _mark(func(*args, **kwargs), _pretended(device))
        if elsewheres and func not in BOTH:
            others = [(x.shape, place) for x, place in zip(given, places) if place is CPU and x.ndim]
            if others or len(elsewheres) > 1:
                raise RuntimeError(f"{getattr(func, '__name__', func)}: tensors {others} beside some on {elsewheres}")
        if func is torch.mm and "out_dtype" in kwargs:  # which torch has on GPUs alone
            return _mark(torch.mm(*(x.to(kwargs["out_dtype"]) for x in args)), places[0])
        if func in BOTH:
            return self._after(func(*args, **kwargs), places[0])
        return self._after(func(*args, **kwargs), *elsewheres)

    def _after(self, out: Any, *places: torch.device) -> Any:
        """The output of a function whose tensors lie on one device, or on no other."""
        return _mark(out, places[0]) if places and places[0] is not CPU else out

    def _to(self, args: tuple[Any, ...], kwargs: dict[str, Any], places: list[torch.device]) -> Any:
        x, *rest = args
        place = places[0]
        if len(places) == 2:  # the dtype and device of another tensor
            place, rest = places[1], [rest[0].dtype]
        wanted = kwargs.pop("device", None)
        for value in list(rest):
            if isinstance(value, (str, torch.device)):
                wanted = value
                rest.remove(value)
        if wanted is not None:
            place = _pretended(wanted)
        out = Tensor.to(x, *rest, **kwargs) if rest or kwargs else x
        if place != places[0] and x.ndim == 3 and x.is_floating_point():
            self.moves.append((places[0], place, x.shape))
        if place != places[0]:
            self.sent[places[0], place] += x.nbytes
        return _mark(out.clone() if place != places[0] and out is x else out, place)


OtherDevice = nullcontext if REAL else PretendedDevice
