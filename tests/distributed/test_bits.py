"""A model over several ranks gives the bits of one process. Most ranks here are threads, which start at once."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

import lmstate
from lmstate.models.fingerprint import weights_in
from lmstate.models.layers.mla import MultiHeadLatentAttention
from lmstate.ops.weights.split import SplitWeight
from lmstate.state import LayerState, RecurrentState
from tests.distributed.helpers import WIDE, one_process, over_threads, same, saved
from tests.state.test_other_device import story
from tests.sweeps import sampled
from tests.zoo import CASES

KINDS = (
    "llama", "qwen3", "gemma2", "gpt_oss", "qwen3_moe", "qwen3_next", "mamba2", "deepseek_v3", "gemma3n",
    "zamba2", "rwkv", "jamba", "recurrent_gemma", "deepseek_v4", "longcat_flash",
)  # fmt: skip
"""Cases with attention of every kind, experts, recurrences, and layers that share or read something of others."""


@pytest.mark.parametrize("case", sampled(list(CASES), KINDS))
def test_every_family_gives_the_bits_of_one_process(case: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path)
    with over_threads(folder, "float32", 2) as (model, _):
        one = one_process(folder, "float32")
        assert model.fingerprint == one.fingerprint
        assert same(story(model, tmp_path), story(one, tmp_path))


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("case", list(WIDE))
def test_every_storage_gives_the_bits_of_one_process(case: str, kind: str, tmp_path: Path) -> None:
    folder = saved(case, tmp_path, wide=True)
    with over_threads(folder, kind, 2) as (model, _):
        kinds = [weight.kind for _, weight in weights_in(model.blocks) if isinstance(weight, SplitWeight)]
        assert any(each.startswith(kind) for each in kinds)
        assert same(story(model, tmp_path), story(one_process(folder, kind), tmp_path))


RECURRENT = (
    "qwen3_5-tied", "kimi_linear", "bailing_hybrid", "mamba2-groups", "mamba2", "nemotron_h-moe", "jamba", "zamba-deep",
    "recurrent_gemma", "rwkv-wide", "xlstm-biased", "lfm2-biased", "minimax",
)  # fmt: skip
"""Delta rules with a decay a head, a channel or through a bottleneck; state spaces of groups, heads and channels;
RG-LRU, RWKV, mLSTM, short convolutions and lightning attention."""
COMPOSITE = ("falcon_h1", "falcon_h1-norm", "zamba2-adapters", "zaya", "inkling", "qwen4_exp")
"""Attention and a recurrence in one layer."""


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("case", [*RECURRENT, *COMPOSITE])
def test_recurrences_are_split(case: str, kind: str, tmp_path: Path) -> None:
    """Their matrices, their carries, and each part of the carries in a snapshot."""
    folder = saved(case, tmp_path)
    with over_threads(folder, kind, 2) as (model, _):
        one = one_process(folder, kind)
        assert same(story(model, tmp_path), story(one, tmp_path))
        states = [of.new_state() for of in (one, model)]
        for of, state in zip((one, model), states):
            of([[1, 2, 3]], state)
        parts = [list(map(_carries, state.layers)) for state in states]
        for whole, own, cut in zip(*parts, model.cuts):
            split = {name for name in whole if own[name] < whole[name]}
            assert bool(split) == bool(cut and whole)
            assert all(own[name] <= whole[name] / 2 for name in split if "conv" not in name)  # all may read B and C
        assert any(map(bool, model.cuts))
        theirs, ours = (state.snapshot(0) for state in states)
        for one_layer, layer in zip(theirs.layers, ours.layers, strict=True):
            assert set(layer) == set(one_layer)
            assert all(torch.equal(layer[name], one_layer[name]) for name in one_layer)


def _carries(layer: LayerState) -> dict[str, int]:
    """Numbers of each part of the carries of a layer."""
    leaves = [leaf for leaf in layer.leaves() if isinstance(leaf, RecurrentState)]
    return {
        f"{at}.{name}": part[0].numel() for at, leaf in enumerate(leaves) for name, part in zip(leaf.names, leaf.carry)
    }


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(
    "case", ["deepseek_v3", "deepseek_v2-greedy", "axk2", "dots3_note", "bailing_hybrid", "glm5_next"]
)
def test_latent_attention_is_split_by_heads(case: str, kind: str, tmp_path: Path) -> None:
    """Its queries from a latent or of their own, with gates of heads or of values, over all positions or chosen ones.
    Every rank stores all latents."""
    folder = saved(case, tmp_path)
    with over_threads(folder, kind, 2) as (model, _):
        one = one_process(folder, kind)
        assert same(story(model, tmp_path), story(one, tmp_path))
        pairs = [
            (ours.mixer, theirs.mixer)
            for ours, theirs in zip(model.blocks, one.blocks)
            if isinstance(ours.mixer, MultiHeadLatentAttention) and isinstance(theirs.mixer, MultiHeadLatentAttention)
        ]
        assert pairs and all(len(ours.key_up) == len(theirs.key_up) // 2 for ours, theirs in pairs)


@pytest.mark.parametrize("kind", ["float32", "int4"])
@pytest.mark.parametrize("case", ["mimo_v2_flash", "mimo_v2_flash-groups", "dory"])
def test_attention_of_other_heads_is_split(case: str, kind: str, tmp_path: Path) -> None:
    """With values narrower than keys and sinks, and with gates and queries that have factors of each head."""
    folder = saved(case, tmp_path)
    with over_threads(folder, kind, 2) as (model, _):
        one = one_process(folder, kind)
        assert same(story(model, tmp_path), story(one, tmp_path))
        split = [(ours.mixer, theirs.mixer) for ours, theirs, cut in zip(model.blocks, one.blocks, model.cuts) if cut]
        assert len(split) > 1
        assert all(ours.heads < theirs.heads for ours, theirs in split)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "case",
    ["llama", "gemma3n", "qwen3_moe", "qwen3_5-tied", "mamba2-groups", "qwen3_next", "mamba2", "lfm2", "zaya-windows"],
)
def test_three_ranks_give_the_bits_of_one_process(case: str, tmp_path: Path) -> None:
    """With fewer kv heads than ranks, whose layers every rank then computes whole."""
    folder = saved(case, tmp_path)
    with over_threads(folder, "float32", 3) as (model, _):
        assert same(story(model, tmp_path), story(one_process(folder, "float32"), tmp_path))


@pytest.mark.parametrize(
    ("case", "bits"), [*product(["llama", "mistral", "deepseek_v3"], [8, 4, 2]), ("llama", 3), ("mistral", 3)]
)
def test_quantized_keys_and_values_are_the_same(case: str, bits: int, tmp_path: Path) -> None:
    folder, kv = saved(case, tmp_path), lmstate.kv.Quantized(bits)
    with over_threads(folder, "float32", 2) as (model, _):
        assert same(story(model, tmp_path, kv=kv), story(one_process(folder, "float32"), tmp_path, kv=kv))


def test_a_block_of_attention_gathers_four_times(tmp_path: Path) -> None:
    """Heads, their projection, the columns between gate and down, and the output."""
    with over_threads(saved("llama", tmp_path), "float32", 2) as (model, meeting):
        state = model.new_state()
        model([[1, 2, 3]], state)
        before = meeting.gathers
        model([[4]], state)
        assert meeting.gathers - before == 4 * len(model.blocks) + 2  # the embedding, the logits
