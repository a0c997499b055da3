"""LoRA adapters (Hu et al. 2021) in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

Those of DoRA (2402.09353) too, which have a vector of magnitudes beside each pair of matrices.
"""

from __future__ import annotations

import math
import os
import re
import re._constants as regex
import re._parser as regex_parser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError
from lmstate.files.json_object import read_object
from lmstate.files.safetensors import TensorFile
from lmstate.files.writing import save_tensors, write_json
from lmstate.ops import FloatWeight
from lmstate.ops.weights.lora import LowRank, Magnitude
from lmstate.training.module_names import named_as_in_transformers

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of module names in PEFT's files."""
ALL = "all-linear"
MOST_PATTERN = 500
REPEATS = (regex.MAX_REPEAT, regex.MIN_REPEAT, regex.POSSESSIVE_REPEAT)
AROUND = re.compile(r"^(?:(?:model|language_model|text_model|backbone|transformer|gpt_neox)\.)+")
# PEFT refuses updates of `out_proj` in these models, and their forward reads the weight of `dt_proj` past its update.
PEFT_REFUSES = {
    "falcon_h1": ("out_proj",), "mamba2": ("out_proj",), "nemotron_h": ("out_proj",),
    "mamba": ("out_proj", "dt_proj"), "falcon_mamba": ("out_proj", "dt_proj"), "jamba": ("dt_proj",),
}  # fmt: skip
MOST_RANK = 2**16
MOST_ALPHA = 1e9
# Options of a PEFT config that change the arithmetic, and that lmstate does not support.
REFUSED = ("lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens", "layer_replication",
           "modules_to_save", "trainable_token_indices", "arrow_config",
           "kasa_config", "velora_config", "monteclora_config")  # fmt: skip
