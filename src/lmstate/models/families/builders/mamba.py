"""Mamba and Mamba-2 layers under their usual Hugging Face names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families.builders.attention import biases
from lmstate.models.families.builders.dims import MAX_SIZE, Dims
from lmstate.models.layers.mamba import Mamba
from lmstate.models.layers.mamba2 import GatedNorm, Mamba2
from lmstate.ops import Norm

NO_LIMITS = (0.0, math.inf)
UNLIMITED = 1e38  # stands for infinity where config values are checked


@dataclass(frozen=True)
class Mamba2Shape:
    """Sizes of a Mamba-2 mixer: H heads of P features, states N wide, G groups of B and C, a kernel of C taps."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    kernel: int
    eps: float
    dt_limits: tuple[float, float] = NO_LIMITS

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ModelError(f"{self.heads} state space heads cannot share {self.groups} groups evenly")

    @classmethod
    def of(cls, config: Config, shape: Dims) -> Mamba2Shape:
        """Dimensions from a config with Bamba's names: `mamba_n_heads`, `mamba_d_state`, ..."""
        only_silu(config)
        heads = config.int("mamba_n_heads", low=1, high=MAX_SIZE)
        head_dim = config.get("mamba_d_head", "auto")
        if head_dim == "auto":
            inner = expanded(config, "mamba_expand", shape.hidden)
            head_dim = config.int("mamba_d_ssm", low=1, high=MAX_SIZE, default=inner) // heads
        return cls(
            heads,
            Config({"mamba_d_head": head_dim}, config.where).int("mamba_d_head", low=1, high=MAX_SIZE),
            config.int("mamba_d_state", low=1, high=MAX_SIZE),
            config.int("mamba_n_groups", low=1, high=MAX_SIZE, default=1),
            config.int("mamba_d_conv", low=1, high=MAX_SIZE, default=4),
            shape.eps,
            dt_limits(config),
        )

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def width(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_size


@dataclass(frozen=True)
class MambaShape:
    """Sizes of a Mamba mixer: I features, states N wide, time steps of rank Q, a kernel of C taps."""

    inner: int
    state_size: int
    rank: int
    kernel: int


def dt_rank(config: Config, name: str, hidden: int) -> int:
    """The rank of Mamba's time steps, which may be "auto"."""
    if config.get(name, "auto") == "auto":
        return -(-hidden // 16)
    return config.int(name, low=1, high=MAX_SIZE)


def expanded(config: Config, name: str, hidden: int) -> int:
    """The features inside a mixer: a multiple of the hidden size."""
    return int(config.float(name, low=1 / 64, high=64.0, default=2.0) * hidden)


def dt_limits(config: Config, name: str = "time_step_limit") -> tuple[float, float]:
    """The limits of a time step. The upper one is mostly infinite, for which JSON has no number."""
    given = config.get(name)
    if isinstance(given, (list, tuple)):
        infinite = (math.inf, "Infinity", {"__float__": "Infinity"})
        given = [UNLIMITED if value in infinite else value for value in given]
    low, high = Config({name: given}, config.where).floats(name, 2, low=0.0, default=NO_LIMITS)
    return low, math.inf if high >= UNLIMITED else high


# Names of the same kind of layer in configs of different years.
KINDS = {
    "mamba": "mamba",
    "mamba2": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "hybrid": "hybrid",
    "mlp": "mlp",
    "moe": "moe",
}


def layer_kinds(config: Config, names: tuple[str, ...], layers: int | None) -> tuple[str, ...] | None:
    """The kind of each layer, a value of `KINDS`, from whichever of the fields `names` is given; None if none is."""
    name = next((name for name in names if config.given(name)), None)
    return None if name is None else tuple(KINDS[kind] for kind in config.strs(name, layers, allowed=tuple(KINDS)))


def only_silu(config: Config, name: str = "hidden_act") -> None:
    """The convolutions and gates of these models know one activation."""
    config.str(name, ("silu", "swish"), default="silu")


def attention_free(config: Config) -> Dims:
    """The sizes of a model of state space blocks alone."""
    return Dims(
        config.int("hidden_size", low=1, high=MAX_SIZE),
        config.int("num_hidden_layers", low=1, high=4096),
        heads=0,
        kv_heads=0,
        head_dim=0,
        vocab=config.int("vocab_size", low=1, high=2**24),
        eps=config.float("layer_norm_epsilon", low=0.0, high=1.0, default=1e-5),
    )


def mamba2(
    w: WeightLoader, prefix: str, sizes: Mamba2Shape, hidden: int, *, norm: GatedNorm | None = None
) -> Mamba2:  # fmt: skip
    """A Mamba-2 mixer whose parameters are `in_proj`, `conv1d`, `A_log`, ... under `prefix`, with or without biases.

    `norm`: its gated norm, see `gated_norm`.
    """
    H, inner, width = sizes.heads, sizes.inner, sizes.width
    return Mamba2(
        w.linear(f"{prefix}.in_proj.weight", shape=(inner + width + H, hidden)),
        w.linear(f"{prefix}.out_proj.weight", shape=(hidden, inner)),
        convolution(w, f"{prefix}.conv1d.weight", width, sizes.kernel),
        biases(w, f"{prefix}.conv1d.bias", wanted=_conv_biased(w.config)),
        -w.tensor(f"{prefix}.A_log", (H,)).exp(),
        w.tensor(f"{prefix}.D", (H,)),
        w.tensor(f"{prefix}.dt_bias", (H,)),
        sizes.groups,
        sizes.state_size,
        sizes.head_dim,
        norm,
        sizes.dt_limits,
        w.tensor(f"{prefix}.in_proj.bias", (inner + width + H,), optional=True),
        w.tensor(f"{prefix}.out_proj.bias", (hidden,), optional=True),
    )


def mamba(w: WeightLoader, prefix: str, sizes: MambaShape, hidden: int, norms: tuple[Norm, ...] = ()) -> Mamba:
    """A Mamba mixer whose parameters are `in_proj`, `conv1d`, `x_proj`, ... under `prefix`; `norms`: of dt, B and C."""
    inner, size = sizes.inner, sizes.state_size
    dt_norm, b_norm, c_norm = norms or (None, None, None)
    return Mamba(
        w.linear(f"{prefix}.in_proj.weight", shape=(2 * inner, hidden)),
        w.linear(f"{prefix}.x_proj.weight", shape=(sizes.rank + 2 * size, inner)),
        w.linear(f"{prefix}.dt_proj.weight", shape=(inner, sizes.rank)),
        w.linear(f"{prefix}.out_proj.weight", shape=(hidden, inner)),
        convolution(w, f"{prefix}.conv1d.weight", inner, sizes.kernel),
        biases(w, f"{prefix}.conv1d.bias", wanted=_conv_biased(w.config)),
        w.tensor(f"{prefix}.dt_proj.bias", (inner,)),
        -w.tensor(f"{prefix}.A_log", (inner, size)).exp(),
        w.tensor(f"{prefix}.D", (inner,)),
        dt_norm,
        b_norm,
        c_norm,
        w.tensor(f"{prefix}.in_proj.bias", (2 * inner,), optional=True),
        w.tensor(f"{prefix}.out_proj.bias", (hidden,), optional=True),
    )


def _conv_biased(config: Config) -> bool:
    return config.bool("use_conv_bias", default=config.bool("mamba_conv_bias", default=False))


def gated_norm(w: WeightLoader, name: str, sizes: Mamba2Shape, *, gate_last: bool = False) -> GatedNorm:
    """The norm between a Mamba-2's state space and its output projection, over each group alone."""
    return GatedNorm(Norm(w.tensor(name, (sizes.inner,)), sizes.eps), sizes.groups, gate_last)


def convolution(w: WeightLoader, name: str, width: int, kernel: int) -> Tensor:
    """The taps `[width, kernel]` of a depthwise convolution, which `nn.Conv1d` keeps as `[width, 1, kernel]`."""
    return w.tensor(name, (width, 1, kernel)).squeeze(1)
