"""The example of docs/training.md for several processes: the same parameters as one process with all documents."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from lmstate.training import TrainableModel, loss
from tests.training.small import opened, ragged, saved, theirs

STEPS = 3


def train(model: TrainableModel, rows: list[list[int]], rank: int, world: int) -> None:
    """Each process takes its share of the rows; gradients are those of the sum over all of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    count = sum(len(row) - 1 for row in rows)
    for _ in range(STEPS):
        optimizer.zero_grad()
        part = loss(model, rows[rank::world], chunk=8, reduction="sum") / count
        part.backward()
        if world > 1:
            for leaf in model.parameters():
                if leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)
                dist.all_reduce(leaf.grad)
        optimizer.step()


def process(rank: int, folder: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = opened(Path(folder))
    train(model, ragged(20, 13, 9, 17), rank, 2)
    torch.save(dict(model.named_parameters()), f"{out}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    with saved(theirs("lfm2")) as folder:
        alone = opened(folder)
        train(alone, ragged(20, 13, 9, 17), 0, 1)
        multiprocessing.start_processes(
            process, (str(folder), str(tmp_path)), nprocs=2, start_method="spawn"
        )  # fmt: skip
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for name, leaf in alone.named_parameters():
        assert torch.equal(both[0][name], both[1][name]), name
        # The first steps of AdamW move by the sign of a gradient: where that is rounding alone, they differ.
        difference = (both[0][name] - leaf).detach().abs()
        assert float((difference > 1e-4).float().mean()) < 0.01, name
