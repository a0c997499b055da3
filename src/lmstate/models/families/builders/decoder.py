"""What families share: the parts of a block under their usual Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.embedding import EmbeddingHook, OutputHook
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.rope import Rope
from lmstate.models.model import Block, Model, ModelConfig
from lmstate.ops import Norm

POSITIONS = "max_position_embeddings"
MOST = 2**20  # of heads, layers, experts, widths: more is a damaged file

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
W1_W3_W2 = ("w1", "w3", "w2")  # the same three matrices

NormBuilder: TypeAlias = Callable[[str], Norm]
"""The norm of that name, without its `.weight`."""


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
        hidden = config.int("hidden_size", low=1, high=MOST)
        heads = config.int("num_attention_heads", low=1, high=MOST)
        return cls(
            hidden,
            config.int("num_hidden_layers", low=1, high=4096),
            heads,
            config.int("num_key_value_heads", low=1, high=MOST, default=heads),
            config.int("head_dim", low=1, high=MOST, default=0) or max(1, hidden // heads),
            config.int("vocab_size", low=1, high=2**24),
            config.float(eps, low=0.0, high=1.0, default=1e-6),
        )


def activation(config: Config, name: str = "hidden_act", default: str = "silu") -> str:
    """The name that `ops` gives to a config's activation."""
    return ACTIVATIONS[config.str(name, allowed=tuple(ACTIVATIONS), default=default)]


def norm(w: WeightLoader, name: str, width: int, eps: float, *, plus_one: bool = False) -> Norm:
    """An RMS norm's weight; `plus_one` where the checkpoint stores w - 1."""
    weight = w.tensor(name, (width,))
    return Norm(weight + 1.0 if plus_one else weight, eps)


def rms_norms(w: WeightLoader, shape: Dims, *, plus_one: bool = False) -> NormBuilder:
    """RMS norms of the residual stream."""
    return lambda name: norm(w, f"{name}.weight", shape.hidden, shape.eps, plus_one=plus_one)


def layer_norms(w: WeightLoader, shape: Dims, *, biased: bool = True, plus_one: bool = False) -> NormBuilder:
    """Layer norms of the residual stream."""

    def layer_norm(name: str) -> Norm:
        weight = w.tensor(f"{name}.weight", (shape.hidden,))
        bias = w.tensor(f"{name}.bias", (shape.hidden,)) if biased else None
        return Norm(weight + 1.0 if plus_one else weight, shape.eps, "layer", bias)

    return layer_norm


def plain_norm(w: WeightLoader, width: int, eps: float, kind: Literal["rms", "layer"] = "rms") -> Norm:
    """A norm without weights."""
    return Norm(torch.ones(width, dtype=torch.float32, device=w.device), eps, kind)


def norm_after_rope(w: WeightLoader, shape: Dims, rope: Rope) -> tuple[Norm, Rope]:
    """A norm of each head without weights that comes after its rotation: one that may come before, and that rotation.

    A rotation keeps lengths. A factor on all features the norm would take away again, but for its share in epsilon.
    """
    return plain_norm(w, shape.head_dim, shape.eps / rope.scale**2), replace(rope, scale=1.0)