MOVED = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraConfig:
    """LoRA settings: the matrices that get an update, and its rank.

    `targets`: the last words of their modules' names (`"q_proj"`), or `"all-linear"`: every projection of the blocks.
    An update is multiplied by `alpha / rank`, or `alpha / sqrt(rank)` if `rslora` (2312.03732). `dora`: magnitudes of
    outputs are trained apart from directions. `ranks` and `alphas`: those of some modules, by names or regular
    expressions that the end of a module's name matches, of which the first counts, as in PEFT.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: str | Sequence[str] = ALL
    rslora: bool = False
    dora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in (self.rank, *self.ranks.values()):
            if not isinstance(rank, int) or not 1 <= rank <= MOST_RANK:
                raise ModelError(f"a LoRA of rank {rank!r:.40} was asked for; ranks are 1 to {MOST_RANK}")
        for alpha in (self.alpha, *self.alphas.values()):
            if not 0 <= alpha <= MOST_ALPHA:
                raise ModelError(f"a LoRA with alpha={alpha} was asked for; alphas are 0 to {MOST_ALPHA:g}")
        if isinstance(self.targets, str) and self.targets != ALL:
            raise ModelError(f"targets={self.targets!r:.80} was asked for; give a list of module names, or {ALL!r}")

        for pattern in (*self.ranks, *self.alphas):
            _check_pattern(pattern)

    def matches(self, module: str) -> bool:
        return self.targets == ALL or _ending(module, self.targets) is not None

    def rank_of(self, module: str) -> int:
        key = _matching(module, self.ranks)
        return self.rank if key is None else self.ranks[key]

    def scale_of(self, module: str, rank: int) -> float:
        key = _matching(module, self.alphas)
        alpha = self.alpha if key is None else self.alphas[key]
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _ending(module: str, names: Iterable[str]) -> str | None:
    """The name that a module has, or ends with."""
    return next((name for name in names if module == name or module.endswith(f".{name}")), None)


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


def last_word(module: str) -> str:
    return module.rpartition(".")[2]


def module_key(module: str) -> str:
    """Name of a module apart from the models around it, which checkpoints and versions of transformers name apart."""
    return AROUND.sub("", module)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The updates of one adapter by module: A `[rank, K]` and B `[N, rank]` each, and for DoRA magnitudes `[N]`."""

    config: LoraConfig
    pairs: Mapping[str, tuple[FloatWeight, FloatWeight]]
    magnitudes: Mapping[str, Magnitude] = field(default_factory=dict)
    model_type: object = None  # of the model that it is for, which may name its modules in its own way

    @classmethod
    def fresh(
        cls, config: LoraConfig, shapes: Mapping[str, tuple[int, int]], norms: Callable[[str], Tensor]
    ) -> Adapter:
        """A new one for modules of shapes `[N, K]`: A is random as in PEFT, B is zero, so that it changes nothing.

        norms: the norm of each row of a module's matrix, float32 `[N]`, where magnitudes begin.
        """
        pairs, magnitudes = {}, {}
        for module, (height, width) in shapes.items():
            if config.matches(module):
                rank, bound = config.rank_of(module), width**-0.5
                down = torch.empty(rank, width).uniform_(-bound, bound).requires_grad_()
                pairs[module] = FloatWeight(down), FloatWeight(torch.zeros(height, rank).requires_grad_())
                if config.dora:
                    magnitudes[module] = Magnitude(norms(module).requires_grad_())
        targets = () if config.targets == ALL else config.targets
        unknown = [name for name in targets if not any(_ending(module, [name]) for module in shapes)]
        if unknown or not pairs:
            ends = sorted({last_word(module) for module in shapes})
            asked = ", ".join(unknown) or repr(config.targets)
            raise ModelError(f"no projection is called {asked:.200}; this model has {', '.join(ends)}")
        return cls(config, pairs, magnitudes)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model_type: object) -> Adapter:
        """Read what PEFT's (or this) `save_pretrained` wrote, for a model of a type.

        Raises `ModelError` for one that is damaged or of a kind that lmstate does not run, `OSError` for missing files.
        """
        path = Path(folder)
        config = _read_config(path)
        file = TensorFile(path / TENSORS)
        found: dict[str, dict[str, Tensor]] = {}
        for name in file.entries:
            match = re.fullmatch(r"(.*)\.lora_(A|B|magnitude_vector)(?:\.default)?(?:\.weight)?", name)
            if match is None:
                raise ModelError(f"{path}: tensor {name[:80]!r} is not part of a LoRA that lmstate runs")
            own = found.setdefault(match[1].removeprefix(PREFIX), {})
            if match[2] in own:
                raise ModelError(f"{path}: {match[1][:80]!r} has two tensors {match[2]}; the file is damaged")
            own[match[2]] = file.tensor(name)
        wanted = {"A": 2, "B": 2, "magnitude_vector": 1} if config.dora else {"A": 2, "B": 2}
        pairs, magnitudes = {}, {}
        for module, own in found.items():
            dims = {part: tensor.ndim for part, tensor in own.items() if tensor.is_floating_point()}
            if dims != wanted:
                raise ModelError(
                    f"{path}: the update of {module[:80]!r} is not a pair of float matrices, A and B"
                    + (", with a vector of magnitudes" if config.dora else "")
                )
            down, up, *vector = (own[part].float().contiguous().clone() for part in wanted)
            if not 1 <= len(down) <= MOST_RANK:
                raise ModelError(
                    f"{path}: the update of {module[:80]!r} has rank {len(down)}; 1 to {MOST_RANK} will do"
                )
            if len(down) != up.shape[1]:
                raise ModelError(f"{path}: the update of {module[:80]!r} has ranks {len(down)} and {up.shape[1]}")
            pairs[module] = FloatWeight(down), FloatWeight(up)
            if vector:
                if len(vector[0]) != len(up):
                    raise ModelError(f"{path}: {module[:80]!r} has {len(up)} outputs and {len(vector[0])} magnitudes")
                magnitudes[module] = Magnitude(vector[0])
        if not pairs:
            raise ModelError(f"{path / TENSORS} holds no updates")
        return cls(config, pairs, magnitudes, model_type)

    def save(self, folder: str | os.PathLike[str], base: tuple[str, str | None], modules: Iterable[str]) -> None:
        """Write it for PEFT. `base`: the repository or the path of the model, and its revision; `modules`: all that the
        model has, its experts too."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_tensors(path / TENSORS, dict(self.named_tensors()))
        # A module named as those of the experts: PEFT would take its name for theirs, but not that of its parameter.
        of_experts = {last_word(module) for module in modules if ".experts." in module}
        parameters = [f"{module}.weight" for module in self.pairs if last_word(module) in of_experts]
        targets = [module for module in self.pairs if last_word(module) not in of_experts]
        # The last words of names where these say it.
        ends = {last_word(module) for module in targets}
        others = {last_word(module) for module in set(modules) - set(self.pairs)}
        wrapped = any("language_model." in module or "text_model." in module for module in self.pairs)
        if not wrapped and not ends & others:  # beside a text model, others have modules of the same names
            targets = [module if last_word(module).isdecimal() else last_word(module) for module in targets]
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base[0], "revision": base[1],
            "inference_mode": True,
            "r": self.config.rank, "lora_alpha": self.config.alpha, "lora_dropout": 0.0, "bias": "none",
            "target_modules": sorted(set(targets)), "target_parameters": sorted(parameters),
            "use_rslora": self.config.rslora,
            "rank_pattern": dict(self.config.ranks), "alpha_pattern": dict(self.config.alphas),
            "fan_in_fan_out": False, "use_dora": self.config.dora, "modules_to_save": None, "init_lora_weights": True,
        }  # fmt: skip
        write_json(path / CONFIG, config)

    @cached_property
    def names(self) -> dict[str, str]:
        """Names of its modules by their keys. Raises `ModelError` if two are of one module."""
        names: dict[str, str] = {}
        for name in self.pairs:
            key = module_key(named_as_in_transformers(self.model_type, name))
            if (other := names.setdefault(key, name)) != name:
                raise ModelError(f"the adapter updates {other[:80]!r} and {name[:80]!r}, which are one module")
        return names

    def parts(self) -> Iterator[tuple[str, FloatWeight | Magnitude]]:
        """A, B and magnitudes of each module under their names in a file."""
        for module, (down, up) in self.pairs.items():
            yield f"{PREFIX}{module}.lora_A.weight", down
            yield f"{PREFIX}{module}.lora_B.weight", up
            if module in self.magnitudes:
                yield f"{PREFIX}{module}.lora_magnitude_vector", self.magnitudes[module]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `parts`."""
        yield from ((name, part.storage) for name, part in self.parts())

    def update(self, module: str, first: int, shape: tuple[int, int]) -> LowRank | None:
        """Update of a module of a shape `[N, K]`, which lies from output `first` on; None if it has none."""
        name = self.names.get(module_key(module))
        if name is None:
            return None
        down, up = self.pairs[name]
        if (up.out_features, down.in_features) != shape:
            raise ModelError(
                f"the adapter is of another model: its update of {module} is [{up.out_features}, {down.in_features}], "
                f"and the matrix is {list(shape)}"
            )
        scale = self.config.scale_of(name, down.out_features)
        return LowRank(first, down, up, scale, self.magnitudes.get(name))

    def to(self, device: torch.device) -> None:
        """Move its tensors to where the model is."""
        for _, part in self.parts():
            part.storage = part.storage.to(device)


