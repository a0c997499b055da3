"""Where the stream is cut never matters, to the bit: one arithmetic for every length, row and number of threads.

Of native bodies: torch's products, which the references use, round by the number of rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate import kv, ops
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from lmstate.ops import dispatch
from tests import real_model
from tests.ops.helpers import stored
from tests.zoo import CASES, ENCODERS, VOCAB, auto, conditioned, ours, randomize

# Quantized weights have inputs in groups of 32.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
EACH: dict[str, dict[str, object]] = {  # one of every layer kind that has native bodies
    "llama": SIZES,
    "qwen3_moe": SIZES,
    "gemma2": SIZES,
    "gpt_oss": SIZES,
    "deepseek_v3": SIZES,
    "deepseek_v32": SIZES,
    "hy_v4": SIZES,
    "deepseek_v4": {"hidden_size": 64, "num_attention_heads": 4},
    "minimax_m3": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64},
    "qwen3_5": SIZES,
    "kimi_linear": SIZES,
    "mamba2": {"hidden_size": 64, "num_heads": 16},
    "mamba": {"hidden_size": 64},
    "falcon_h1": SIZES,
    "lfm2": SIZES,
    "recurrent_gemma": SIZES,
}
# Behind the line: bits of the activations that it multiplies.
KINDS = ("int4/8", "int4/16", "int8/8", "int8/16", "bfloat16", "float32")
# Here int4 and bfloat16 alone: the products of the others are tested apart, and the rest is the same.
QUICK = ("int4/8", "int4/16", "bfloat16")
POLICIES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int8": kv.Quantized(8),
    "int4": kv.Quantized(4),
}
LONG = 140

pytestmark = [
    pytest.mark.skipif(dispatch.choice().library is None, reason="there are no native bodies"),
    pytest.mark.usefixtures("one_thread"),
]


@lru_cache(maxsize=2)
def saved(case: str) -> tempfile.TemporaryDirectory[str]:
    config = CASES[case](**EACH[case])
    torch.manual_seed(0)
    theirs = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(theirs)
    folder = tempfile.TemporaryDirectory()
    theirs.save_pretrained(folder.name)
    return folder


@lru_cache(maxsize=2)
def model_of(case: str, kind: str) -> lmstate.Model:
    weights, _, bits = kind.partition("/")
    return build(WeightLoader(open_source(Path(saved(case).name)), weights, activations=int(bits) if bits else "auto"))


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def pieces(ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    at = 0
    while at < len(ids):
        for size in sizes:
            yield ids[at : at + size]
            at += size


def fed(model: lmstate.Model, ids: list[int], sizes: list[int], **how: object) -> tuple[Tensor, lmstate.State]:
    state = conditioned(model, model.new_state(1, **how))
    return torch.cat([model([piece], state, logits="all")[0] for piece in pieces(ids, sizes) if piece]), state


@pytest.fixture(params=[f"{case}-{kind}" for case in EACH for kind in QUICK])
def model(request: pytest.FixtureRequest) -> lmstate.Model:
    return model_of(*request.param.rsplit("-", 1))


def test_cuts_change_no_bit(model: lmstate.Model) -> None:
    ids = text(LONG)
    whole, state = fed(model, ids, [LONG])
    assert whole.isfinite().all()
    for sizes in ([7], [33], [64], [1, 50, 3, 32, 40]):
        logits, cut = fed(model, ids, sizes)
        assert torch.equal(logits, whole), sizes
        more = text(3, seed=1)
        want = model([more], state, logits="all", commit=False)
        assert torch.equal(model([more], cut, logits="all", commit=False), want)
        state.discard()
    assert torch.equal(fed(model, ids[:24], [1])[0], whole[:24])


def test_neighbors_and_threads_change_no_bit(model: lmstate.Model) -> None:
    rows = [text(length, seed=length) for length in (50, 3, 33, 1)]
    alone = [fed(model, row, [len(row)])[0] for row in rows]
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        together = model(rows, model.new_state(len(rows)), logits="all")
        assert all(torch.equal(got[: len(row)], want) for got, row, want in zip(together, rows, alone)), count


def test_drafts_rewinds_forks_and_snapshots_change_no_bit(model: lmstate.Model) -> None:
    ids = text(90)
    whole, _ = fed(model, ids, [90])
    state = model.new_state(1)
    model([ids[:36]], state)
    model([ids[36:44] + text(4, seed=2)], state, logits="all", commit=False)
    state.commit(8)  # a draft of which a part holds
    model([ids[44:50]], state)
    state.rewind(0, 44)
    state.select([0, 0])
    assert torch.equal(model([ids[44:], ids[44:46]], state, logits="all")[0, :46], whole[44:])
    other = model.new_state(1)
    other.restore(0, state.snapshot(1))
    assert torch.equal(model([ids[46:]], other, logits="all")[0], whole[46:])


@pytest.mark.parametrize("policy", ["bfloat16", "float32", "int8", "int4"])
@pytest.mark.parametrize("case", ["llama", "gemma2", "deepseek_v3", "falcon_h1"])
def test_infinite_numbers_change_nothing_before_them(case: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, infinite = model_of(case, "int4"), 7
    embedded = type(model.network).embedded

    def overflown(network: Any, tokens: Tensor, step: Any) -> Tensor:
        stream = embedded(network, tokens, step)
        return torch.where((tokens == infinite)[..., None], torch.inf, stream)

    monkeypatch.setattr(type(model.network), "embedded", overflown)
    ids = [8 if token == infinite else token for token in text(LONG)]
    finite, _ = fed(model, ids, [LONG], kv=POLICIES[policy])
    ids[100] = infinite
    for sizes in ([LONG], [7], [33], [64], [1, 50, 3, 32, 40]):
        logits, _ = fed(model, ids, sizes, kv=POLICIES[policy])
        assert torch.equal(logits[:100], finite[:100]), sizes
        assert not logits[100].isfinite().any()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt_oss"])
def test_however_keys_and_values_are_stored(case: str, policy: str) -> None:
    model, ids = model_of(case, "int4"), text(LONG)
    whole, _ = fed(model, ids, [LONG], kv=POLICIES[policy])
    for cut in (7, 33, 64):
        assert torch.equal(fed(model, ids, [cut], kv=POLICIES[policy])[0], whole), cut


@pytest.mark.parametrize("storage", [torch.float32, kv.Quantized(8)])
@pytest.mark.parametrize("policy", [kv.Recent, kv.H2O, kv.SnapKV, kv.ExpectedAttention])
@pytest.mark.parametrize("case", ["llama", "deepseek_v3"])
def test_under_a_policy_that_has_nothing_to_forget_yet(case: str, policy: type[kv.H2O], storage: Any) -> None:
    kept = policy(budget=2 * LONG, storage=kv.Dense(storage) if isinstance(storage, torch.dtype) else storage)
    model, ids = model_of(case, "int4"), text(LONG)
    whole, _ = fed(model, ids, [LONG], kv=kept)
    for cut in (7, 33, 64):
        assert torch.equal(fed(model, ids, [cut], kv=kept)[0], whole), cut


@pytest.mark.parametrize("kind", (*KINDS, "float16", "bfloat12"))
@pytest.mark.parametrize("shape", [(70, 64), (35, 96), (50, 2080)])
def test_a_product_is_the_same_for_a_row_and_for_many(kind: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape) * 0.1
    weight = stored(matrix, kind)
    x, norm = torch.randn(300, shape[1]), ops.Norm(torch.rand(shape[1]), 1e-5)
    whole = ops.linear(x, weight, norm=norm)
    for size in (1, 2, 3, 5, 6, 7, 8, 9, 33, 41, 100):
        assert torch.equal(torch.cat([ops.linear(part, weight, norm=norm) for part in x.split(size)]), whole), size


# Their frequencies follow the length of the text: as in `transformers`, one that comes whole is another than one that
# grows past a length of the config. Up to there they hold as all others do.
STRETCHED = {"llama-dynamic", "llama-longrope", "phi3-longrope", "phimoe-longrope"}


@pytest.mark.parametrize("policy", ["float32", "int8"])
@pytest.mark.parametrize("case", [*CASES, *ENCODERS])
def test_every_family_gives_the_same_bits_however_it_is_cut_and_beside_others(case: str, policy: str) -> None:
    model = ours(case)
    assert not model.network.dynamic_ropes or case in STRETCHED
    if policy == "int8" and case.startswith("deepseek_v4"):
        pytest.skip("its states have no 8-bit form")
    ids, keys = text(12 if case in STRETCHED else 70), POLICIES[policy]
    whole, _ = fed(model, ids, [len(ids)], kv=keys)
    for sizes in ([33], [7], [1, 20, 3, 2]):
        assert torch.equal(fed(model, ids, sizes, kv=keys)[0], whole), sizes
    rows = [ids[:5], ids, ids[:1]]
    state = model.new_state(len(rows), kv=keys)
    if model.encoder is not None:  # one source for all, beside one of another length
        state = conditioned(model, model.new_state(2, kv=keys))
        state.select([0, 0, 0, 1])
        rows.append(ids[:9])
    together = model(rows, state, logits="all")
    for got, row in zip(together, rows[:3], strict=False):
        assert torch.equal(got[: len(row)], whole[: len(row)])


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_model_gives_the_same_bits_over_2000_tokens(kind: str) -> None:
    model = lmstate.load(real_model.smollm2(), weights=kind)
    ids = torch.randint(100, 40000, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    whole, _ = fed(model, ids, [2000])
    for sizes in ([300], [64], [33], [32], [7], [1]):
        assert torch.equal(fed(model, ids, sizes)[0], whole), sizes