def attention(
    w: WeightLoader,
    prefix: str,
    shape: Dims,
    rope: Rope | None,
    *,
    window: int | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    v_norm: Norm | None = None,
    gate: bool = False,
    reads: int | None = None,
    value: str = "v_proj",
    gates: tuple[str, int] | None = None,
    out: str = "o_proj",
    biased: bool | None = None,
    out_biased: bool | None = None,
) -> Attention:
    """Attention whose projections are `q_proj`, `k_proj`, `v_proj`, `o_proj` under `prefix`, with or without biases.

    `gate`: `q_proj` gives each query head's gate too. `gates`: a projection that gives them, without a bias: its name
    and how many. `reads`: the layer whose keys and values this one attends to; it has none of its own. `value`,
    `out`: other names for `v_proj` and `o_proj`. `biased`: whether biases must be there; None: where `attention_bias`
    says so. `out_biased`: the same of `o_proj`; None: as of the others.
    """
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    queries = width * (2 if gate else 1)
    parts, widths = ["q_proj"], [queries]
    if reads is None:
        parts, widths = [*parts, "k_proj", value], [queries, kv_width, kv_width]
    biased = w.config.bool("attention_bias", default=False) if biased is None else biased
    bias = biases(w, *(f"{prefix}.{part}.bias" for part in parts), wanted=biased)
    if gates is not None:
        parts, widths = [*parts, gates[0]], [*widths, gates[1]]
        bias = None if bias is None else torch.cat([bias, bias.new_zeros(gates[1])])
    return Attention(
        w.linear(*(f"{prefix}.{part}.weight" for part in parts), shape=(widths, shape.hidden)),
        w.linear(f"{prefix}.{out}.weight", shape=(shape.hidden, width)),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim**-0.5 if scale is None else scale,
        rope,
        window,
        softcap=softcap,
        q_norm=q_norm,
        k_norm=k_norm,
        qkv_bias=bias,
        out_bias=biases(w, f"{prefix}.{out}.bias", wanted=biased if out_biased is None else out_biased),
        gate=gate,
        v_norm=v_norm,
        reads=reads,
        gates=0 if gates is None else gates[1],
    )


def fused_attention(
    w: WeightLoader,
    shape: Dims,
    rope: Rope,
    fused: str,
    out: str,
    *,
    window: int | None = None,
    grouped: bool = False,
    biased: bool = False,
) -> Attention:
    """Attention whose projections are one matrix: all queries, all keys, all values.

    `fused` and `out` are the names of that matrix and of the projection after attention. `grouped`: stored is for each
    key/value head its queries, then its key, then its value.
    """
    height = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

    def order() -> Tensor:
        """Which stored row comes first, and so on, int64 `[(H + 2 * K) * D]`."""
        rows = torch.arange(height).view(shape.kv_heads, -1, shape.head_dim)  # [K, H / K + 2, D]
        return torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])

    qkv = w.linear(f"{fused}.weight", shape=(height, shape.hidden), order=order if grouped else None)
    bias = w.tensor(f"{fused}.bias", (height,)) if biased else None
    return Attention(
        qkv,
        w.linear(f"{out}.weight", shape=(shape.hidden, shape.heads * shape.head_dim)),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim**-0.5,
        rope,
        window,
        qkv_bias=bias[order().to(bias.device)] if bias is not None and grouped else bias,
        out_bias=w.tensor(f"{out}.bias", (shape.hidden,)) if biased else None,
    )


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


