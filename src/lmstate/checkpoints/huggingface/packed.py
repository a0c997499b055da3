"""Matrices that are packed into integers: GPTQ, AWQ, compressed-tensors, NVFP4, MXFP4, bitsandbytes and BitNet.

Each is read as the integers that it holds where they fit a storage of lmstate: groups of 32 inputs, or of a multiple of
32, that share a scale. All others (groups that interleave, groups of 16, tables of values) are dequantized.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.huggingface.mxfp4 import DOUBLED, whole_numbers
from lmstate.checkpoints.source import GROUP, GroupedQuant
from lmstate.errors import ModelError
from lmstate.files.safetensors import TensorEntry

Entries = Mapping[str, TensorEntry]
Get = Callable[[str], Tensor]
METHODS = ("gptq", "awq", "compressed-tensors", "modelopt", "bitsandbytes", "bitnet")
"""The `quant_method`s whose packed integers are read."""
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each four bits of a number hold, lowest bits first
MOST_STATE = 2**16  # bytes of the JSON in which bitsandbytes describes a matrix
INTEGERS, BYTES = torch.int32, torch.uint8


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix that is in several tensors.

    `parts`: their names. `shape`: its own. `stored`: the storage that comes closest. `read` gives its numbers. `lossy`:
    how it is packed, where it is dequantized to be stored.
    """

    parts: tuple[str, ...]
    shape: tuple[int, int]
    stored: str
    read: Callable[[], GroupedQuant | Tensor]
    lossy: str | None = None


def find(entries: Entries, get: Get, settings: Config, path: Path) -> dict[str, PackedMatrix]:
    """The packed matrices of a checkpoint, by the name that each would have as floats. `get`: a tensor by its name.

    Raises `ModelError` for one whose parts are missing or do not fit together.
    """
    method = settings.get("quant_method")
    makers = {
        ".qweight": _awq if method == "awq" else _gptq,
        ".weight_packed": _compressed,
        ".weight": _bitnet if method == "bitnet" else _plain,
    }
    found: dict[str, PackedMatrix] = {}
    for name in entries:
        for ending, maker in makers.items():
            if name.endswith(ending):
                stem = name.removesuffix(ending)
                matrix = maker(PackedParts(entries, get, stem, path), settings)
                if matrix is not None:
                    found[f"{stem}.weight"] = matrix
    return found


class PackedParts:
    """The tensors of one matrix, by the ends of their names."""

    def __init__(self, entries: Entries, get: Get, stem: str, path: Path) -> None:
        self._entries, self._get, self.stem, self._path = entries, get, stem, path

    def has(self, end: str) -> bool:
        return f"{self.stem}.{end}" in self._entries

    def dtype(self, end: str) -> torch.dtype:
        return self._entries[f"{self.stem}.{end}"].dtype

    def shape(self, end: str) -> tuple[int, ...]:
        if not self.has(end):
            raise self.damaged(f"{self.stem}.{end} is missing")
        return self._entries[f"{self.stem}.{end}"].shape

    def expect(self, end: str, shape: tuple[int, ...]) -> None:
        if self.shape(end) != shape:
            raise self.damaged(
                f"{self.stem}.{end} has the shape {list(self.shape(end))}, and should have {list(shape)}"
            )

    def scales(self, end: str) -> Tensor:
        """Finite scales, float32."""
        values = self.read(end).float()
        if not bool(values.isfinite().all()):
            raise self.damaged(f"{self.stem}.{end} holds infinities or NaN")
        return values

    def read(self, end: str) -> Tensor:
        return self._get(f"{self.stem}.{end}")

    def names(self, *ends: str) -> tuple[str, ...]:
        return tuple(f"{self.stem}.{end}" for end in ends if self.has(end))

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is damaged or incomplete: {what}")


