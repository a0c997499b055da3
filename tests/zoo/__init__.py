"""Small random models of every family, each made by its own `transformers` config class and loaded by lmstate.

A family joins by a line in the module of its kind: a name, and a function that gives a config. Texts in the tests go up
to 150 tokens, so windows and chunks in a config stay well below.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from lmstate.models.layers.sound_frames import SoundFrames
from lmstate.state import SourceFeatures

KINDS = (
    "llama_like",
    "dense",
    "windows",
    "shared",
    "latent",
    "experts",
    "delta",
    "ssm",
    "conv",
    "linear",
    "text_parts",
)
VOCAB = 99

Make = Callable[[], Any]
CASES: dict[str, Make] = {}
for kind in KINDS:
    CASES.update(import_module(f"tests.zoo.{kind}").CASES)
ENCODERS: dict[str, Make] = import_module("tests.zoo.encoders").CASES  # whose tokens read a source
SOUNDS: dict[str, SourceFeatures] = {}  # that `source` made, by their hashes
GROWING = tuple(case for case in CASES if case.startswith(("deepseek_v4", "glm5_next", "minimax_m3", "qwen4_exp")))
"""Cases whose states are not static; those of DeepSeek-V4 are not quantized either."""
TEXT_PARTS = import_module("tests.zoo.text_parts").CASES  # the layers of other cases, in wrappers

# What the suite runs where only the soak runs all: a case of each family, and its variants that keep another state.
OWN_STATE = (
    "", "dynamic", "longrope", "window", "windows", "pattern", "full", "interleaved", "deep", "shared", "streams",
    "short", "adapters", "latent", "attention", "gate-last",
)  # fmt: skip
SAMPLE = tuple(case for case in CASES if case.partition("-")[2] in OWN_STATE and case not in TEXT_PARTS)


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights large enough that every part of the model shows in its logits, and none the same as another."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue  # sinusoids, which files leave out
        noise = torch.randn(parameter.shape, generator=generator)
        if any(part in name for part in ("A_log", "dt_bias", "dt_proj.bias", "recurrent_param", "time_")):
            if "dt_bias" in name and bool((parameter == 1).all()):
                # A placeholder: trained ones give time steps of 0.001 to 0.1. With 1, most heads forget all within a
                # token, so that little of a carry shows; and what they answer is one product q^T k times v, whose
                # every near zero the norm after it divides out again, with the rounding of all that came before.
                parameter.data -= 5
            parameter.data += 0.3 * noise  # their initial values are meant; keep their range
        elif name.endswith("igate_preact.bias"):
            parameter.data += 10 + noise  # a placeholder too: as it is set, a token adds next to nothing
        elif parameter.ndim == 1:
            # Norm weights lie around what they were set to (1, or 0 where the model adds 1).
            parameter.data += 0.2 * noise
        else:
            parameter.data = noise * 0.6 / parameter.shape[-1] ** 0.5
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
            buffer += 0.3 * torch.randn(buffer.shape, generator=generator)
        if name.endswith("tid2eid"):  # experts of each token, none of them twice
            most = int(getattr(model, "config").n_routed_experts)  # noqa: B009
            buffer[:] = torch.rand(len(buffer), most, generator=generator).argsort(-1)[:, : buffer.shape[1]]
        if name.endswith("balancing_biases"):  # the same; the last one's stays, and is one that others may be below
            buffer[:-1] = buffer[-1] + 0.005 * torch.randn(len(buffer) - 1, generator=generator)


def auto(config: Any) -> Any:
    """The class of `transformers` that makes a model with a head for a config: of a text, or of images too."""
    import transformers

    if config.is_encoder_decoder:
        hears = type(config) in transformers.AutoModelForSpeechSeq2Seq._model_mapping
        return transformers.AutoModelForSpeechSeq2Seq if hears else transformers.AutoModelForSeq2SeqLM
    tables = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    for table in tables:
        if type(config) in table._model_mapping:
            return table
    # A text model that is known as a part of others alone.
    stem = type(config).__name__.removesuffix("Config")
    tables[0].register(type(config), getattr(transformers, f"{stem}ForCausalLM"))
    return tables[0]


def made(case: str) -> tuple[Any, lmstate.Model]:
    """The `transformers` model in float32 and the same weights in lmstate, through a saved directory."""
    config = (CASES | ENCODERS)[case]()
    torch.manual_seed(0)
    theirs = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(theirs)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = build(WeightLoader(open_source(Path(folder)), "float32"))
    return theirs, ours


kept = cache(made)  # of the whole process: tests of many folders want the same cases


@lru_cache(maxsize=4)
def pair(case: str) -> tuple[Any, lmstate.Model]:
    """Both models of `made`; the one of `transformers` is a copy, so that a test may change it."""
    theirs, ours = kept(case)
    return copy.deepcopy(theirs), ours


def ours(case: str) -> lmstate.Model:
    return kept(case)[1]


def conditioned(model: lmstate.Model, state: lmstate.State) -> lmstate.State:
    """The state, each of its rows with a source of another length, where the model has an encoder."""
    for row in range(state.rows if model.encoder is not None else 0):
        state.condition(row, source(model, 9 + 31 * row, seed=99 + row))
    return state


def source(model: lmstate.Model, length: int, seed: int) -> tuple[int, ...] | SourceFeatures:
    """A random source of a model with an encoder: the ids of a text, or a sound, which has always the same length."""
    assert model.encoder is not None
    if not isinstance(model.encoder.embed, SoundFrames):
        return tuple(text(length, seed=seed)[0].tolist())
    noise = torch.randn(model.encoder.embed.shape, generator=torch.Generator().manual_seed(seed))
    sound = SourceFeatures.of(noise)
    return SOUNDS.setdefault(sound.hash, sound)


def read(source: tuple[int, ...] | SourceFeatures) -> dict[str, torch.Tensor]:
    """The source as an argument of a model of `transformers`."""
    if isinstance(source, SourceFeatures):
        assert source.values is not None
        return {"input_features": source.values.T[None]}
    return {"input_ids": torch.tensor([source])}


def text(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Random ids int64 [rows, length], none of them 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (rows, length), generator=generator)
