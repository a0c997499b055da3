"""Settings of adapters: which modules get an update, and what it is made of. Files name them as PEFT does."""

from __future__ import annotations

import re
import re._constants as regex
import re._parser as regex_parser
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError
from lmstate.ops.weights.lora import AdapterTensor, Update

ALL = "all-linear"
MOST_PATTERN = 500
REPEATS = (regex.MAX_REPEAT, regex.MIN_REPEAT, regex.POSSESSIVE_REPEAT)
AROUND = re.compile(r"^(?:(?:model|language_model|text_model|backbone|transformer|gpt_neox)\.)+")
MOST_RANK = 2**16
MOST_ALPHA = 1e9
Parts = Mapping[str, Tensor]
"""The tensors of one module's update, by the names that PEFT gives them."""


class AdapterConfig(ABC):
    """Settings of an adapter of one kind. `peft_type` names the kind in files; `part_names`: its tensors' names."""

    peft_type: ClassVar[str]
    part_names: ClassVar[tuple[str, ...]]
    refused: ClassVar[tuple[str, ...]] = ("modules_to_save",)
    """Options of a PEFT config that change the arithmetic, and that lmstate does not support."""

    targets: str | Sequence[str]
    """The last words of the names of modules that get an update, or `ALL`."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, str) and self.targets != ALL:
            raise ModelError(f"targets={self.targets!r:.80} was asked for; give a list of module names, or {ALL!r}")

    def matches(self, module: str) -> bool:
        return self.targets == ALL or named(module, self.targets) is not None

    @abstractmethod
    def fresh(self, module: str, shape: tuple[int, int], norms: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The parts of a new update of a module of shape `[N, K]`, which changes nothing.

        norms: the norm of each row of a module's matrix, float32 `[N]`.
        """

    @abstractmethod
    def shape(self, parts: Parts) -> tuple[int | None, int | None] | None:
        """Shape `[N, K]` of the matrix that float parts are made for, as far as they tell; None: they do not fit."""

    @abstractmethod
    def update(self, module: str, first: int, shape: tuple[int, int], parts: Mapping[str, AdapterTensor]) -> Update:
        """The update of a module that is from output `first` on."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path, fields: Config) -> Self:
        """From PEFT's config. Raises `ModelError` for what lmstate does not run."""

    @abstractmethod
    def to_json(self, targets: list[str], modules: Mapping[str, Mapping[str, AdapterTensor]]) -> dict[str, Any]:
        """The part of PEFT's config that is of its kind. targets: names of `modules`, which have updates."""


@dataclass(frozen=True)
class RankedConfig(AdapterConfig):
    """Settings of an adapter that adds products of some rank, times `alpha / rank`.

    `ranks` and `alphas`: those of some modules, by names or regular expressions that the end of a module's name
    matches, of which the first counts, as in PEFT.
    """

    alpha_name: ClassVar[str] = "alpha"

    rank: int = 8
    alpha: float = 16.0
    targets: str | Sequence[str] = ALL
    ranks: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    alphas: Mapping[str, float] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        kind = self.peft_type
        for rank in (self.rank, *self.ranks.values()):
            if not isinstance(rank, int) or not 1 <= rank <= MOST_RANK:
                raise ModelError(f"a {kind} of rank {rank!r:.40} was asked for; ranks are 1 to {MOST_RANK}")
        for alpha in (self.alpha, *self.alphas.values()):
            if not 0 <= alpha <= MOST_ALPHA:
                raise ModelError(f"a {kind} with alpha={alpha} was asked for; alphas are 0 to {MOST_ALPHA:g}")
        super().__post_init__()
        for pattern in (*self.ranks, *self.alphas):
            _check_pattern(pattern)

    def rank_of(self, module: str) -> int:
        key = _matching(module, self.ranks)
        return self.rank if key is None else self.ranks[key]

    def checked_rank(self, module: str, *held: int) -> int:
        """`rank_of` a module. Raises `ModelError` where its tensors are of another rank."""
        rank = self.rank_of(module)
        if wrong := [own for own in held if own != rank]:
            raise ModelError(
                f"the adapter's update of {module[:80]!r} has rank {wrong[0]}, and its config says {rank}: take both "
                "files from one adapter"
            )
        return rank

    def scale_of(self, module: str, rank: int) -> float:
        return self.alpha_of(module) / rank

    def alpha_of(self, module: str) -> float:
        key = _matching(module, self.alphas)
        return self.alpha if key is None else self.alphas[key]

    @classmethod
    def read(cls, path: Path, fields: Config) -> Self:
        ranks, alphas = (
            fields.fields(name, Config({}, name)) or Config({}, name) for name in ("rank_pattern", "alpha_pattern")
        )
        return cls(
            fields.int("r", low=1, high=MOST_RANK),
            fields.float(cls.alpha_name, low=0.0, high=MOST_ALPHA),
            ranks={key: ranks.int(key, low=1, high=MOST_RANK) for key in ranks},
            alphas={key: alphas.float(key, low=0.0, high=MOST_ALPHA) for key in alphas},
        )

    def to_json(self, targets: list[str], modules: Mapping[str, Mapping[str, AdapterTensor]]) -> dict[str, Any]:
        return {
            "target_modules": targets, "r": self.rank, self.alpha_name: self.alpha,
            "rank_pattern": dict(self.ranks), "alpha_pattern": dict(self.alphas),
        }  # fmt: skip


def named(module: str, names: Iterable[str]) -> str | None:
    """The name that a module has, or ends with."""
    return next((name for name in names if module == name or module.endswith(f".{name}")), None)


def last_word(module: str) -> str:
    return module.rpartition(".")[2]


def module_key(module: str) -> str:
    """Name of a module apart from the models around it, which checkpoints and versions of transformers name apart."""
    return AROUND.sub("", module)


def _matching(module: str, patterns: Iterable[str]) -> str | None:
    """The first pattern that PEFT takes for a module."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), None)


def _check_pattern(pattern: str) -> None:
    """Raise `ModelError` for anything but a regular expression, and for one that may match forever."""
    try:
        parsed = regex_parser.parse(pattern) if len(pattern) <= MOST_PATTERN else None
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(f"the pattern {pattern!r:.80} is not a regular expression: {error}") from None
    if parsed is None or _loops(parsed) > 1:
        raise ModelError(
            f"the pattern {pattern!r:.80} is too long, or repeats a repetition without end; write it without"
        )


def _loops(parsed: Any) -> int:
    """The depth at which repetitions without a small limit are nested in a parsed regular expression."""
    if isinstance(parsed, tuple) and len(parsed) == 2 and parsed[0] in REPEATS:
        _, most, body = parsed[1]
        return _loops(body) + (most > 1)
    return max(map(_loops, parsed), default=0) if isinstance(parsed, tuple | list | regex_parser.SubPattern) else 0