def _read_config(path: Path) -> LoraConfig:
    raw = read_object(path / CONFIG)
    fields = Config(raw, f"{path / CONFIG}")
    if fields.str("peft_type", default="LORA") != "LORA":
        raise ModelError(f"{path} is a {fields.str('peft_type')[:40]} adapter; lmstate runs LORA")
    if (bias := fields.str("bias", default="none")) != "none":
        raise ModelError(f"{path}: bias={bias[:40]!r} is not supported; an adapter trains no biases here")
    asked = [name for name in REFUSED if raw.get(name)]
    parameters = raw.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(str(name).endswith(".weight") for name in parameters):
        asked.append("target_parameters")  # of all experts at once
    if asked:
        raise ModelError(f"{path} asks for {', '.join(asked)}, which lmstate does not run")
    # These take their own beginning off the base matrix: the file holds what is beside another base than the model's.
    if (made := str(raw.get("init_lora_weights")).lower()).startswith(MOVED):
        raise ModelError(
            f"{path} was begun with init_lora_weights={made[:40]!r}, which changes the base weights, too; save it with "
            "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), which makes a plain LoRA of it"
        )
    ranks, alphas = (fields.fields(name, Config({}, name)) or Config({}, name) for name in _PATTERNS)
    return LoraConfig(
        fields.int("r", low=1, high=MOST_RANK),
        fields.float("lora_alpha", low=0.0, high=MOST_ALPHA),
        rslora=fields.bool("use_rslora", default=False),
        dora=fields.bool("use_dora", default=False),
        ranks={key: ranks.int(key, low=1, high=MOST_RANK) for key in ranks},
        alphas={key: alphas.float(key, low=0.0, high=MOST_ALPHA) for key in alphas},
    )


_PATTERNS = ("rank_pattern", "alpha_pattern")
