"""Models with weights in host memory: the bits of one device, each weight brought once a step, two blocks at a time.

The devices are pretended, see `tests.other_device`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.checkpoints.placement import DevicePlacement
from lmstate.errors import ModelError, UnsupportedError
from lmstate.models import offload
from lmstate.models.block import Block
from lmstate.models.families import build
from lmstate.models.fingerprint import instances
from lmstate.ops import Weight
from tests.distributed.helpers import saved
from tests.other_device import CPU, DEVICE, MORE, REAL, PretendedDevice, place_of
from tests.state.test_other_device import IDS, story
from tests.state.test_several_devices import SAMPLE, placed, same
from tests.sweeps import sampled
from tests.zoo import CASES, ENCODERS, conditioned, pair, text

pytestmark = pytest.mark.skipif(REAL, reason="the devices are pretended")


def halves(case: str) -> dict[Any, int]:
    """The first block on the device, the others in host memory."""
    blocks = len(pair(case)[1].blocks)
    if blocks == 1:
        pytest.skip("one block")
    return {DEVICE: 1, "offload": blocks - 1}


def streamed(model: lmstate.Model) -> list[Weight]:
    """The weights in host memory."""
    blocks = [model.blocks[index] for index in model.network.offloaded]
    weights = [weight for block in blocks for _, weight in instances(block, Weight)]
    return [weight for weight in weights if place_of(weight.storage) == CPU]


@pytest.mark.parametrize("case", sampled(list(CASES), SAMPLE))
def test_every_family_gives_the_bits_of_one_device(case: str, tmp_path: Path) -> None:
    with PretendedDevice():
        one, two = placed(case, DEVICE, halves(case))
        assert two.fingerprint == one.fingerprint
        assert streamed(two)
        assert len(two.network.offloaded) == len(two.blocks) - 1
        found = story(two, tmp_path)
        assert {place_of(x) for x in found} == {DEVICE}
        assert same(found, story(one, tmp_path))


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_every_storage_gives_the_bits_of_one_device(kind: str, tmp_path: Path) -> None:
    source = open_source(saved("llama", tmp_path, wide=True))
    with PretendedDevice():
        one, two = (build(WeightLoader(source, kind, device=each)) for each in (DEVICE, halves("llama")))
        assert any(weight.kind == kind for weight in streamed(two))
        assert same(story(two, tmp_path), story(one, tmp_path))


def test_a_model_with_an_encoder(tmp_path: Path) -> None:
    case = "bart" if "bart" in ENCODERS else next(iter(ENCODERS))
    folder = saved(case, tmp_path)
    with PretendedDevice():
        blocks = len(pair(case)[1].blocks)
        found = []
        for device in (DEVICE, {DEVICE: blocks - 1, "offload": 1}):
            model = build(WeightLoader(open_source(folder), "float32", device=device))
            found.append(model([IDS[:9]], conditioned(model, model.new_state())))
        assert same(found[1:], found[:1])


def test_weights_come_once_a_step_and_two_blocks_are_there_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    there: WeakSet[Block] = WeakSet()
    most, moved = 0, offload.moved

    def counted(block: Block, device: torch.device) -> Block:
        nonlocal most
        here = moved(block, device)
        there.add(here)
        most = max(most, len(there))
        return here

    monkeypatch.setattr(offload, "moved", counted)
    with PretendedDevice() as mode:
        (model,) = placed("llama", halves("llama"))
        state = model.new_state(2)
        weights = sum(weight.nbytes for weight in streamed(model))
        for tokens in ([IDS[:5], IDS[:3]], [IDS[5:6], []]):
            mode.sent.clear()
            model(tokens, state)
            assert weights <= mode.sent[CPU, DEVICE] < 1.2 * weights  # and tokens, counts, positions
        assert most == 2 and len(there) == 0


def test_a_block_comes_while_the_one_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the order of what happens: the copy of a block begins before the block in front of it has given its output
    to anyone, and no block is fetched twice."""
    told: list[str] = []
    moved, called = offload.moved, Block.__call__
    with PretendedDevice():
        (model,) = placed("llama", halves("llama"))
        number = {id(model.blocks[index].mixer_norm): index for index in model.network.offloaded}
        monkeypatch.setattr(
            offload, "moved", lambda block, device: (told.append(f"fetch {at(block)}"), moved(block, device))[1]
        )

        def at(block: Block) -> int | None:
            return number.get(id(block.mixer_norm))  # which stays on the device

        def run(self: Block, *given: Any) -> torch.Tensor:
            told.append(f"run {at(self)}")
            return called(self, *given)

        monkeypatch.setattr(Block, "__call__", run)
        model([IDS[:5]], model.new_state(), logits="all")
    assert told == ["run None", "fetch 1", "run 1", "fetch 2", "run 2"]


def test_threads_share_a_model() -> None:
    with PretendedDevice():
        one, two = placed("llama", DEVICE, halves("llama"))
        prompts = [text(20 + n, seed=n)[0].tolist() for n in range(3)]
        expected = {n: by_token(one, prompt) for n, prompt in enumerate(prompts)}
    found: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        with PretendedDevice():
            found[number] = by_token(two, prompts[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with PretendedDevice():
        assert same([found[n] for n in range(3)], [expected[n] for n in range(3)])


def by_token(model: lmstate.Model, prompt: list[int]) -> torch.Tensor:
    state = model.new_state()
    return [model([[token]], state) for token in prompt][-1]


def test_an_error_in_a_block_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with PretendedDevice():
        one, two = placed("llama", DEVICE, halves("llama"))
        states = [model.new_state() for model in (one, two)]
        for model, state in zip((one, two), states):
            model([IDS[:9]], state)
        with monkeypatch.context() as patch:
            patch.setattr(offload, "moved", _failing)
            with pytest.raises(MemoryError):
                two([IDS[9:12]], states[1])
        expected, found = (model([IDS[9:12]], state) for model, state in zip((one, two), states))
        assert same([found], [expected])


def _failing(*_: Any) -> Block:
    raise MemoryError("no room")


def test_the_placement_is_told_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    pair("llama")[0].save_pretrained(tmp_path)
    with PretendedDevice():
        model = lmstate.load(tmp_path, device="cuda:0=1,offload=2")
        assert "cuda:0; weights of blocks 1-2 in host memory" in repr(model)
        for refused in (
            lambda: model.new_state(static=True, capacity=8),
            lambda: model.trace([IDS[:2]], on=lambda *_: None),
        ):
            with pytest.raises(UnsupportedError, match="host memory"):
                refused()
        for wrong in (
            "offload", {"offload": 3}, {"cpu": 1, "offload": 2}, ["cuda:0", "offload"], {"offload": 1, "cuda:0": 2},
            {"cuda:0": 1, "offload": 0},
        ):  # fmt: skip
            with pytest.raises(ValueError, match="was asked for"):
                DevicePlacement.of(wrong)
        with pytest.raises(ModelError, match="training or an adapter"):
            lmstate.load(tmp_path, device="cuda:0=1,offload=2", trainable=True)
        with pytest.raises(ModelError, match="places 9 blocks; the model has 3"):
            lmstate.load(tmp_path, device="cuda:0=1,offload=8")


def test_offload_stands_among_other_devices(tmp_path: Path) -> None:
    with PretendedDevice():
        one, several = placed("llama", DEVICE, {DEVICE: 1, "offload": 1, MORE[0]: 1})
        assert several.devices == [DEVICE, DEVICE, MORE[0]] and several.network.offloaded == [1]
        assert same(story(several, tmp_path), story(one, tmp_path))
