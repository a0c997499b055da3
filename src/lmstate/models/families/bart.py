"""BART (1910.13461), mBART, Pegasus (1912.08777), Marian and M2M-100 (2010.11125) with NLLB: fairseq's translators.

x = embed(source) + positions               # learned; sinusoids in Pegasus, Marian and M2M-100
x = norm(x)                                 # BART and mBART
x = norm(x + attention(x))                  # of all tokens; x + attention(norm(x)) in mBART, Pegasus and M2M-100
x = norm(x + fc2(act(fc1(x))))
encoded = norm(x)                           # where norms come first

y = embed(tokens) + positions, as above
y = norm(y + attention(y))                  # causal
y = norm(y + cross(y, encoded))
y = norm(y + fc2(act(fc1(y))))
logits = head(y) + bias
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.block import Block
from lmstate.models.encoder import Encoder
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.cross_attention import BidirectionalAttention
from lmstate.models.layers.embedding import LearnedPositions, NormedStream
from lmstate.models.layers.identity import Identity
from lmstate.models.layers.mlp import MLP
from lmstate.models.model import Model
from lmstate.ops import FloatWeight, Norm

SIZES = {
    "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
    "encoder_attention_heads": 16, "decoder_attention_heads": 16, "max_position_embeddings": 1024,
    "activation_function": "gelu", "scale_embedding": False,
}  # fmt: skip
DEFAULTS: b.Defaults = {
    "bart": {**SIZES, "vocab_size": 50_265, "decoder_start_token_id": 2},
    "m2m_100": {
        **SIZES, "vocab_size": 128_112, "decoder_start_token_id": 2, "activation_function": "relu",
        "scale_embedding": True, "pad_token_id": 1,
    },
    "marian": {**SIZES, "vocab_size": 58_101, "decoder_start_token_id": 58_100},
    "mbart": {**SIZES, "vocab_size": 50_265, "pad_token_id": 1},
    "pegasus": {**SIZES, "vocab_size": 50_265, "decoder_start_token_id": 0},
}  # fmt: skip
USUAL = {
    "d_model": "hidden_size",
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "activation_function": "hidden_act",
}
NORMS_FIRST = ("m2m_100", "mbart", "pegasus")
LEARNED = ("bart", "mbart")  # positions, and a norm of the embedding
EPS = 1e-5
OFFSET = 2  # rows of a table of learned positions before the first one
MAX_TABLE = 2**16  # positions in a table


@dataclass(frozen=True)
class Stack:
    """The names and sizes of an encoder or a decoder."""

    w: WeightLoader
    prefix: str
    shape: b.Dims
    inner: int
    act: str
    norms_first: bool
    unbiased: str | None = None  # the one projection of attention that has no bias

    @staticmethod
    def of(w: WeightLoader, name: str, shape: b.Dims, norms_first: bool, unbiased: str | None = None) -> Stack:
        """The one named "encoder" or "decoder", in a model whose other sizes are `shape`."""
        config = w.config
        heads = config.int(f"{name}_attention_heads", low=1, high=b.MAX_SIZE)
        if shape.hidden % heads:
            raise ModelError(f"{config.where}: {heads} heads cannot share a width of {shape.hidden} evenly")
        layers = config.int(f"{name}_layers", low=1, high=4096)
        own = replace(shape, heads=heads, kv_heads=heads, head_dim=shape.hidden // heads, layers=layers)
        inner = config.int(f"{name}_ffn_dim", low=1, high=b.MAX_SIZE)
        return Stack(w, f"model.{name}", own, inner, b.activation(config), norms_first, unbiased)

    def norm(self, name: str) -> Norm:
        return b.layer_norms(self.w, self.shape)(f"{self.prefix}.{name}")

    def attention(self, layer: int) -> Attention:
        name = f"{self.prefix}.layers.{layer}.self_attn"
        return b.attention(self.w, name, self.shape, None, out="out_proj", biased=True, unbiased=self.unbiased)

    def feed_forward(self, layer: int) -> MLP:
        name = f"{self.prefix}.layers.{layer}"
        return b.ungated_mlp(self.w, name, self.shape.hidden, self.inner, self.act, ("fc1", "fc2"), biased=True)

    def block(self, mixer: Mixer, mlp: MLP | None, norm: str, last: bool = False) -> Block:
        """A block of one part; its norm comes before or after it. `last`: the stack's own norm is the one after it."""
        own = self.norm(f"layers.{norm}")
        if not self.norms_first:
            return Block(mixer, mlp, output_hook=None if last else NormedStream(own))
        return Block(mixer, mlp, own if mlp is None else None, None if mlp is None else own)

    def encoder_blocks(self) -> list[Block]:
        """Of all layers, one for each part."""
        blocks = []
        for layer in range(self.shape.layers):
            reading, last = BidirectionalAttention(self.attention(layer)), layer == self.shape.layers - 1
            blocks.append(self.block(reading, None, f"{layer}.self_attn_layer_norm"))
            blocks.append(self.block(Identity(), self.feed_forward(layer), f"{layer}.final_layer_norm", last))
        return blocks

    def decoder_block(self, index: int) -> Block:
        """A part of a layer, each of which has three."""
        layer, part = divmod(index, 3)
        if part == 0:
            return self.block(self.attention(layer), None, f"{layer}.self_attn_layer_norm")
        if part == 1:
            name = f"{self.prefix}.layers.{layer}.encoder_attn"
            crossing = b.cross_attention(self.w, name, self.shape, biased=True, unbiased_keys=self.unbiased is not None)
            return self.block(crossing, None, f"{layer}.encoder_attn_layer_norm")
        last = layer == self.shape.layers - 1
        return self.block(Identity(), self.feed_forward(layer), f"{layer}.final_layer_norm", last)

    def final_norm(self) -> Norm:
        """The norm after the last block."""
        return self.norm("layer_norm" if self.norms_first else f"layers.{self.shape.layers - 1}.final_layer_norm")

    def positions(self) -> LearnedPositions:
        config, family = self.w.config, self.w.config.str("model_type")
        count, width = config.int(b.POSITIONS, low=1, high=MAX_TABLE), self.shape.hidden
        name = f"{self.prefix}.embed_positions.weight"
        if family in LEARNED:
            table = self.w.tensor(name, (count + OFFSET, width))[OFFSET:]
            return LearnedPositions(FloatWeight(table), self.norm("layernorm_embedding"))
        if self.w.has(name):  # the sinusoids of Marian and Pegasus
            return LearnedPositions(FloatWeight(self.w.tensor(name, (count, width))))
        return LearnedPositions(FloatWeight(self._sinusoids(count).to(self.w.device)))

    def _sinusoids(self, count: int) -> Tensor:
        config, width = self.w.config, self.shape.hidden
        if config.str("model_type") != "m2m_100":
            return b.sinusoids(count, width)
        padding = config.int("pad_token_id", high=MAX_TABLE)
        return b.fairseq_sinusoids(count + padding + 1, width, padding)[padding + 1 :]


