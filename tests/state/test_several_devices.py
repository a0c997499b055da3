"""Models whose blocks lie on several devices: the same bits as on one, and nothing mixes them.

The devices are pretended, see `tests.other_device`.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.checkpoints.placement import DevicePlacement
from lmstate.errors import ModelError, UnsupportedError
from lmstate.generation import generate
from lmstate.models.families import build
from lmstate.models.spread import spread
from tests.generation.fake_model import FakeTokenizer
from tests.heads.zoo import pair as with_heads
from tests.other_device import CPU, DEVICE, MORE, REAL, PretendedDevice, place_of
from tests.state.test_other_device import IDS, story
from tests.sweeps import sampled
from tests.zoo import CASES, pair

pytestmark = pytest.mark.skipif(REAL, reason="the devices are pretended")

DEVICES = [DEVICE, *MORE]
SAMPLE = (
    "llama", "gemma3n", "gemma4", "zamba2", "deepseek_v32", "glm_moe_dsa-shared", "qwen3_next", "mamba2", "falcon_h1",
    "gpt_oss", "rwkv", "zaya",
)  # fmt: skip
"""Cases of each kind of layer, and those whose layers read or share something of others."""


def placed(case: str, *placements: Any, kind: str = "float32") -> list[lmstate.Model]:
    """The same model over each of some devices. They only live inside a `PretendedDevice`."""
    theirs, _ = pair(case)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        source = open_source(Path(folder))
        return [build(WeightLoader(source, kind, device=each)) for each in placements]


def over_most(case: str) -> list[lmstate.Model]:
    """A model on one device, and over as many as its blocks can lie on, of three."""
    for count in (3, 2):
        try:
            return placed(case, DEVICE, DEVICES[:count])
        except ModelError:
            continue
    return placed(case, DEVICE, {DEVICE: len(pair(case)[1].blocks)})


def over(model: lmstate.Model, devices: list[torch.device]) -> lmstate.Model:
    """The model with each block on its device."""
    return replace(model, network=spread(model.network, devices))


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether all bits are the same, NaN included."""
    return all(torch.equal(a.cpu().view(torch.int32), b.cpu().view(torch.int32)) for a, b in zip(found, expected))


@pytest.mark.parametrize("case", sampled(list(CASES), SAMPLE))
def test_every_family_gives_the_bits_of_one_device(case: str, tmp_path: Path) -> None:
    with PretendedDevice():
        one, several = over_most(case)
        assert several.fingerprint == one.fingerprint
        found = story(several, tmp_path)
        assert {place_of(x) for x in found} == {several.output_device}
        assert same(found, story(one, tmp_path))


def test_the_stream_moves_once_for_each_border() -> None:
    with PretendedDevice() as mode:
        (model,) = placed("llama", DEVICES[:3])
        state = model.new_state(2)
        mode.moves.clear()
        model([IDS[:5], IDS[:3]], state)
        shape = torch.Size([2, 5, model.config.hidden_size])
        assert mode.moves == [(DEVICE, MORE[0], shape), (MORE[0], MORE[1], shape)]


@pytest.mark.parametrize("case", ["llama", "qwen3_next", "gemma2"])
def test_the_processor_takes_a_part(case: str, tmp_path: Path) -> None:
    with PretendedDevice():
        blocks = len(pair(case)[1].blocks)
        here, *split = placed(case, CPU, {DEVICE: 1, CPU: blocks - 1}, {CPU: blocks - 1, DEVICE: 1})
        expected = story(here, tmp_path)
        for model in split:
            for a, b in zip(expected, story(model, tmp_path)):
                torch.testing.assert_close(a, b.cpu(), atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("case", ["llama", "qwen3_next"])
def test_a_snapshot_moves_between_numbers_of_devices(case: str, tmp_path: Path) -> None:
    with PretendedDevice():
        one, two = placed(case, DEVICE, DEVICES[:2])
        for source, target in ((one, two), (two, one)):
            state, other = source.new_state(), target.new_state()
            source([IDS[:30]], state)
            other.restore(0, state.snapshot(0))
            expected = source([IDS[30:33]], state)
            assert same([target([IDS[30:33]], other)], [expected])  # type: ignore[list-item]
            state.snapshot(0).save(tmp_path / "row")
            other.restore(0, lmstate.Snapshot.load(tmp_path / "row"))
            assert same([target([[]], other)], [expected])  # type: ignore[list-item]


def test_heads_draft_on_the_last_device() -> None:
    def says(model: lmstate.Model) -> list[int]:
        whole = replace(model, _tokenizer=FakeTokenizer(), eos_ids=frozenset())  # type: ignore[arg-type]
        state = whole.new_state()
        generate(whole, [IDS[:9]], state, max_new_tokens=12, draft="heads")
        assert {layer.device for layer in state.layers} == set(model.devices)
        return state.tokens(0)

    model = with_heads("deepseek_v3").ours
    with PretendedDevice():
        first, *_, last = devices = [*[DEVICE] * (len(model.blocks) - 1), MORE[0]]
        one, two = over(model, [first] * len(devices)), over(model, devices)
        assert two.heads[0].norm.weight.device == last
        assert says(one) == says(two)


def test_blocks_that_read_each_other_stay_together() -> None:
    with PretendedDevice():
        with pytest.raises(ModelError, match=r"parts block \d+ from block \d+, whose keys or choices it reads"):
            placed("gemma3n", {DEVICE: len(pair("gemma3n")[1].blocks) - 1, MORE[0]: 1})
        (model,) = placed("gemma3n", DEVICES[:2])
        assert all(block.reads is None or model.blocks[block.reads].device == block.device for block in model.blocks)


def test_what_needs_one_device_is_refused(tmp_path: Path) -> None:
    pair("llama")[0].save_pretrained(tmp_path)
    with PretendedDevice():
        model = lmstate.load(tmp_path, device="cuda:0,cuda:1")
        assert "cuda:0 (blocks 0" in repr(model)
        with pytest.raises(UnsupportedError, match="one graph runs on one device"):
            model.new_state(static=True, capacity=8)
        with pytest.raises(ModelError, match="training or an adapter"):
            lmstate.load(tmp_path, device="cuda:0,cuda:1", trainable=True)
        with pytest.raises(ModelError, match="places 9 blocks; the model has 3"):
            lmstate.load(tmp_path, device={"cuda:0": 8, "cpu": 1})
        with pytest.raises(ModelError, match="name 3 devices at most"):
            lmstate.load(tmp_path, device=DEVICES)


def test_auto_is_the_processor_where_there_is_no_gpu() -> None:
    assert DevicePlacement.of("auto").devices == (CPU,)


def test_a_source_is_read_by_blocks_on_several_devices() -> None:
    def answers(model: lmstate.Model) -> torch.Tensor:
        state = model.new_state()
        state.condition(0, IDS[:9])
        out = model([IDS[:5]], state, logits="all")
        assert out is not None
        return out

    model = pair("bart")[1]
    with PretendedDevice():
        one = over(model, [DEVICE] * len(model.blocks))
        several = over(model, [DEVICE, *[MORE[0]] * (len(model.blocks) - 1)])
        assert same([answers(several)], [answers(one)])