def _gptq(parts: PackedParts, settings: Config) -> PackedMatrix:
    """Integers along the inputs, `w = scale * (q - zero)`; in the first version zeros are one lower."""
    bits = settings.int("bits", 2, 8, default=4)
    if bits not in (2, 4, 8):
        raise parts.damaged(f"{parts.stem}.qweight has {bits} bits a number; lmstate reads GPTQ of 2, 4 and 8")
    each = 32 // bits
    rows, outputs = _matrix(parts, "qweight")
    inputs, groups = rows * each, _matrix(parts, "scales")[0]
    parts.expect("scales", (groups, outputs))
    parts.expect("qzeros", (groups, outputs // each))
    below = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    ordered = parts.has("g_idx")
    size = inputs // groups if inputs % groups == 0 else settings.int("group_size", 1, 2**20, default=inputs)
    regular = not settings.bool("desc_act", default=False) or size >= inputs
    regular = regular and inputs % GROUP == 0 and size % GROUP == 0 and groups * size == inputs
    if not regular and not ordered and groups * size < inputs:
        raise parts.damaged(f"{parts.stem}.scales has {groups} groups of {size} for {inputs} inputs")

    def read() -> GroupedQuant | Tensor:
        q = _unpacked(parts.read("qweight"), bits, dim=0)  # [K, N]
        zero = (_unpacked(parts.read("qzeros"), bits, dim=1) + below).T  # [N, G]
        index = parts.read("g_idx").long() if ordered else torch.arange(inputs) // size
        if index.shape != (inputs,) or int(index.min()) < 0 or int(index.max()) >= groups:
            raise parts.damaged(f"{parts.stem}.g_idx names groups that are not there")
        return _grouped(q.T, parts.scales("scales").T, zero, index, bits)

    names = parts.names("qweight", "qzeros", "scales", "g_idx")
    kind = "int4" if bits <= 4 and regular else "int8"
    lossy = None if regular else f"GPTQ whose groups of {size} inputs are not a multiple of {GROUP}"
    return PackedMatrix(names, (outputs, inputs), kind, read, lossy)


def _awq(parts: PackedParts, settings: Config) -> PackedMatrix:
    """Four bits along the outputs, whose columns are interleaved."""
    inputs, columns = _matrix(parts, "qweight")
    outputs, groups = columns * 8, _matrix(parts, "scales")[0]
    parts.expect("scales", (groups, outputs))
    parts.expect("qzeros", (groups, columns))
    if settings.int("bits", default=4) != 4 or inputs % groups:
        raise parts.damaged(f"{parts.stem}.qweight is not a 4-bit AWQ matrix in {groups} groups of {inputs} inputs")
    regular = inputs // groups % GROUP == 0

    def read() -> GroupedQuant | Tensor:
        q, zero = (_interleaved(parts.read(end)) for end in ("qweight", "qzeros"))
        index = torch.arange(inputs) // (inputs // groups)
        return _grouped(q.T, parts.scales("scales").T, zero.T, index, 4)

    lossy = None if regular else f"AWQ in groups of {inputs // groups} inputs"
    kind = "int4" if regular else "int8"
    return PackedMatrix(parts.names("qweight", "qzeros", "scales"), (outputs, inputs), kind, read, lossy)


def _compressed(parts: PackedParts, settings: Config) -> PackedMatrix:
    """compressed-tensors: integers along the inputs above their lowest value, or NVFP4."""
    outputs, columns = _matrix(parts, "weight_packed")
    if parts.dtype("weight_packed") == BYTES:
        return _nvfp4(parts, "weight_packed", "weight_global_scale", divided=True)
    groups = _matrix(parts, "weight_scale")[1]
    parts.expect("weight_scale", (outputs, groups))
    bits = next(iter(_bits(settings)), 4)
    if bits not in (2, 4, 8):
        raise parts.damaged(f"{parts.stem}.weight_packed has {bits} bits a number; lmstate reads 2, 4 and 8")
    inputs, asymmetric = columns * 32 // bits, parts.has("weight_zero_point")
    if asymmetric:
        parts.expect("weight_zero_point", (-(-outputs * bits // 32), groups))
    if inputs % groups:
        raise parts.damaged(f"{parts.stem}.weight_scale has {groups} groups for {inputs} inputs")
    ordered, regular = parts.has("weight_g_idx"), inputs // groups % GROUP == 0
    middle = 2 ** (bits - 1)

    def read() -> GroupedQuant | Tensor:
        q = _unpacked(parts.read("weight_packed"), bits, dim=1)
        zero = torch.full((outputs, groups), middle)
        if asymmetric:
            zero = _unpacked(parts.read("weight_zero_point"), bits, dim=0)[:outputs]
        index = torch.arange(inputs) // (inputs // groups)
        if ordered:
            index = parts.read("weight_g_idx").long()
            if index.shape != (inputs,) or int(index.min()) < 0 or int(index.max()) >= groups:
                raise parts.damaged(f"{parts.stem}.weight_g_idx names groups that are not there")
        return _grouped(q, parts.scales("weight_scale"), zero, index, bits)

    names = parts.names("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    fits = regular and not ordered
    lossy = None if fits else f"compressed-tensors whose groups of inputs are not a multiple of {GROUP}"
    return PackedMatrix(names, (outputs, inputs), "int4" if bits <= 4 and fits else "int8", read, lossy)


def _plain(parts: PackedParts, settings: Config) -> PackedMatrix | None:
    """A matrix under its own name: bitsandbytes', 8-bit integers with scales, NVFP4 of ModelOpt, MXFP4 of DeepSeek-V4.

    None for others.
    """
    if parts.has("weight.absmax"):
        return _bitsandbytes(parts)
    dtype, shape = parts.dtype("weight"), parts.shape("weight")
    if len(shape) != 2:
        return None
    if dtype == BYTES and parts.has("weight_scale_2"):
        return _nvfp4(parts, "weight", "weight_scale_2", divided=False)
    if dtype in (torch.int8, BYTES) and parts.has("scale") and parts.dtype("scale") == torch.float8_e8m0fnu:
        return _mxfp4(parts)
    end = next((end for end in ("weight_scale", "SCB") if parts.has(end)), None)
    if dtype != torch.int8 or end is None:
        return None
    (outputs, inputs), scales = shape, parts.shape(end)
    groups = scales[1] if len(scales) == 2 else 1
    if scales not in ((outputs,), (outputs, groups)) or not groups or inputs % groups or parts.has("weight_zero_point"):
        raise parts.damaged(f"{parts.stem}.{end} of shape {list(scales)} cannot scale a matrix {list(shape)}")
    fits = inputs % GROUP == 0 and inputs // groups % GROUP == 0

    def read() -> GroupedQuant | Tensor:
        scale = parts.scales(end).view(outputs, groups) / (127.0 if end == "SCB" else 1.0)
        index = torch.arange(inputs) // (inputs // groups)
        q = parts.read("weight").to(torch.int32) + 128
        return _grouped(q, scale, torch.full((outputs, groups), 128), index, 8)

    names = parts.names("weight", end, "weight_format")
    return PackedMatrix(names, (outputs, inputs), "int8", read, None if fits else "8-bit integers")


def _bitnet(parts: PackedParts, settings: Config) -> PackedMatrix | None:
    """BitNet b1.58 (2402.17764): -1, 0 and 1 times one scale, four in a byte, or to be made of floats; None for others.

    Activations are not rounded to 8 bits here.
    """
    packed, floats = parts.dtype("weight") == BYTES, len(parts.shape("weight")) == 2 and _is_linear(parts.stem)
    if not packed and not (floats and settings.get("quantization_mode") == "online"):
        return None
    height, inputs = _matrix(parts, "weight")
    outputs = 4 * height if packed else height
    if packed:
        parts.expect("weight_scale", (1,))

    def read() -> GroupedQuant | Tensor:
        stored = parts.read("weight")
        if packed:
            q, scale = torch.cat([(stored >> 2 * part) & 3 for part in range(4)]), 1 / parts.scales("weight_scale")
        else:
            times = 1 / parts.scales("weight").abs().mean().clamp(min=1e-5)
            q, scale = (stored.float() * times).round().clamp(-1, 1) + 1, 1 / times
        index = torch.zeros(inputs, dtype=torch.int64)
        scales, ones = scale.expand(outputs, 1), torch.ones(outputs, 1, dtype=torch.int32)
        return _grouped(q.to(torch.int32), scales, ones, index, 4)

    fits = inputs % GROUP == 0
    lossy = None if fits else f"BitNet whose inputs are not a multiple of {GROUP}"
    names = parts.names("weight", "weight_scale")
    return PackedMatrix(names, (outputs, inputs), "int4" if fits else "int8", read, lossy)


def _is_linear(stem: str) -> bool:
    """Whether a matrix is a layer's, and not an embedding or a head."""
    return not stem.endswith("lm_head") and "embed" not in stem.rpartition(".")[2]


def _nvfp4(parts: PackedParts, packed: str, whole: str, divided: bool) -> PackedMatrix:
    """Four-bit floats in groups of 16 with 8-bit float scales, and one scale for the whole matrix."""
    outputs, columns = _matrix(parts, packed)
    inputs = 2 * columns
    parts.expect("weight_scale", (outputs, inputs // 16))

    def read() -> Tensor:
        raw = parts.read(packed)
        nibbles = torch.stack([raw & 15, raw >> 4], dim=-1).flatten(1)
        values = torch.tensor(DOUBLED, dtype=torch.float32)[nibbles.long()] / 2
        scale, of_all = parts.scales("weight_scale"), parts.scales(whole).reshape(())
        scale = scale / of_all if divided else scale * of_all
        return (values.view(outputs, -1, 16) * scale.unsqueeze(-1)).flatten(1)

    names = parts.names(packed, "weight_scale", whole, "input_scale", "input_global_scale")
    return PackedMatrix(names, (outputs, inputs), "int8", read, "NVFP4")


def _mxfp4(parts: PackedParts) -> PackedMatrix:
    """Four-bit floats in groups of 32 that share a power of two; the low half of a byte comes before its high half."""
    outputs, columns = _matrix(parts, "weight")
    inputs = 2 * columns
    if inputs % GROUP:
        raise parts.damaged(f"{parts.stem}.weight has {inputs} inputs, which do not lie in groups of {GROUP}")
    parts.expect("scale", (outputs, inputs // GROUP))

    def read() -> GroupedQuant:
        raw = parts.read("weight").view(BYTES)
        nibbles = torch.stack([raw & 15, raw >> 4], dim=-1).flatten(1)
        return GroupedQuant(whole_numbers(nibbles), parts.scales("scale") / 2, None)

    return PackedMatrix(parts.names("weight", "scale"), (outputs, inputs), "int8", read)


def _bitsandbytes(parts: PackedParts) -> PackedMatrix | None:
    """NF4 and FP4: indices into a table, blocks of numbers that share a scale, which may be quantized too."""
    kind = next((kind for kind in ("nf4", "fp4") if parts.has(f"weight.quant_state.bitsandbytes__{kind}")), None)
    if kind is None:
        return None
    state_name = f"weight.quant_state.bitsandbytes__{kind}"
    nested = parts.has("weight.nested_absmax")

    description = parts.read(state_name)
    if description.dtype != BYTES or description.numel() > MOST_STATE:
        raise parts.damaged(f"{parts.stem}.{state_name} is not a description")
    try:
        said = Config(json.loads(bytes(description.flatten().tolist())), f"{parts.stem}.{state_name}")
    except (ValueError, RecursionError) as error:
        raise parts.damaged(f"{parts.stem}.{state_name} is not JSON ({error})") from error
    rows, columns = said.ints("shape", 2, low=1)
    block = said.int("blocksize", 1, 2**16)

    def read() -> Tensor:
        raw, absmax = parts.read("weight").flatten(), parts.read("weight.absmax")
        if raw.numel() * 2 != rows * columns or absmax.numel() * block != rows * columns:
            raise parts.damaged(f"{parts.stem}.weight has {raw.numel()} bytes for a matrix {[rows, columns]}")
        if nested:
            inner = said.int("nested_blocksize", 1, 2**16)
            codes, scales = (parts.scales(f"weight.nested_{end}") for end in ("quant_map", "absmax"))
            if codes.numel() != 256 or scales.numel() * inner < absmax.numel():
                raise parts.damaged(f"{parts.stem}.weight.nested_absmax does not fit")
            each = scales.repeat_interleave(inner)[: absmax.numel()]
            scale = codes[absmax.flatten().long()] * each + said.float("nested_offset", default=0.0)
        else:
            scale = parts.scales("weight.absmax").flatten()
        table = parts.scales("weight.quant_map").flatten()
        if table.numel() != 16:
            raise parts.damaged(f"{parts.stem}.weight.quant_map has {table.numel()} values")
        nibbles = torch.stack([raw >> 4, raw & 15], dim=-1).flatten()
        return (table[nibbles.long()].view(-1, block) * scale.unsqueeze(-1)).view(rows, columns)

    ends = (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        state_name,
    )
    return PackedMatrix(parts.names(*ends), (rows, columns), "int8", read, f"bitsandbytes {kind}")


def _matrix(parts: PackedParts, end: str) -> tuple[int, int]:
    shape = parts.shape(end)
    if len(shape) != 2 or 0 in shape:
        raise parts.damaged(f"{parts.stem}.{end} has the shape {list(shape)}, and should be a matrix")
    return shape[0], shape[1]


def _bits(settings: Config) -> list[int]:
    """The bits of the weights of each group of modules of compressed-tensors."""
    groups = settings.fields("config_groups") or Config({})
    found = [group.fields("weights") for name in groups if (group := groups.fields(name)) is not None]
    return [weights.int("num_bits", 1, 16) for weights in found if weights is not None and weights.given("num_bits")]


def _unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """The numbers of `bits` bits in int32 numbers, lowest first, along an axis: int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if dim == 0:
        return ((packed.unsqueeze(1) >> shifts.view(1, -1, 1)) & (2**bits - 1)).flatten(0, 1)
    return ((packed.unsqueeze(2) >> shifts) & (2**bits - 1)).flatten(1)


def _interleaved(packed: Tensor) -> Tensor:
    """int32 `[R, N / 8]` of AWQ -> `[R, N]`."""
    q = (packed.unsqueeze(2) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    out = torch.empty_like(q)
    out[:, :, list(AWQ_COLUMNS)] = q
    return out.flatten(1)


def _grouped(q: Tensor, scale: Tensor, zero: Tensor, index: Tensor, bits: int) -> GroupedQuant | Tensor:
    """`scale * (q - zero)` of `[N, K]`, with the group of each input in `index` and scales and zeros `[N, G]`.

    As integers in groups of 32 where each such run is of one group, else as floats.
    """
    inputs = q.shape[1]
    runs = index.view(-1, GROUP) if inputs % GROUP == 0 else None
    whole = runs is not None and bool((runs == runs[:, :1]).all())
    if runs is not None and whole:
        of_run = runs[:, 0]
        scales, zeros = scale[:, of_run].contiguous(), zero[:, of_run]
        if bits <= 4:
            return GroupedQuant(q.to(torch.uint8).contiguous(), scales, -scales * zeros)
        centered = q - zeros.repeat_interleave(GROUP, 1)
        if int(centered.min()) >= -128 and int(centered.max()) <= 127:
            return GroupedQuant(centered.to(torch.int8).contiguous(), scales, None)
    return (q - zero[:, index]).float() * scale[:, index]
