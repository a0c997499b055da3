"""T5Gemma (2504.06225): an encoder and a decoder, each made of the layers of Gemma 2.

x = embed(source) * sqrt(E)
x = x + post_norm(attention(norm(x)))           # of all tokens, or of those in a window to both sides
x = x + post_norm(mlp(norm(x)))
encoded = norm(x)

y = embed(tokens) * sqrt(E)
y = y + post_norm(attention(norm(y)))           # causal
y = y + post_norm(cross(norm(y), encoded))      # no positions
y = y + post_norm(mlp(norm(y)))
logits = softcap(head(norm(y)))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.block import Block
from lmstate.models.encoder import Encoder
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.cross_attention import BidirectionalAttention
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.rope import Rope, make_rope
from lmstate.models.model import Model
from lmstate.ops import Norm

STACK = {
    "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
DEFAULTS: b.Defaults = {"t5gemma": {}}


@dataclass(frozen=True)
class GemmaStack:
    """The names and sizes of the encoder or the decoder."""

    w: WeightLoader  # of its own config
    prefix: str
    shape: b.Dims
    rope: Rope
    windows: list[int | None]

    @staticmethod
    def of(w: WeightLoader, name: str, config: Config) -> GemmaStack:
        own = config.fields(name)
        if own is None:
            raise ModelError(f"{config.where} has no fields of the {name}, which a T5Gemma model has")
        w.config = b.completed(own, STACK)
        shape = b.Dims.of(w.config)
        windows = b.layer_windows(w.config, shape.layers, full_every=2)
        return GemmaStack(w, f"model.{name}", shape, make_rope(w.config, shape.head_dim).to(w.device), windows)

    @property
    def config(self) -> Config:
        return self.w.config

    @property
    def scale(self) -> float:
        return self.config.float("query_pre_attn_scalar", low=1e-6) ** -0.5

    @property
    def softcap(self) -> float | None:
        return self.config.float("attn_logit_softcapping", low=1e-6, default=None)

    def norm(self, name: str) -> Norm:
        return b.norm(self.w, f"{self.prefix}.{name}.weight", self.shape.hidden, self.shape.eps, plus_one=True)

    def around(self, layer: int) -> Callable[[str], tuple[Norm, Norm]]:
        """The norms before and after a part of a layer."""
        name = f"layers.{layer}"
        return lambda part: (self.norm(f"{name}.pre_{part}_layernorm"), self.norm(f"{name}.post_{part}_layernorm"))

    def attention(self, layer: int) -> Attention:
        return b.attention(
            self.w, f"{self.prefix}.layers.{layer}.self_attn", self.shape, self.rope, window=self.windows[layer],
            scale=self.scale, softcap=self.softcap,
        )  # fmt: skip

    def mlp(self, layer: int) -> MLP:
        inner = self.config.int("intermediate_size", low=1, high=b.MAX_SIZE)
        act = b.activation(self.config, "hidden_activation", "gelu_pytorch_tanh")
        return b.mlp(self.w, f"{self.prefix}.layers.{layer}.mlp", self.shape.hidden, inner, act)

    def encoder_block(self, layer: int) -> Block:
        (before, after), (before_mlp, after_mlp) = map(self.around(layer), ("self_attn", "feedforward"))
        mixer = BidirectionalAttention(self.attention(layer))
        return Block(mixer, self.mlp(layer), before, before_mlp, after, after_mlp)

    def decoder_block(self, index: int, source_width: int) -> Block:
        """A layer is two blocks: attention to the tokens, then to the source with the feed-forward part."""
        layer, crosses = divmod(index, 2)
        around = self.around(layer)
        if not crosses:
            before, after = around("self_attn")
            return Block(self.attention(layer), None, before, None, after)
        (before, after), (before_mlp, after_mlp) = map(around, ("cross_attn", "feedforward"))
        mixer = b.cross_attention(
            self.w, f"{self.prefix}.layers.{layer}.cross_attn", self.shape,
            names=("q_proj", "k_proj", "v_proj", "o_proj"), biased=self.config.bool("attention_bias", default=False),
            scale=self.scale, softcap=self.softcap, source_width=source_width,
        )  # fmt: skip
        return Block(mixer, self.mlp(layer), before, before_mlp, after, after_mlp)


def build(w: WeightLoader) -> Model:
    whole = w.config
    reading = GemmaStack.of(w, "encoder", whole)
    width, vocab = reading.shape.hidden, reading.shape.vocab
    embed = w.linear("model.encoder.embed_tokens.weight", shape=(vocab, width))
    blocks = [reading.encoder_block(layer) for layer in range(reading.shape.layers)]
    norm = reading.norm("norm")
    writing = GemmaStack.of(w, "decoder", whole)
    if writing.shape.vocab != vocab:
        raise ModelError(
            f"{whole.where} has {vocab} ids of sources and {writing.shape.vocab} of answers, which lmstate cannot do"
        )
    start = whole.int("decoder_start_token_id", high=vocab - 1, default=None)
    start = writing.config.int("bos_token_id", high=vocab - 1) if start is None else start
    tied = whole.bool("tie_word_embeddings", default=True)
    w.config = Config({**w.config, "model_type": "t5gemma", "tie_word_embeddings": tied}, w.config.where)
    return b.decoder(
        w,
        replace(writing.shape, layers=2 * writing.shape.layers),
        lambda index: writing.decoder_block(index, width),
        prefix=writing.prefix,
        final_norm=writing.norm("norm"),
        embed_scale=writing.shape.hidden**0.5,
        logit_softcap=w.config.float("final_logit_softcapping", low=1e-6, default=None),
        encoder=Encoder(embed, blocks, norm, start, embed_scale=width**0.5),
    )
