"""T5 (1910.10683) with T5 1.1 and Flan, mT5 (2010.11934) and umT5 (2304.09151), each an encoder and its decoder.

x = embed(source)
x = x + attention(norm(x))                  # of all tokens; q k + bias[distance], not scaled
x = x + wo(act(wi(norm(x))))                # act(wi_0 x) * wi_1 x from T5 1.1 on
encoded = norm(x)

y = embed(tokens)
y = y + attention(norm(y))                  # causal, with a bias of its own
y = y + cross(norm(y), encoded)             # no positions
y = y + wo(act(wi(norm(y))))
logits = head(norm(y) / sqrt(width))        # the division where the embedding is the head
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.block import Block
from lmstate.models.encoder import Encoder
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.cross_attention import BidirectionalAttention
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.relative_bias import RelativeBias
from lmstate.models.model import Model

SIZES = {"num_layers": 8, "num_heads": 6, "d_model": 512, "d_kv": 64, "d_ff": 1024, "vocab_size": 250_112}
DEFAULTS: b.Defaults = {
    "t5": {**SIZES, "num_layers": 6, "num_heads": 8, "d_ff": 2048, "vocab_size": 32_128, "feed_forward_proj": "relu"},
    "mt5": {**SIZES, "feed_forward_proj": "gated-gelu"},
    "umt5": {**SIZES, "feed_forward_proj": "gated-gelu"},
}
USUAL = {"d_model": "hidden_size", "num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"}
NAMES = ("q", "k", "v", "o")
BIAS = "relative_attention_bias.weight"
MAX_BUCKETS, MAX_DISTANCE = 2**12, 2**16


def build(w: WeightLoader) -> Model:
    w.config = config = b.with_usual_names(w.config, {**USUAL, "d_kv": "head_dim"})
    family, shape = config.str("model_type"), b.Dims.of(config, eps="layer_norm_epsilon")
    shape = replace(shape, kv_heads=shape.heads)
    normed = b.rms_norms(w, shape)
    query, key, value, out = NAMES

    def bias(stack: str, layer: int) -> RelativeBias:
        buckets = config.int("relative_attention_num_buckets", low=4, high=MAX_BUCKETS, default=32)
        most = config.int("relative_attention_max_distance", low=2, high=MAX_DISTANCE, default=128)
        if most <= buckets // 2:
            raise ModelError(f"{config.where}: {buckets} buckets of distances do not fit a largest distance of {most}")
        place = layer if family == "umt5" else 0  # the others have that of the first layer in all of them
        name = f"{stack}.block.{place}.layer.0.SelfAttention.{BIAS}"
        return RelativeBias(w.tensor(name, (buckets, shape.heads)), most)

    def attention(stack: str, layer: int) -> Attention:
        name = f"{stack}.block.{layer}.layer.0.SelfAttention"
        return b.attention(
            w, name, shape, None, scale=1.0, query=query, key=key, value=value, out=out, biased=False
        )  # fmt: skip

    def encoder_block(layer: int, shared: RelativeBias) -> Block:
        own = shared if family != "umt5" else bias("encoder", layer)
        name = f"encoder.block.{layer}.layer"
        return Block(
            BidirectionalAttention(attention("encoder", layer), own),
            _feed_forward(w, shape, f"{name}.1.DenseReluDense"),
            normed(f"{name}.0.layer_norm"),
            normed(f"{name}.1.layer_norm"),
        )

    def decoder_block(index: int) -> Block:
        layer, crosses = divmod(index, 2)
        name = f"decoder.block.{layer}.layer"
        if not crosses:
            mixer = replace(attention("decoder", layer), biases=bias("decoder", layer).causal())
            return Block(mixer, None, normed(f"{name}.0.layer_norm"))
        return Block(
            b.cross_attention(w, f"{name}.1.EncDecAttention", shape, names=NAMES, biased=False, scale=1.0),
            _feed_forward(w, shape, f"{name}.2.DenseReluDense"),
            normed(f"{name}.1.layer_norm"),
            normed(f"{name}.2.layer_norm"),
        )

    shared = bias("encoder", 0)
    encoder = Encoder(
        w.linear("shared.weight", shape=(shape.vocab, shape.hidden)),
        [encoder_block(layer, shared) for layer in range(shape.layers)],
        normed("encoder.final_layer_norm"),
        b.start_id(config, shape.vocab),
    )
    layers = config.int("num_decoder_layers", low=1, high=4096, default=shape.layers)
    return b.decoder(
        w,
        replace(shape, layers=2 * layers),
        decoder_block,
        embed="shared",
        logit_scale=shape.hidden**-0.5 if _scales(config) else 1.0,
        final_norm=normed("decoder.final_layer_norm"),
        encoder=encoder,
        ignore=("*coder.embed_tokens.weight", f"decoder.block.0.layer.1.EncDecAttention.{BIAS}"),
    )


def _scales(config: Config) -> bool:
    """Whether the decoder's output is divided by the root of its width."""
    if config.str("model_type") == "mt5":
        return False
    return config.bool("scale_decoder_outputs", default=config.bool("tie_word_embeddings", default=True))


def _feed_forward(w: WeightLoader, shape: b.Dims, name: str) -> MLP:
    kind, inner = w.config.str("feed_forward_proj"), w.config.int("d_ff", low=1, high=b.MAX_SIZE)
    act = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    if act not in b.ACTIVATIONS:
        raise ModelError(f"{w.config.where} has feed_forward_proj={kind!r:.80}, which lmstate does not know")
    if kind.startswith("gated-"):
        return b.mlp(w, name, shape.hidden, inner, b.ACTIVATIONS[act], ("wi_0", "wi_1", "wo"), biased=False)
    up = "wi" if w.has(f"{name}.wi.weight") else "wi_1"  # as files of GGUF name it, gated or not
    return b.ungated_mlp(w, name, shape.hidden, inner, b.ACTIVATIONS[act], (up, "wo"), biased=False)
