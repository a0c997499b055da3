"""Dense feed-forward layers under their usual Hugging Face names."""

from __future__ import annotations

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.attention import biases
from lmstate.models.layers.mlp import MLP

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


UP_DOWN = ("up_proj", "down_proj")


def activation(config: Config, name: str = "hidden_act", default: str = "silu") -> str:
    """The name that `ops` gives to a config's activation."""
    return ACTIVATIONS[config.str(name, allowed=tuple(ACTIVATIONS), default=default)]


def mlp(
    w: WeightLoader,
    prefix: str,
    hidden: int,
    inner: int,
    act: str,
    names: tuple[str, str, str] = GATE_UP_DOWN,
    biased: bool | None = None,
) -> MLP:
    """A gated feed-forward block: `gate_proj`, `up_proj`, `down_proj` under `prefix`, with or without biases.

    `biased`: whether biases must be there; None: where `mlp_bias` says so.
    """
    gate, up, down = (f"{prefix}.{name}" for name in names)
    biased = w.config.bool("mlp_bias", default=False) if biased is None else biased
    return MLP(
        w.linear(f"{gate}.weight", f"{up}.weight", shape=((inner, inner), hidden)),
        w.linear(f"{down}.weight", shape=(hidden, inner)),
        act,
        up_bias=biases(w, f"{gate}.bias", f"{up}.bias", wanted=biased),
        down_bias=biases(w, f"{down}.bias", wanted=biased),
    )


def fused_mlp(w: WeightLoader, prefix: str, hidden: int, inner: int, act: str, inside: str = "") -> MLP:
    """A gated feed-forward block whose gate and up are one matrix: `gate_up_proj`, `down_proj`.

    `inside`: what follows these names, where another module wraps them.
    """
    return MLP(
        w.linear(f"{prefix}.gate_up_proj{inside}.weight", shape=(2 * inner, hidden)),
        w.linear(f"{prefix}.down_proj{inside}.weight", shape=(hidden, inner)),
        act,
    )


def ungated_mlp(
    w: WeightLoader,
    prefix: str,
    hidden: int,
    inner: int,
    act: str,
    names: tuple[str, str] = UP_DOWN,
    biased: bool | None = None,
) -> MLP:
    """A feed-forward block without a gate: `up_proj`, `down_proj` under `prefix`, with or without biases, as `mlp`."""
    up, down = (f"{prefix}.{name}" for name in names)
    biased = w.config.bool("mlp_bias", default=False) if biased is None else biased
    return MLP(
        w.linear(f"{up}.weight", shape=(inner, hidden)),
        w.linear(f"{down}.weight", shape=(hidden, inner)),
        act,
        gated=False,
        up_bias=biases(w, f"{up}.bias", wanted=biased),
        down_bias=biases(w, f"{down}.bias", wanted=biased),
    )
