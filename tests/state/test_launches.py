"""Operations of a forward on another device, where each is a launch: no more for long rows than for short ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from tests.other_device import DEVICE, OtherDevice
from tests.zoo import pair, text

IDS = text(400)[0].tolist()


class Launches(TorchDispatchMode):
    """Counts what computes or copies; a view does neither."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = isinstance(out, torch.Tensor) and "empty" not in func.__name__ and func.overloadpacket is not SET
        self.count += made and not func.is_view
        return out


SET = torch.ops.aten.set_


@pytest.fixture(scope="module", params=["llama", "mistral", "deepseek_v3"])
def model(request: pytest.FixtureRequest) -> Iterator[lmstate.Model]:
    theirs, _ = pair(request.param)
    with tempfile.TemporaryDirectory() as folder, OtherDevice():
        theirs.save_pretrained(folder)
        yield build(WeightLoader(open_source(Path(folder)), "float32", device=DEVICE))


def launches(model: lmstate.Model, held: list[int], new: list[int]) -> int:
    with torch.no_grad():
        state = model.new_state(len(held), rewind=16)
        model([IDS[:n] for n in held], state)
        with Launches() as mode:
            model([IDS[:n] for n in new], state)
    return mode.count


def test_a_step_launches_as_much_whatever_the_row_holds(model: lmstate.Model) -> None:
    assert launches(model, [330], [1]) <= launches(model, [30], [1]) + 4


def test_rows_of_any_length_are_read_and_written_together(model: lmstate.Model) -> None:
    few, many = (launches(model, held, [1] * len(held)) for held in ([9, 300], [250, 9, 31, 300, 150, 77]))
    assert many <= few + 8, "of six rows a copy of the logits each, and nothing of each layer"
    few, many = (launches(model, held, new) for held, new in (([9, 300], [1, 3]), ([9, 31, 300, 77], [0, 3, 1, 2])))
    assert many <= few + 24, "experts that got none of the fewer tokens may get one of the more"


def test_a_prompt_launches_as_much_whatever_its_length(model: lmstate.Model) -> None:
    if model.config.family == "deepseek_v3":
        pytest.skip("latents are read in parts, so that scores take little memory")
    assert launches(model, [0], [390]) <= launches(model, [0], [70]) + 4
