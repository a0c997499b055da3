"""attend_beside: a query attends to the last positions and to its chosen entries, and to nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmstate.ops import cpu, dispatch
from lmstate.ops.attention import attend_beside as module
from lmstate.ops.attention.attend_beside import attend_beside

HEADS, DIM, WINDOW, SCALE = 3, 8, 6, 0.4
SINKS = torch.tensor([-1.0, 0.5, 2.0])


@pytest.fixture(params=["reference", *cpu.usable()], autouse=True)
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = request.param
    library = None if name == "reference" else cpu.open_library(name)
    monkeypatch.setattr(dispatch, "choice", lambda: dispatch.Choice(name, "asked by the test", library))
    return name


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and entries of 2 rows of 40 positions, and the entries that each query chooses, then -1."""
    generator = torch.Generator().manual_seed(0)
    q, keys, entries = (
        torch.randn(2, *shape, generator=generator) for shape in ((40, HEADS, DIM), (1, 40, DIM), (1, 9, DIM))
    )
    chosen = torch.full((2, 40, 5), -1)
    for r in range(2):
        for t in range(40):
            count = min(5, (t + r) // 3)
            chosen[r, t, :count] = torch.randperm(9, generator=generator)[:count].sort().values
    return q, keys, entries, chosen


@pytest.mark.parametrize("gathered", [1, 1 << 23])
@pytest.mark.parametrize("piece", [1, 7, 40])
@pytest.mark.parametrize(("window", "sinks"), [(WINDOW, None), (WINDOW, SINKS), (2**31 - 1, SINKS)])
def test_a_window_and_chosen_entries_by_any_cut(
    piece: int, gathered: int, window: int, sinks: Tensor | None, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that no text fills, of a damaged config say, takes no memory."""
    monkeypatch.setattr(module, "GATHERED", gathered)
    q, keys, entries, chosen = drawn()

    def seen(start: int, stop: int) -> Tensor:
        places = torch.tensor([start] * 2), torch.tensor([stop - start] * 2)
        some = slice(start, stop)
        return attend_beside(
            q[:, some], keys, entries, chosen[:, some], *places, window=window, scale=SCALE, sinks=sinks
        )

    found = torch.cat([seen(start, min(40, start + piece)) for start in range(0, 40, piece)], dim=1)
    for r in range(2):
        for t in range(40):
            beside = entries[r, 0, chosen[r, t][chosen[r, t] >= 0]]
            both = torch.cat([keys[r, 0, max(0, t - window + 1) : t + 1], beside])
            scores = q[r, t] @ both.T * SCALE
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None]], dim=1)
            wanted = scores.softmax(-1)[:, : len(both)] @ both
            torch.testing.assert_close(found[r, t], wanted, rtol=1e-5, atol=1e-5)
    assert body == "reference" or torch.equal(found, seen(0, 40))


def test_padding_is_zero_and_reads_nothing() -> None:
    q, keys, entries, chosen = drawn()
    keys = keys.clone()
    keys[1, :, 25:] = float("nan")  # never stored
    places = torch.tensor([30, 20]), torch.tensor([10, 5])
    chosen = chosen[:, 30:].clone()
    chosen[1, 5:] = -1
    found = attend_beside(q[:, 30:], keys, entries, chosen, *places, window=WINDOW, scale=SCALE)
    assert found.isfinite().all() and not found[1, 5:].any() and bool(found[1, :5].any())
