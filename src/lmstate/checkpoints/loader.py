"""The weights of a model as a family's `build` asks for them: by Hugging Face name, in the storage that was chosen."""

from __future__ import annotations

import copy
import fnmatch
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.conversion_bar import ConversionBar
from lmstate.checkpoints.conversion_cache import ConversionCache
from lmstate.checkpoints.placement import DevicePlacement, Devices, Sizes
from lmstate.checkpoints.renamed import file_name
from lmstate.checkpoints.source import GroupedQuant, RowTable, Source, floats
from lmstate.errors import ModelError
from lmstate.ops.memory import spare
from lmstate.ops.processor import multiplies_bfloat16
from lmstate.ops.types.weight import FLOAT_KINDS, Weight
from lmstate.ops.weights.bfloat12 import to_bfloat12
from lmstate.ops.weights.grouped import FloatWeight, Int4Weight, Int8Weight, quantization_error, quantize

KINDS = ("auto", "int4", "int8", "bfloat16", "float32")
ACTIVATIONS = ("auto", 8, 16)
# From fewest bits to most: matrices that are stacked into one take the widest storage among them.
BITS = {"int4": 5.0, "int8": 8.5, "bfloat16": 16.0, "float16": 16.0, "float32": 32.0}
"""Bits of a number in each storage, with the scales of its group."""
WIDTHS = ("int4", "int8", "bfloat16", "float16", "float32")
MOST_LOST = {"int4": 0.15, "int8": 0.05}
"""The quantization error beyond which int4 becomes int8, and int8 is warned about: normal numbers have 0.08 and 0.005,
those of long tails up to 0.13 and 0.02, and a matrix with columns of outliers 0.2 and more."""
NAMED = 4  # matrices that a warning names
Numbers: TypeAlias = Tensor | GroupedQuant
Make: TypeAlias = Callable[..., Numbers]


