"""Blocks over devices: numbers of them by bytes, by room and as asked, with no cut where none may be."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmstate.checkpoints.placement import DevicePlacement, Sizes, runs_of
from lmstate.errors import ModelError

NAMES = tuple(torch.device("cuda", index) for index in range(4))
CPU = torch.device("cpu")


def counts(devices: tuple[torch.device, ...]) -> list[int]:
    return [stop - first for _, first, stop in runs_of(devices)]


def shares(sizes: Sizes, numbers: list[int]) -> list[int]:
    bounds = [0, *accumulate(numbers)]
    held = [sum(sizes.blocks[a:b]) for a, b in pairwise(bounds)]
    held[0] += sizes.before
    held[-1] += sizes.behind
    return held


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 60), st.integers(0, 60), st.integers(1, 4),
    st.data(),
)  # fmt: skip
def test_the_largest_share_is_the_smallest(
    blocks: list[int], before: int, behind: int, devices: int, data: st.DataObject
) -> None:
    sizes, number = Sizes(before, blocks, behind), len(blocks)
    reads = [data.draw(st.sampled_from([None, None, *range(at)])) for at in range(number)]
    free = [cut for cut in range(1, number) if all(r is None or r >= cut or at < cut for at, r in enumerate(reads))]
    possible = [[b - a for a, b in pairwise((0, *cuts, number))] for cuts in combinations(free, devices - 1)]
    placement = DevicePlacement(NAMES[:devices])
    if not possible:
        with pytest.raises(ModelError, match=f"name {len(free) + 1} devices at most"):
            placement.of_blocks(sizes, reads)
        return
    found = counts(placement.of_blocks(sizes, reads))
    assert found in possible
    assert max(shares(sizes, found)) == min(max(shares(sizes, each)) for each in possible)


def test_gpus_are_filled_in_their_order_and_the_processor_takes_the_rest() -> None:
    sizes = Sizes(5, [10] * 6, 7)

    def over(*room: int | None) -> list[tuple[torch.device, int, int]]:
        devices = (*NAMES[: len(room) - 1], CPU)
        return runs_of(DevicePlacement(devices, room=room).of_blocks(sizes))

    first, second = NAMES[:2]
    assert over(72, None) == [(first, 0, 6)]
    assert over(71, None) == [(first, 0, 5), (CPU, 5, 6)]
    assert over(25, 30, None) == [(first, 0, 2), (second, 2, 5), (CPU, 5, 6)]
    assert over(14, 40, None) == [(second, 0, 3), (CPU, 3, 6)]  # not even one block beside the embedding
    assert over(0, None) == [(CPU, 0, 6)]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("nowhere", "torch cannot use it here"),
        (["cpu", "nowhere"], "torch cannot use it here"),
        ("cpu,cpu", "names cpu twice"),
        ({"cpu": 0}, "1 block or more"),
        ({"cpu": True}, "1 block or more"),
        ("cpu=all", "give each device a number of blocks"),
        ("cpu=3,cuda", "give each device a number of blocks"),
        ([], "at least one device"),
        (3.5, "device"),
    ],
)
def test_bad_requests_are_refused(asked: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DevicePlacement.of(asked)  # type: ignore[arg-type]


def test_one_device_may_be_given_its_number_of_blocks() -> None:
    assert DevicePlacement.of("cpu=2").of_blocks(Sizes(1, [1, 1], 1)) == (CPU, CPU)
    with pytest.raises(ModelError, match=r"device=\{cpu: 3\} was asked for, which places 3 blocks; the model has 2"):
        DevicePlacement.of({"cpu": 3}).of_blocks(Sizes(1, [1, 1], 1))
