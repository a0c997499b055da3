"""Everything that a state does, on a device that is not the processor: nothing mixes the two, and the logits are those.

On the GPU where there is one, else on a pretended device: see `tests.other_device`.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lmstate
from lmstate import kv
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.generation import generate
from lmstate.models.families import build
from tests.generation.fake_model import FakeTokenizer
from tests.kv.policies import BUDGETS
from tests.other_device import DEVICE, OtherDevice, elsewhere
from tests.sweeps import sampled
from tests.zoo import CASES, SAMPLE, pair, text

IDS = text(60)[0].tolist()
ATTENTION = ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3")
KINDS = ("llama", "mistral", "llama4", "deepseek_v2", "lfm2", "qwen3_next", "falcon_h1", "mamba", "recurrent_gemma")


def both(case: str, kind: str = "float32") -> tuple[lmstate.Model, lmstate.Model]:
    """A model on the processor and the same elsewhere. The second only lives inside `OtherDevice`."""
    theirs, _ = pair(case)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        here = build(WeightLoader(open_source(Path(folder)), kind))
        return here, build(WeightLoader(open_source(Path(folder)), kind, device=DEVICE))


def story(model: lmstate.Model, folder: Path, **settings: Any) -> list[torch.Tensor]:
    """A bit of everything; the logits on the way."""
    out: list[Any] = []
    state = model.new_state(2, **settings)
    out.append(model([IDS[:50], IDS[:7]], state))
    out.append(model([IDS[20:23], []], state))
    out.append(model([IDS[:5], IDS[:2]], state, logits="all", commit=False))
    state.commit([2, 1])
    out.append(model([[], IDS[3:4]], state))
    state.rewind(0, state.lengths[0] - 3)
    out.append(model([IDS[:3], []], state, logits="all"))
    state.rewind(0, 2)
    out.append(model([IDS[:3], []], state))
    state.mark(0)
    snapshot = state.snapshot(0)
    snapshot.save(folder / "row")
    state.select([0, 0, None, 1])
    state.restore(2, lmstate.Snapshot.load(folder / "row"))
    out.append(model([IDS[:1], [], IDS[:2], IDS[:3]], state))
    assert sum(state.memory().values()) > 0
    out.append(model([[], [], [], []], state, logits="all"))
    return out


def same(model: lmstate.Model, other: lmstate.Model, folder: Path, **settings: Any) -> None:
    expected = story(model, folder, **settings)
    with OtherDevice():
        found = story(other, folder, **settings)
        assert all(elsewhere(x) and x.device == DEVICE for x in found)
        found = [x.cpu() for x in found]
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("case", sampled(list(CASES), SAMPLE))
def test_a_state_of_every_family_lies_wholly_on_its_device(case: str, tmp_path: Path) -> None:
    with OtherDevice():
        here, there = both(case)
    same(here, there, tmp_path)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "deepseek_v3", "qwen3_next", "mamba2"])
def test_so_it_does_with_every_kind_of_weights(case: str, kind: str, tmp_path: Path) -> None:
    with OtherDevice():
        _, there = both(case, kind)
        for logits in story(there, tmp_path):
            assert elsewhere(logits)


POLICIES: dict[str, Any] = {
    **BUDGETS,
    "int8": kv.Quantized(8),
    "int4": kv.Quantized(4),
    "mixed": kv.PerLayer({0: kv.Recent(budget=8, sinks=1)}, default=kv.Quantized(8)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["llama", "gemma2", "falcon_h1"])
def test_so_it_does_with_every_policy(case: str, policy: str, tmp_path: Path) -> None:
    with OtherDevice():
        here, there = both(case)
    same(here, there, tmp_path, kv=POLICIES[policy])


@pytest.mark.parametrize("case", KINDS)
def test_a_step_on_tensors_stays_on_its_device(case: str) -> None:
    def steps(model: lmstate.Model) -> torch.Tensor:
        state = model.new_state(2, capacity=80, static=True)
        model([IDS[:40], IDS[:3]], state)
        for token in IDS[40:44]:
            model.decode_step(torch.tensor([[token], [token]], device=model.device), state)
            state.commit([1, 0])
        counts = torch.tensor([1, 3], device=model.device)
        out = model.decode_step(torch.tensor([IDS[:3], IDS[:3]], device=model.device), state, counts, "all")
        state.commit()
        state.rewind(0, 20)
        return torch.cat([out, model([IDS[:3], []], state, logits="all")])

    with OtherDevice():
        here, there = both(case)
        found = steps(there)
        assert elsewhere(found)
    torch.testing.assert_close(found.cpu(), steps(here), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ATTENTION)
def test_a_gap_is_closed_on_its_device(case: str) -> None:
    def gap(model: lmstate.Model) -> torch.Tensor:
        state = model.new_state()
        model([IDS[:10]], state)
        state.drop(0, 2, 5)
        return model([IDS[10:12]], state)

    with OtherDevice():
        here, there = both(case)
        found = gap(there)
    torch.testing.assert_close(found.cpu(), gap(here), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}]
)
def test_generating_picks_the_same_tokens_there(settings: dict[str, Any]) -> None:
    def says(model: lmstate.Model) -> list[int]:
        whole = replace(model, _tokenizer=FakeTokenizer(), eos_ids=frozenset())  # type: ignore[arg-type]
        state = whole.new_state(2)
        generate(whole, [IDS[:9], IDS[:4]], state, max_new_tokens=12, seed=3, **settings)
        return [*state.tokens(0), *state.tokens(1)]

    with OtherDevice():
        here, there = both("llama")
        found = says(there)
    assert found == says(here)
