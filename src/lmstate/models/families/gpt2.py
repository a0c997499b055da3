"""GPT-2 (Radford et al. 2019): positions that were learned, layer norms, biases, and no gate.

x = embed(tokens) + positions
x = x + attention(norm(x))
x = x + down(gelu(up(norm(x))))
logits = head(norm(x))
"""

from __future__ import annotations

from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.embedding import LearnedPositions
from lmstate.models.layers.mlp import MLP
from lmstate.models.model import Model
from lmstate.ops import FloatWeight, Weight

DEFAULTS: b.Defaults = {
    "gpt2": {"layer_norm_epsilon": 1e-5, "n_positions": 1024, "scale_attn_weights": True, "tie_word_embeddings": True}
}


def build(w: WeightLoader) -> Model:
    w.config = b.with_usual_names(w.config, b.GPT2_NAMES)
    config, shape = w.config, b.Dims.of(w.config, eps="layer_norm_epsilon")
    if shape.heads * shape.head_dim != shape.hidden:
        raise ModelError(f"{config.where}: {shape.heads} heads cannot share a width of {shape.hidden} evenly")
    if config.bool("add_cross_attention", default=False):
        raise ModelError(f"{config.where} asks for attention to another text, which lmstate cannot do")
    inner = config.int("n_inner", low=1, high=b.MAX_SIZE, default=4 * shape.hidden)
    act = b.activation(config, "activation_function", "gelu_new")
    scale = shape.head_dim**-0.5 if config.bool("scale_attn_weights", default=True) else 1.0
    by_layer = config.bool("scale_attn_by_inverse_layer_idx", default=False)

    def matrix(name: str, outputs: int, inputs: int) -> tuple[Weight, Tensor]:
        """A matrix, which is stored [K, N] but in a GGUF, and its bias."""
        if not config.bool("conv1d", default=True):
            return w.linear(f"{name}.weight", shape=(outputs, inputs)), w.tensor(f"{name}.bias", (outputs,))
        return w.transposed(f"{name}.weight", (outputs, inputs)), w.tensor(f"{name}.bias", (outputs,))

    def mixer(index: int, name: str) -> Attention:
        qkv, qkv_bias = matrix(f"{name}.c_attn", 3 * shape.hidden, shape.hidden)
        out, out_bias = matrix(f"{name}.c_proj", shape.hidden, shape.hidden)
        return Attention(
            qkv, out, shape.heads, shape.heads, shape.head_dim, scale / (index + 1) if by_layer else scale,
            qkv_bias=qkv_bias, out_bias=out_bias,
        )  # fmt: skip

    def feed_forward(_: int, name: str) -> MLP:
        up, up_bias = matrix(f"{name}.c_fc", inner, shape.hidden)
        down, down_bias = matrix(f"{name}.c_proj", shape.hidden, inner)
        return MLP(up, down, act, gated=False, up_bias=up_bias, down_bias=down_bias)

    normed = b.layer_norms(w, shape)
    table = w.tensor("transformer.wpe.weight", (config.int(b.POSITIONS, low=1), shape.hidden))
    block = b.pre_norm(normed, mixer, feed_forward, ("ln_1", "attn", "ln_2", "mlp"), layers="transformer.h")
    return b.decoder(
        w,
        shape,
        block,
        embed="transformer.wte",
        entry=LearnedPositions(FloatWeight(table)),
        final_norm=normed("transformer.ln_f"),
        ignore=("transformer.h.*.attn.bias",),  # the mask, which old checkpoints hold
    )
