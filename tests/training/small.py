"""Models of the zoo that train, and the gradients that they should have."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.checkpoints.huggingface.directory import CheckpointFolder
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.training import TrainableModel
from tests.zoo import CASES, auto, randomize, text


def theirs(case: str) -> Any:
    """A `transformers` model in float32, made anew: gradients are left in it."""
    config = CASES[case]()
    torch.manual_seed(0)
    model = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(model)
    return model


@contextmanager
def saved(model: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield Path(folder)


def opened(folder: Path) -> TrainableModel:
    return TrainableModel(WeightLoader(open_source(folder), "float32"))


def trainable(case: str) -> TrainableModel:
    with saved(theirs(case)) as folder:
        return opened(folder)


def saved_gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of a `transformers` model under the names, and in the shapes, that its checkpoint has."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for buffer in model.buffers():
            buffer.zero_()
    with saved(model) as folder:
        file = CheckpointFolder(folder)
        return {name: file.read(name).clone() for name in file.names()}  # type: ignore[union-attr]


def whole_loss(model: Any, rows: list[list[int]]) -> Tensor:
    """The mean cross entropy of each next token, every row whole and by itself, through `model(row)`."""
    total, count = torch.zeros(()), 0
    for row in rows:
        logits = model(torch.tensor([row]))
        logits = getattr(logits, "logits", logits)
        total = total + F.cross_entropy(logits[0, :-1], torch.tensor(row[1:]), reduction="sum")
        count += len(row) - 1
    return total / count


def ragged(*lengths: int) -> list[list[int]]:
    ids = text(max(lengths), rows=len(lengths), seed=3)
    return [row[:length].tolist() for row, length in zip(ids, lengths)]


def gradients(model: TrainableModel) -> dict[str, Tensor | None]:
    return {name: leaf.grad for name, leaf in model.named_parameters()}


def furthest(got: dict[str, Tensor | None], expected: dict[str, Tensor | None], floor: float) -> tuple[float, str]:
    """The largest difference of a gradient relative to the largest number of its tensor, or to `floor`; and whose."""
    worst = (0.0, "")
    for name, grad in expected.items():
        own = got[name]
        zero = torch.zeros(())
        grad, own = zero if grad is None else grad, zero if own is None else own
        error = float((own - grad).detach().abs().max() / max(float(grad.abs().max()), floor))
        worst = max(worst, (error, name))
    return worst
