"""A second device: the GPU where there is one, else a pretended one.

On the pretended one tensors keep their numbers in ordinary memory and are only marked as lying elsewhere. Inside it,
whatever is made on or sent to `DEVICE` is marked, and so is what is computed from it. A function that is given marked
and unmarked tensors together fails as on a real machine, and so does a body for the processor that asks for the address
of a marked one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
REAL = torch.cuda.is_available()
MARK = "lies_elsewhere"
# May take tensors of both: copies between devices, an index of integers on the host.
BOTH = {Tensor.copy_, Tensor.__getitem__}
ADDRESSES = {Tensor.data_ptr, Tensor.numpy, Tensor.__array__}
PROPERTIES: dict[Any, Callable[[], Any]] = {
    Tensor.device.__get__: lambda: DEVICE,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda: False,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda: True,  # type: ignore[attr-defined]
}


def elsewhere(x: Tensor) -> bool:
    if REAL:
        return x.is_cuda
    with torch._C.DisableTorchFunction():
        return getattr(x, MARK, False)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, CausalBias):  # of no device
        return
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _mark(value: Any, there: bool) -> Any:
    for x in tensors_in(value):
        with torch._C.DisableTorchFunction():
            setattr(x, MARK, there)
    return value


class PretendedDevice(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = list(tensors_in((*args, *kwargs.values())))
        marked = [elsewhere(x) for x in given]
        if func in PROPERTIES and marked[0]:
            return PROPERTIES[func]()
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if func in ADDRESSES and marked[0] and caller.startswith("lmstate.ops.cpu"):
            raise RuntimeError(f"{func.__name__} of a tensor on {DEVICE}")
        if func is Tensor.cpu:
            return _mark(args[0].clone() if marked[0] else args[0], False)
        if func is Tensor.to:
            return self._to(args, kwargs, marked)
        if (device := kwargs.get("device")) is not None:
            there = torch.device(device).type == DEVICE.type
            kwargs["device"] = "cpu"
            return _mark(func(*args, **kwargs), there)
        if any(marked) and func not in BOTH:
            here = [x.shape for x, there in zip(given, marked) if not there and x.ndim]
            if here:
                raise RuntimeError(f"{getattr(func, '__name__', func)}: tensors {here} on cpu beside some on {DEVICE}")
        if func is torch.mm and "out_dtype" in kwargs:  # which torch has on GPUs alone
            return _mark(torch.mm(*(x.to(kwargs["out_dtype"]) for x in args)), True)
        inplace = func is Tensor.copy_ or func is Tensor.__getitem__
        return self._after(func(*args, **kwargs), marked[0] if inplace else any(marked))

    def _after(self, out: Any, there: bool) -> Any:
        return _mark(out, True) if there else out

    def _to(self, args: tuple[Any, ...], kwargs: dict[str, Any], marked: list[bool]) -> Any:
        x, *rest = args
        there = marked[0]
        if len(marked) == 2:  # the dtype and device of another tensor
            there, rest = marked[1], [rest[0].dtype]
        wanted = kwargs.pop("device", None)
        for value in list(rest):
            if isinstance(value, (str, torch.device)):
                wanted = value
                rest.remove(value)
        if wanted is not None:
            there = torch.device(wanted).type == DEVICE.type
        out = Tensor.to(x, *rest, **kwargs) if rest or kwargs else x
        return _mark(out.clone() if there != marked[0] and out is x else out, there)


OtherDevice = nullcontext if REAL else PretendedDevice
