"""The arrays of an evicting state: everything that a slot has, under names, with the slots along the third axis."""

from __future__ import annotations

from torch import Tensor

from lmstate.errors import SnapshotError

Arrays = dict[str, Tensor]
"""`position` and `died` int32 `[R, K, S]`, the codec's tensors `[R, K, S, width]`, and `scores` where they are kept."""

NEVER = 2**31 - 1


def alive_at(arrays: Arrays, lengths: Tensor) -> Tensor:
    """bool: the slots that a row of this length holds. Also of one row, without its axis."""
    position = arrays["position"]
    return (position >= 0) & (position < lengths) & (arrays["died"] > lengths)


def taken_from(arrays: Arrays, order: Tensor) -> Arrays:
    """Copies of the slots `order` int64 `[..., K, n]`, in that order."""
    return {
        name: array.gather(order.ndim - 1, order if array.ndim == order.ndim else _spread(order, array.shape[-1]))
        for name, array in arrays.items()
    }


def padded(arrays: Arrays, count: int) -> Arrays:
    """Copies with `count` empty slots more."""
    larger = {}
    for name, array in arrays.items():
        rows, heads, slots, *rest = array.shape
        larger[name] = array.new_full((rows, heads, slots + count, *rest), -1 if name == "position" else 0)
        larger[name][:, :, :slots] = array
    return larger


def check(arrays: Arrays, asks: bool, length: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a row is restored from. Raises `SnapshotError` where a row of `length` would not have captured that."""
    names = {*arrays, *(["queries"] if asks else [])} - {"died"}
    if set(tensors) != names:
        raise SnapshotError(
            f"this layer evicts, and needs the tensors {sorted(names)}; the snapshot has {sorted(tensors)}: restore it "
            f"in a state that was made with the same kv policy"
        )
    position = tensors["position"]
    heads, count = arrays["position"].shape[1], position.shape[-1]
    for name, tensor in tensors.items():
        if name == "queries":
            if tensor.ndim != 3 or len(tensor) > length or not tensor.is_floating_point():
                raise SnapshotError(
                    f"the snapshot's queries are {tensor.dtype} {list(tensor.shape)} of {length} tokens"
                )
            continue
        own = arrays[name]
        shape = [heads, count] if name in ("position", "scores") else [heads, count, own.shape[-1]]
        if list(tensor.shape) != shape or tensor.is_floating_point() != own.is_floating_point():
            raise SnapshotError(
                f"the snapshot's {name} is {tensor.dtype} {list(tensor.shape)}; this layer holds {own.dtype} {shape}"
            )
        if not own.is_floating_point() and tensor.dtype != own.dtype:
            raise SnapshotError(f"the snapshot's {name} is {tensor.dtype}; this layer holds {own.dtype}")
    if position.numel() and not -1 <= int(position.min()) <= int(position.max()) < length:
        raise SnapshotError(f"the snapshot's positions leave the row of {length} tokens")
    return tensors


def _spread(order: Tensor, width: int) -> Tensor:
    return order[..., None].expand(*order.shape, width)
