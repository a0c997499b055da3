"""Sizes and windows that a config gives, and which tensors a checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError

POSITIONS = "max_position_embeddings"


MAX_SIZE = 2**20  # of heads, layers, experts, widths: more is a damaged file


@dataclass(frozen=True)
class Dims:
    """The sizes that nearly every config names alike."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float

    def __post_init__(self) -> None:
        if self.kv_heads and self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly")

    @classmethod
    def of(cls, config: Config, *, eps: str = "rms_norm_eps") -> Dims:
        """`eps`: the name under which the config has the number that norms add."""
        hidden = config.int("hidden_size", low=1, high=MAX_SIZE)
        heads = config.int("num_attention_heads", low=1, high=MAX_SIZE)
        return cls(
            hidden,
            config.int("num_hidden_layers", low=1, high=4096),
            heads,
            config.int("num_key_value_heads", low=1, high=MAX_SIZE, default=heads),
            config.int("head_dim", low=1, high=MAX_SIZE, default=0) or max(1, hidden // heads),
            config.int("vocab_size", low=1, high=2**24),
            config.float(eps, low=0.0, high=1.0, default=1e-6),
        )


def first_present(w: WeightLoader, *names: str) -> str:
    """The first of the names that the checkpoint has; the first of all if it has none of them."""
    return next((name for name in names if w.has(name)), names[0])


def config_window(config: Config, switch: bool) -> int | None:
    """The sliding window of a config; `switch`: of a family where `use_sliding_window` may turn it off."""
    if switch and not config.bool("use_sliding_window", default=True):
        return None
    return config.int("sliding_window", low=1, default=None)


def layer_windows(
    config: Config, layers: int, *, full_every: int | None = None, switch: bool = True
) -> list[int | None]:  # fmt: skip
    """Each layer's sliding window, from `layer_types` where the config has them and uses them.

    `full_every`: without it, one layer in `full_every` sees everything (a config may say another number). `switch`:
    `use_sliding_window` may turn all of them off.
    """
    size = config_window(config, switch)
    if size is None:
        return [None] * layers
    kinds = config.strs("layer_types", layers, allowed=("sliding_attention", "full_attention"), default=None)
    if kinds is not None:
        return [size if kind == "sliding_attention" else None for kind in kinds]
    if full_every is not None:
        every = config.int("sliding_window_pattern", low=1, default=full_every)
        return [size if (index + 1) % every else None for index in range(layers)]
    first = config.int("max_window_layers", default=0)
    return [size if index >= first else None for index in range(layers)]


def head_window(config: Config, *, slides: bool) -> int | None:
    """The sliding window of a prediction head's attention; `slides`: whether it has one where the config is silent."""
    kinds = config.strs("mtp_layer_types", allowed=("sliding_attention", "full_attention"), default=())
    slides = kinds[0] == "sliding_attention" if kinds else slides
    return config.int("sliding_window", low=1) if slides else None


def mtp_tensors(config: Config, shape: Dims) -> tuple[str, ...]:
    """Patterns of the tensors of layers past the last one: heads for multi-token prediction."""
    drafts = config.int("num_nextn_predict_layers", high=64, default=0)
    return tuple(f"{start}.{shape.layers + extra}.*" for start in ("model.layers", "blk") for extra in range(drafts))