def fused_mlp(w: WeightLoader, prefix: str, hidden: int, inner: int, act: str) -> MLP:
    """A gated feed-forward block whose gate and up are one matrix: `gate_up_proj`, `down_proj`."""
    return MLP(
        w.linear(f"{prefix}.gate_up_proj.weight", shape=(2 * inner, hidden)),
        w.linear(f"{prefix}.down_proj.weight", shape=(hidden, inner)),
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


def pre_norm(
    normed: NormBuilder,
    mixer: Callable[[int, str], Mixer],
    feed_forward: Callable[[int, str], FeedForward],
    names: tuple[str, str, str, str] = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    *,
    layers: str = "model.layers",
    scale: float = 1.0,
) -> Callable[[int], Block]:
    """Blocks of two parts with a norm before each; a part is made of its layer's number and its tensors' prefix.

    `names`: of the norms and the parts in a layer. `scale`: of what each part adds to the stream.
    """

    def block(index: int) -> Block:
        first, mixing, second, feeding = (f"{layers}.{index}.{name}" for name in names)
        return Block(mixer(index, mixing), feed_forward(index, feeding), normed(first), normed(second), scale=scale)

    return block


def biases(w: WeightLoader, *names: str, wanted: bool = False) -> Tensor | None:
    """The biases of stacked projections in one vector, as long as those are high; None if the checkpoint has none.

    `wanted`: it is an error if there are none.
    """

    found = [
        w.tensor(name, w.shape(f"{name.removesuffix('bias')}weight")[:1]) for name in names if w.has(name)
    ]  # fmt: skip
    if len(found) < len(names) and (found or wanted):
        raise ModelError(f"{w.source.path} lacks some of {', '.join(names)}; the checkpoint is incomplete")
    return torch.cat(found) if found else None


def there(w: WeightLoader, *names: str) -> str:
    """The first of the names that the checkpoint has; the first of all if it has none of them."""
    return next((name for name in names if w.has(name)), names[0])


def decoder(
    w: WeightLoader,
    shape: Dims,
    block: Callable[[int], Block],
    *,
    prefix: str = "model",
    embed: str | None = None,
    head_biased: bool = False,
    final_norm: Norm | None = None,
    embed_scale: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    entry: EmbeddingHook | None = None,
    exit: OutputHook | None = None,
    ignore: tuple[str, ...] = (),
) -> Model:
    """A stack of `shape.layers` blocks between `embed_tokens` and `lm_head` (the embedding itself where they are tied).

    A checkpoint that holds a head of its own is not tied, whatever its config says. `embed`: the embedding's name where
    it is another. `head_biased`: the head has a bias. `ignore`: patterns of
    tensors that the checkpoint holds and this model needs not (rotary tables, say).
    """
    config = w.config
    embedded = f"{embed or prefix + '.embed_tokens'}.weight"
    embedding = w.linear(embedded, shape=(shape.vocab, shape.hidden))
    tied = not w.has("lm_head.weight") or (
        config.bool("tie_word_embeddings", default=False) and w.same("lm_head.weight", embedded)
    )
    blocks = [block(index) for index in range(shape.layers)]
    model = Model(
        ModelConfig(
            config.str("model_type"),
            shape.vocab,
            shape.hidden,
            config.int(POSITIONS, low=1, default=None),
            embed_scale,
            logit_scale,
            logit_softcap,
        ),
        embedding,
        blocks,
        final_norm or norm(w, f"{prefix}.norm.weight", shape.hidden, shape.eps),
        embedding if tied else w.linear("lm_head.weight", shape=(shape.vocab, shape.hidden)),
        w.tensor("lm_head.bias", (shape.vocab,)) if head_biased else None,
        entry=entry,
        exit=exit,
        dtype=w.dtype,
    )
    w.check_all_used([*(["lm_head.weight"] if tied else []), "*.rotary_emb.inv_freq", *ignore])
    return model


def head_norms(
    w: WeightLoader, prefix: str, shape: Dims, names: tuple[str, str] = ("q_norm", "k_norm")
) -> tuple[Norm, Norm]:
    """The norms of each head's queries and keys; `names`: theirs under `prefix`."""
    q_norm, k_norm = (norm(w, f"{prefix}.{name}.weight", shape.head_dim, shape.eps) for name in names)
    return q_norm, k_norm


def whole_norms(w: WeightLoader, prefix: str, shape: Dims) -> tuple[Norm, Norm]:
    """The norms of the whole query projection and the whole key projection."""
    q_norm, k_norm = (
        norm(w, f"{prefix}.{part}_norm.weight", heads * shape.head_dim, shape.eps)
        for part, heads in (("q", shape.heads), ("k", shape.kv_heads))
    )
    return q_norm, k_norm


def config_window(config: Config, switch: bool) -> int | None:
    """The sliding window of a config; `switch`: of a family where `use_sliding_window` may turn it off."""
    if switch and not config.bool("use_sliding_window", default=True):
        return None
    return config.int("sliding_window", low=1, default=None)


def windows(
    config: Config, layers: int, *, full_every: int | None = None, switch: bool = True
) -> list[int | None]:  # fmt: skip
    """Each layer's sliding window, from `layer_types` where the config has them and uses them.

    `full_every`: where it has none, one layer in so many sees everything (a config may say another number). `switch`:
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


def drafting(config: Config, shape: Dims) -> tuple[str, ...]:
    """Patterns of the tensors of layers past the last one: heads for multi-token prediction, which are not run."""
    drafts = config.int("num_nextn_predict_layers", high=64, default=0)
    return tuple(f"{start}.{shape.layers + extra}.*" for start in ("model.layers", "blk") for extra in range(drafts))