def build(w: WeightLoader) -> Model:
    w.config = config = b.with_usual_names(w.config, USUAL)
    family, shape = config.str("model_type"), b.Dims.of(config)
    shape = replace(shape, eps=EPS)
    _check(config, shape)
    shared = b.first_present(w, "model.shared.weight", "model.encoder.embed_tokens.weight")
    first = family in NORMS_FIRST
    reading, writing = (Stack.of(w, name, shape, first) for name in ("encoder", "decoder"))
    scale = shape.hidden**0.5 if config.bool("scale_embedding") else 1.0
    encoder = Encoder(
        w.linear(shared, shape=(shape.vocab, shape.hidden)),
        reading.encoder_blocks(),
        reading.final_norm(),
        b.start_id(config, shape.vocab),
        reading.positions(),
        scale,
    )
    bias = w.tensor("final_logits_bias", (1, shape.vocab), optional=True)
    model = b.decoder(
        w,
        replace(writing.shape, layers=3 * writing.shape.layers),
        writing.decoder_block,
        embed=shared.removesuffix(".weight"),
        embed_scale=scale,
        entry=writing.positions(),
        final_norm=writing.final_norm(),
        encoder=encoder,
        ignore=("model.*coder.embed_tokens.weight", *(("*.embed_positions.weights",) if family == "m2m_100" else ())),
    )
    if bias is None or not bias.any():
        return model
    return replace(model, network=replace(model.network, head_bias=bias[0]))


def _check(config: Config, shape: b.Dims) -> None:
    shared = config.bool("share_encoder_decoder_embeddings", default=True)
    if not shared or config.int("decoder_vocab_size", default=shape.vocab) != shape.vocab:
        raise ModelError(f"{config.where} has a vocabulary of its own for the source, which lmstate cannot do")
