"""MiMo-V2-Flash (Xiaomi): a narrow window with sinks on most layers, values narrower than keys, and experts.

x = embed(tokens)
x = x + attention(norm(x))                      # a sink a head where there is a window
x = x + sum over chosen e: g_e * expert_e(y)    # y = norm(x); the first layers: an MLP
logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import Rope, make_rope, rope_fields
from lmstate.models.model import Block, Model
from lmstate.ops import Residual
from lmstate.state import KeyValueState, LayerState, Step

DEFAULTS: b.Defaults = {
    "mimo_v2_flash": {
        **b.EPS,
        "head_dim": 192,
        "v_head_dim": 128,
        "sliding_window": 129,
        "first_k_dense_replace": 1,
        "attention_value_scale": 0.707,
    }
}

F, S = "full_attention", "sliding_attention"


@dataclass(frozen=True, eq=False)
class NarrowValues(Attention):
    """Attention whose values have `value_dim` features, fewer than the keys, and are multiplied by `value_scale`.

    They are stored as wide as keys, with zeros after them.
    """

    value_dim: int = 0
    value_scale: float = 1.0

    def sublayers(self, norm: ops.Norm | None, post_norm: ops.Norm | None, scale: float) -> tuple[ops.Sublayer, ...]:
        return ()

    def mix(self, qkv: Tensor, step: Step, cache: LayerState, residual: Residual | None = None) -> Tensor:
        """Attention after the projections, `[R, T, (H + K) * D + K * Dv]` -> `[R, T, E]`."""
        assert isinstance(cache, KeyValueState)
        widths = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.value_dim
        q, k, v = qkv.split(widths, dim=-1)
        q, k = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k))  # [R, T, H, D], [R, T, K, D]
        v = v.unflatten(-1, (-1, self.value_dim)) * self.value_scale
        v = pad(v, (0, self.head_dim - self.value_dim))  # [R, T, K, D]
        params = ops.AttentionParams(self.scale, self.softcap, self.sinks)
        seen = cache.attend(q, (k, v), step, params, self.rotation(step))  # [R, T, H, D]
        return ops.linear(seen[..., : self.value_dim].flatten(-2), self.out, self.out_bias, residual=residual)


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    kinds = _kinds(config, shape.layers)
    # Published configs count the tokens before a token, not the token itself.
    before = config.int("sliding_window_size", low=0, default=None)
    window = config.int("sliding_window", low=1) if before is None else before + 1
    ropes = {kind: _rope(config, shape.head_dim, kind).to(w.device) for kind in (F, S)}
    near_kv_heads = config.int("swa_num_key_value_heads", low=1, high=b.MAX_SIZE, default=2 * shape.kv_heads)

    def mixer(index: int, prefix: str) -> Attention:
        if index < shape.layers and kinds[index] == F:
            return narrow_attention(w, prefix, shape, ropes[F])
        near = narrow_attention(w, prefix, replace(shape, kv_heads=near_kv_heads), ropes[S])
        sinks = b.first_present(w, f"{prefix}.attention_sink_bias", f"{prefix}.sinks")
        sinkless = index >= shape.layers and not w.has(sinks)
        return replace(near, window=window, sinks=None if sinkless else w.tensor(sinks, (shape.heads,)))

    norms, feed_forward = b.rms_norms(w, shape), b.deepseek_feed_forward(w, shape)

    def head_block(layer: str) -> Block:
        second = b.first_present(w, f"{layer}.pre_mlp_layernorm.weight", f"{layer}.post_attention_layernorm.weight")
        names = ("input_layernorm", "self_attn", second.removesuffix(".weight").rpartition(".")[2], "mlp")
        return b.pre_norm(norms, mixer, feed_forward, names)(shape.layers, layer)

    heads = b.prediction_heads(w, shape, norms, _head_names(w), head_block)
    ignore = b.mtp_tensors(config, shape)
    return b.decoder(w, shape, b.pre_norm(norms, mixer, feed_forward), heads=heads, ignore=ignore)


def _head_names(w: WeightLoader) -> Iterator[b.HeadNames]:
    """Several heads, each with a window on its attention and a dense part."""
    for layer in (f"model.mtp.layers.{index}" for index in range(b.MOST_HEADS)):
        if not w.has(f"{layer}.eh_proj.weight"):
            return
        yield b.HeadNames(layer, *(f"{layer}.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")))


def narrow_attention(w: WeightLoader, prefix: str, shape: b.Dims, rope: Rope) -> NarrowValues:
    config = w.config
    value_dim = config.int("v_head_dim", low=1, high=shape.head_dim)
    widths = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * value_dim
    names = [f"{prefix}.{part}_proj" for part in ("qkv" if w.has(f"{prefix}.q_proj.weight") else ["qkv"])]
    height = widths if len(names) > 1 else sum(widths)
    return NarrowValues(
        w.linear(*(f"{name}.weight" for name in names), shape=(height, shape.hidden)),
        w.linear(f"{prefix}.o_proj.weight", shape=(shape.hidden, shape.heads * value_dim)),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim**-0.5,
        rope,
        qkv_bias=b.biases(w, *(f"{name}.bias" for name in names), wanted=config.bool("attention_bias", default=False)),
        value_dim=value_dim,
        value_scale=config.float("attention_value_scale", default=1.0),
    )


def _kinds(config: Config, layers: int) -> Sequence[str]:
    """Each layer's kind; published configs give numbers, 1 where there is a window."""
    numbers = config.ints("hybrid_layer_pattern", layers, high=1, default=None)
    default = [F if index == 0 or (index + 1) % 6 == 0 else S for index in range(layers)]
    default = default if numbers is None else [(F, S)[number] for number in numbers]
    return config.strs("layer_types", layers, allowed=(F, S), default=default)


def _rope(config: Config, head_dim: int, kind: str) -> Rope:
    """Published configs give the rate of windowed layers beside that of the others.

    Where nothing says which part of a head rotates, that is a third, and all of it if the rope is stretched.
    """
    name, theta = ("rope_theta", 5e6) if kind == F else ("swa_rope_theta", 1e4)
    beside = Config({**config, "rope_theta": config.float(name, low=1.0, high=1e12, default=theta)}, config.where)
    plain = rope_fields(beside, kind).str("rope_type") == "default"
    return make_rope(beside, head_dim, kind=kind, fraction=0.334 if plain else 1.0)