class WeightLoader:
    """Hands out the parameters of one checkpoint, and knows which of them were never asked for.

    `kind`: the storage of the matrices; of "int4" embeddings, heads, matrices that a file holds in more bits and those
    that would lose too much (`MOST_LOST`) are int8, the last with a warning. "auto" keeps the precision of a quantized
    file; float checkpoints become bfloat16 where the processor multiplies it natively, float32 elsewhere. `dtype`: that
    of K/V storage and of the big products, float32 for float32 weights and bfloat16 for all others unless given.
    `cache`: the folder where conversions are kept, None to keep none. `progress`: whether a long conversion may draw a
    bar on a terminal. `heads`: whether multi-token prediction heads are wanted. `activations`: the bits of the
    activations that int4 and int8 matrices multiply; "auto" follows the format of the checkpoint: 8 for quantized
    tensors of a GGUF file, 16 elsewhere. Heads keep 16, where 8 would cost most. `context_size`: the largest number of
    tokens of a text; above the model's own limit YaRN stretches its positions. `device`: the model's device, or several
    devices to spread its blocks over; the first one decides what "auto" weights are.

    Matrices that need no conversion are used in the mapped checkpoint itself. Stacked matrices (q, k, v) are copied
    together at each start, and bfloat16 ones are packed in 12 bits if a native body reads that. Both are faster than
    reading a second copy of the model from a cache. Quantized matrices are mapped from the cache and copied into large
    pages, unless memory is short.
    """

    def __init__(
        self,
        source: Source,
        kind: str = "auto",
        dtype: torch.dtype | None = None,
        device: Devices | DevicePlacement | None = None,
        cache: Path | None = None,
        progress: bool = True,
        heads: bool = False,
        activations: int | str = "auto",
        context_size: int | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ModelError(f"unknown weights={kind!r}; choose one of {', '.join(KINDS)}")
        if activations not in ACTIVATIONS:
            raise ModelError(f"unknown activations={activations!r}; expected one of 8, 16 and 'auto'")
        if dtype not in (None, torch.float32, torch.bfloat16):
            raise ModelError(f"dtype={dtype} is not supported; choose torch.float32 or torch.bfloat16")
        self.source = source
        self.heads = heads
        self.activations = activations
        self.context_size = context_size
        self.placement = DevicePlacement.of(device)
        self.device = self.placement.devices[0]  # on which what is asked for next is to be
        self.config = Config(source.config, f"config of {source.path}")
        self.float_kind = "bfloat16" if multiplies_bfloat16(self.device) else "float32"
        self.kind = kind = source.weights if kind == "auto" else kind
        if dtype is None:
            quantized = any(source.stored(name) in ("int4", "int8") for name in source.names())
            stays_float32 = kind == "float32" or (kind == "auto" and self.float_kind == "float32" and not quantized)
            dtype = torch.float32 if stays_float32 else torch.bfloat16
        self.dtype = dtype
        self.splits = False  # whether each process keeps parts of the matrices: whole ones stay where they are
        self._packed = (
            ConversionCache(cache / source.key() / f"{kind}-{self.float_kind}.safetensors", source.path)
            if cache
            else None
        )
        self._spare = spare()
        self._made: dict[str, Weight] = {}
        self.stacks: dict[tuple[str, ...], str] = {}
        """The storage of each matrix that is made of whole tensors, by the names that the checkpoint gives these."""
        self._errors: dict[str, float] = {}  # of the matrices that were to be quantized, in the storage asked for
        self._asked: set[str] = set()
        self._bar = ConversionBar(progress, len(source.names()))

    def over(self, source: Source) -> WeightLoader:
        """A loader over another source, say the text part of a checkpoint. Call it before anything is loaded."""
        other = copy.copy(self)
        other.source, other.config = source, Config(source.config, f"config of {source.path}")
        return other

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Load on another device what is asked for inside."""
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before

    @contextmanager
    def configured(self, config: Config) -> Iterator[None]:
        """Build by another config, that of a layer say, what is built inside."""
        before, self.config = self.config, config
        try:
            yield
        finally:
            self.config = before

    def devices(self, blocks: int, state: int, reads: Sequence[int | None] = ()) -> tuple[torch.device, ...]:
        """The device of each block. state: bytes that each of them remembers. reads: see `DevicePlacement.of_blocks`.

        Raises `ModelError` where the blocks cannot be spread as it was asked for.
        """
        if not self.placement.spreads and self.placement.counts is None:
            return (self.device,) * blocks
        return self.placement.of_blocks(self._sizes(blocks, state), reads)

    def _sizes(self, blocks: int, state: int) -> Sizes:
        """Estimate of the bytes that parts of the model take, by the numbers in the names of its tensors."""
        before = behind = 0
        inside = [state] * blocks
        for name in self.source.names():
            bits = BITS[self._storage([StackedMatrix((name,), self.source.stored(name))])]
            nbytes = int(math.prod(self.source.shape(name)) * bits / 8)
            block = next((int(word) for word in name.split(".") if word.isdecimal()), None)
            if block is not None and block < blocks and not name.startswith("mtp."):
                inside[block] += nbytes
            elif block is not None or "head" in name:
                behind += nbytes
            else:
                before += nbytes
        return Sizes(before, inside, behind)

    def has(self, name: str) -> bool:
        return name in self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there; `ModelError` if it is not."""
        if not self.has(name):
            raise ModelError(f"{self.source.path} lacks the tensor {name!r}; the checkpoint is incomplete")
        return self.source.shape(name)

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors that are there are of floats, and the same."""
        if self.source.shape(one) != self.source.shape(other):
            return False
        first, second = self.source.read(one), self.source.read(other)
        if isinstance(first, GroupedQuant) or isinstance(second, GroupedQuant):
            return False
        return first.dtype == second.dtype and torch.equal(first, second)

    def expect(self, name: str, shape: tuple[int, ...] | None) -> None:
        """`ModelError` unless a tensor is there, and has the shape where one is given."""
        self._expect(name, self.shape(name), shape)

    @overload
    def tensor(self, name: str, shape: tuple[int, ...] | None = None, optional: Literal[False] = False) -> Tensor: ...
    @overload
    def tensor(self, name: str, shape: tuple[int, ...] | None = None, *, optional: Literal[True]) -> Tensor | None: ...
    def tensor(self, name: str, shape: tuple[int, ...] | None = None, optional: bool = False) -> Tensor | None:
        """A small parameter (norm, bias, ...) as float32. None if it is optional and absent.

        Raises `ModelError` if it is absent, or if `shape` is given and is not its shape.
        """
        if optional and not self.has(name):
            return None
        self.expect(name, shape)
        self._asked.add(name)
        return floats(self.source.read(name)).float().to(self.device)

    def table(self, name: str, width: int) -> RowTable:
        """A matrix `[N, width]` of which a step reads few rows, as the file has it; it stays in the mapped file.

        Raises `ModelError` if it is absent or of another width.
        """
        found = self.shape(name)
        self._expect(name, found, (*found[:1], width))
        self._asked.add(name)
        return self.source.rows(name)

    def linear(
        self,
        *names: str,
        shape: tuple[int | Sequence[int], int] | None = None,
        order: Callable[[], Tensor] | None = None,
        used_as: Sequence[str] = (),
    ) -> Weight:
        """One matrix [N, K], or several stacked along the output axis (q, k, v), in the storage of `kind`.

        `shape`: N of each (a number for a single one), and K. `order` gives int64 `[N]`, which row of the stack comes
        first, and so on; it is asked when the shapes are known to be right. Raises `ModelError` if one is absent, is
        not a matrix, differs in K from the others, or if `shape` is given and is not its own. The same names give the
        same object again, so one order belongs to them: tied weights stay one. `used_as`: their names at this place,
        where several modules share one matrix: an adapter has an update for each.
        """
        label = "+".join(names) + ("" if order is None else ", reordered")
        if label not in self._made:
            shapes = [self.shape(name) for name in names]
            if any(len(each) != 2 or each[1] != shapes[0][1] for each in shapes):
                raise ModelError(f"{self.source.path}: cannot stack {', '.join(names)} of shapes {shapes} as matrices")
            if shape is not None:
                heights, width = shape
                for name, height in zip(names, [heights] if isinstance(heights, int) else heights, strict=True):
                    self.expect(name, (height, width))
            self._made[label] = self._stack(label, names, order)
        return self._made[label]

    def stacked(self, name: str, index: int, shape: tuple[int, int, int] | None = None) -> Weight:
        """Matrix `index` of a tensor [experts, N, K] that holds one per expert; `shape`: that of the tensor."""
        label = f"{name}[{index}]"
        if label not in self._made:
            whole = self.shape(name)
            if len(whole) != 3 or not 0 <= index < whole[0]:
                raise ModelError(f"{self.source.path}: tensor {name!r} of shape {list(whole)} has no matrix {index}")
            self.expect(name, shape)
            self._made[label] = self._matrix(label, [StackedMatrix((name,), self.source.stored(name), of=index)])
        return self._made[label]

    def derived(
        self,
        label: str,
        *names: str,
        make: Make,
        shape: tuple[int, int],
        stored: str | None = None,
        of: int | None = None,
    ) -> Weight:
        """A matrix that the checkpoint holds in another form: `make(*tensors)` gives it, from what `names` hold.

        `label` names it among all matrices of the model. `stored`: the storage closest to what `make` gives, by default
        that of the first tensor. `of`: what `names` hold is one per expert, and `make` is given those of this one.
        """
        if label not in self._made:
            for name in names:
                self.shape(name)

            def checked(*tensors: Numbers) -> Numbers:
                made = make(*tensors)
                self._expect(label, tuple(made.q.shape if isinstance(made, GroupedQuant) else made.shape), shape)
                return made

            self._made[label] = self._matrix(
                label, [StackedMatrix(names, stored or self.source.stored(names[0]), checked, of)]
            )
        return self._made[label]

    def transposed(self, name: str, shape: tuple[int, int]) -> Weight:
        """The matrix [N, K] of a module whose checkpoint holds it as [K, N]. `shape`: N and K."""
        return self.derived(f"{name}, transposed", name, make=transpose, shape=shape)

    def check_all_used(self, ignore: Iterable[str] = ()) -> None:
        """The end of a build: `ModelError` if a tensor was never asked for, unless a pattern (`*.inv_freq`) matches it.

        One without numbers (of a part with a width of 0) may stay unused. Also keeps what was converted
        for the next start.
        """
        patterns = list(ignore)
        unused = sorted(
            name
            for name in self.source.names() - self._asked
            if 0 not in self.shape(name) and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        )
        self._bar.close()
        if unused:
            shown = ", ".join(name[:80] for name in unused[:5]) + (", ..." if len(unused) > 5 else "")
            raise ModelError(
                f"{self.source.path} has {len(unused)} tensors that a {self.config.get('model_type')} model does not "
                f"use ({shown}); running it without them would give wrong answers"
            )
        if self._packed is not None:
            self._packed.save()
        self._warn_of_losses()

    def _warn_of_losses(self) -> None:
        """One `UserWarning` for the matrices that 4 or 8 bits lose much of; worst first."""
        worst = sorted(self._errors.items(), key=lambda item: -item[1])
        if not worst:
            return
        names = ", ".join(f"{label[:80]} ({error:.0%})" for label, error in worst[:NAMED])
        names += ", ..." if len(worst) > NAMED else ""
        many = f"{len(worst)} of {len(self._made)} matrices"
        if self.kind == "int4":
            text = f"would lose much in 4 bits, and are kept in 8: {names}; the rest may lose some too"
            advice = 'weights="auto" and "int8" lose less'
        else:
            text, advice = f"lose much in 8 bits: {names}", 'weights="bfloat16" loses less'
        warnings.warn(f"{self.source.path} has outliers: {many} {text}; {advice}", UserWarning, stacklevel=2)

    def _stack(self, label: str, names: Sequence[str], order: Callable[[], Tensor] | None) -> Weight:
        parts = [StackedMatrix((name,), self.source.stored(name)) for name in names]
        return self._matrix(label, parts, None if order is None else order())

    def _expect(self, label: str, found: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
        if expected is not None and found != tuple(expected):
            raise ModelError(
                f"{self.source.path}: {label} has the shape {list(found)}, and the config asks for {list(expected)}"
            )

    def _matrix(self, label: str, parts: list[StackedMatrix], order: Tensor | None = None) -> Weight:
        self._asked.update(name for part in parts for name in part.names)
        activations = self._activation_bits(parts)
        kept = self._packed.get(label) if self._packed else None
        if self._packed is not None and kept is not None:
            self._note(label, parts, kept.kind, self._packed.error(label))
            return self._for_decoding(kept.with_activations(activations))
        kind = self._storage(parts)
        weight, error = self._convert(parts, kind, order)
        self._note(label, parts, weight.kind, error)
        # Plain floats are quick to take from the checkpoint; only what was taken apart or rounded is worth keeping.
        costly = weight.kind in ("int4", "int8") or any(part.stored in ("int4", "int8") for part in parts)
        if costly and self._packed is not None:
            self._packed.put(label, weight, error)
        if costly:
            self._bar.advance(len(parts))
        return self._for_decoding(weight.with_activations(activations))

    def _activation_bits(self, parts: list[StackedMatrix]) -> int:
        if _outside(parts):
            return 16
        if self.activations != "auto":
            return int(self.activations)
        return max(self.source.activation_bits(name) for part in parts for name in part.names)

    def _note(self, label: str, parts: list[StackedMatrix], kind: str, error: float | None) -> None:
        if all(part.make is None and part.of is None for part in parts):
            self.stacks[tuple(file_name(self.source, name) for part in parts for name in part.names)] = kind
        if error is not None:
            self._errors[label] = error

    def _for_decoding(self, weight: Weight) -> Weight:
        if self.device.type != "cpu":
            return weight.to(self.device)
        if self.splits or weight.nbytes > self._spare:
            return weight  # where it is, in a mapped file say
        packed = to_bfloat12(weight.in_large_pages())
        self._spare -= packed.nbytes if packed is not weight else 0
        return packed

    def _storage(self, parts: list[StackedMatrix]) -> str:
        """The storage that a stack is brought to.

        int4 is for what loses little by it: embeddings and heads, where a few outliers cost much of the perplexity,
        become int8, and what a file holds in more than 4 bits does not go below 8.
        """
        stored = [part.stored for part in parts]
        if self.kind == "auto":
            return max((one if one in ("int4", "int8") else self.float_kind for one in stored), key=WIDTHS.index)
        if self.kind == "int4" and set(stored) != {"int4"}:
            return "int8" if _outside(parts) or "int8" in stored else "int4"
        return self.kind

    def _convert(self, parts: list[StackedMatrix], kind: str, order: Tensor | None) -> tuple[Weight, float | None]:
        """The stack in a storage, and its error there if that is beyond `MOST_LOST`: int4 is then int8."""
        numbers = [self._read(part) for part in parts]
        grouped = [part for part in numbers if isinstance(part, GroupedQuant)]
        if len(grouped) == len(numbers) and all(part.kind == kind for part in grouped):
            return _pack(grouped, order), None
        plain = [floats(part) for part in numbers]
        dtype = FLOAT_KINDS.get(kind)
        if dtype is not None:
            plain = [part.to(dtype) for part in plain]
        whole = plain[0] if len(plain) == 1 else torch.cat(plain)
        whole = whole if order is None else whole[order]
        if dtype is not None:
            return FloatWeight(whole), None
        error = quantization_error(whole, kind)
        if error <= MOST_LOST[kind]:
            return quantize(whole, kind), None
        return quantize(whole, "int8"), error

    def _read(self, part: StackedMatrix) -> Numbers:
        of = part.of
        numbers = [self.source.read(name) if of is None else self.source.part(name, of) for name in part.names]
        return numbers[0] if part.make is None else part.make(*numbers)


class StackedMatrix:
    """One matrix of a stack: a tensor, or what `make` makes of some; `of`: of the matrices of one expert in them."""

    def __init__(self, names: tuple[str, ...], stored: str, make: Make | None = None, of: int | None = None) -> None:
        self.names, self.stored, self.make, self.of = names, stored, make, of


def _outside(parts: Sequence[StackedMatrix]) -> bool:
    """Whether they are of no layer: an embedding, a head."""
    return not any(word.isdecimal() for part in parts for name in part.names for word in name.split("."))


def _pack(parts: list[GroupedQuant], order: Tensor | None) -> Weight:
    minima = [part.minimum for part in parts if part.minimum is not None]
    whole = GroupedQuant(
        torch.cat([part.q for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(minima) if minima else None,
    )
    whole = whole if order is None else whole.rows(order)
    if whole.scale.numel() and not float(whole.scale.abs().max()) <= torch.finfo(torch.float16).max:
        raise ModelError("the checkpoint is damaged: numbers of a quantized matrix are scaled beyond float16")
    if whole.minimum is None:
        return Int8Weight.pack(whole.q, whole.scale)
    return Int4Weight.pack(whole.q, whole.scale, whole.minimum)


def transpose(numbers: Numbers) -> Tensor:
    """A matrix as floats, its axes swapped."""
    return floats(numbers).T
