"""Whisper (2212.04356): an encoder of sounds, and a decoder that writes what is said in them.

x = gelu(conv(frames)); x = gelu(conv(x)) + positions   # 3 frames each, the second at every other one; sinusoids
x = x + attention(norm(x))                              # of all frames
x = x + fc2(act(fc1(norm(x))))
encoded = norm(x)

y = embed(tokens) + positions                           # learned
y = y + attention(norm(y))                              # causal
y = y + cross(norm(y), encoded)
y = y + fc2(act(fc1(norm(y))))
logits = head(norm(y))                                  # projections of keys have no bias
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.source import floats
from lmstate.models.encoder import Encoder
from lmstate.models.families import builders as b
from lmstate.models.families.bart import EPS, MAX_TABLE, USUAL, Stack
from lmstate.models.layers.embedding import LearnedPositions
from lmstate.models.layers.sound_frames import SoundFrames
from lmstate.models.model import Model
from lmstate.ops import FloatWeight, Weight

DEFAULTS: b.Defaults = {
    "whisper": {
        "vocab_size": 51_865, "num_mel_bins": 80, "d_model": 384, "encoder_layers": 4, "decoder_layers": 4,
        "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536,
        "activation_function": "gelu", "max_source_positions": 1500,
        "max_target_positions": 448, "decoder_start_token_id": 50_257,
    },
}  # fmt: skip
MAX_BINS = 2**12  # of a frame


def build(w: WeightLoader) -> Model:
    w.config = config = b.with_usual_names(w.config, {**USUAL, "max_target_positions": b.POSITIONS})
    shape = replace(b.Dims.of(config), eps=EPS)
    reading, writing = (Stack.of(w, name, shape, True, "k_proj") for name in ("encoder", "decoder"))
    positions = config.int("max_source_positions", low=1, high=MAX_TABLE)
    bins = config.int("num_mel_bins", low=1, high=MAX_BINS)
    frames = SoundFrames(
        _windows(w, "conv1", shape.hidden, bins),
        w.tensor("model.encoder.conv1.bias", (shape.hidden,)),
        _windows(w, "conv2", shape.hidden, shape.hidden),
        w.tensor("model.encoder.conv2.bias", (shape.hidden,)),
        w.tensor("model.encoder.embed_positions.weight", (positions, shape.hidden)),
    )
    places = config.int(b.POSITIONS, low=1, high=MAX_TABLE)
    return b.decoder(
        w,
        replace(writing.shape, layers=3 * writing.shape.layers),
        writing.decoder_block,
        embed="model.decoder.embed_tokens",
        entry=LearnedPositions(FloatWeight(w.tensor("model.decoder.embed_positions.weight", (places, shape.hidden)))),
        final_norm=writing.final_norm(),
        encoder=Encoder(frames, reading.encoder_blocks(), reading.final_norm(), b.start_id(config, shape.vocab)),
    )


def _windows(w: WeightLoader, name: str, width: int, inputs: int) -> Weight:
    """A convolution over three frames as a matrix `[E, 3 F]` of these frames one after the other."""
    tensor = f"model.encoder.{name}.weight"
    w.expect(tensor, (width, inputs, 3))

    def flat(kernel: Tensor) -> Tensor:
        return floats(kernel).transpose(1, 2).flatten(1)

    return w.derived(f"{tensor}, frame by frame", tensor, make=flat, shape=(width, 3 * inputs))
