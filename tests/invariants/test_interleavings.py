"""Random interleavings of all that can be done to a state, on every layer kind, against recomputation from scratch.

`pytest --interleavings N` runs a twelfth of N a kind, and N with `-m soak`; N is 200 by itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from tests.invariants.mirror import Fault, Mirror, failing_layer, failing_method
from tests.invariants.opened import opened
from tests.invariants.stretched import stretched
from tests.other_device import DEVICE, OtherDevice
from tests.zoo import ours, pair, text

# One small model for each way to remember: the zoo's cases that mix kinds as published models do.
KINDS = {
    "attention": "llama",
    "window": "mistral",
    "stretched rope": "llama-longrope",
    "shared": "gemma4-shared",
    "latent": "deepseek_v3",
    "chosen positions": "deepseek_v32",
    "compressed entries": "deepseek_v4",
    "chosen blocks": "minimax_m3",
    "pooled index": "qwen4_exp",
    "pooled index of latents": "glm5_next",
    "windows of latents": "dots3_note",
    "gated delta": "qwen3_next-dense",  # without experts: two nearly as good may change places with a rounding
    "channel-gated delta": "kimi_linear",
    "Mamba-2": "mamba2",
    "Mamba-1": "mamba",
    "parallel": "falcon_h1",
    "convolution": "lfm2",
    "convolved attention": "zaya-windows",
    "RG-LRU": "recurrent_gemma",
    "lightning": "minimax",
    "matrix memory": "xlstm",
    "averages a channel": "rwkv",
    "a source": "mbart",
    "a source and biases": "t5",
    "a sound": "whisper",
}
OPENED = {  # with learned positions in front of each row: vectors, and keys and values
    "learned vectors": ("mistral", False), "learned vectors of a hybrid": ("qwen3_next-dense", False),
    "learned vectors at learned positions": ("gpt2", False), "learned keys": ("llama", True),
    "learned keys in a window": ("mistral", True),
}  # fmt: skip
STRETCHED = {"window under a stretched rope": "mistral", "parallel under a stretched rope": "falcon_h1"}
ROUNDED = (  # with `carries` of 16 and 8 bits
    "gated delta", "channel-gated delta", "Mamba-2", "Mamba-1", "parallel", "RG-LRU", "lightning", "matrix memory",
    "averages a channel", "learned vectors of a hybrid",
)  # fmt: skip
NEAR_ROUNDING = [58, 63, 120]  # a bit before multiples of 64
OPERATIONS = 30
MOST = 150  # tokens of a row; it is rewound once it is longer

ROWS = st.integers(0, 2)
WIDTHS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 5, 9, 20]), min_size=3, max_size=3)
OPERATION = st.one_of(
    st.tuples(st.just("extend"), WIDTHS, st.sampled_from(["last", "all", "none"])),
    st.tuples(st.just("draft"), WIDTHS, st.tuples(*[st.floats(0, 1)] * 3)),
    st.tuples(st.just("discard"), WIDTHS),
    st.tuples(st.just("near"), ROWS, st.floats(0, 1)),
    st.tuples(st.just("far"), ROWS, st.floats(0, 1)),
    st.tuples(st.just("aside"), ROWS, st.floats(0, 1), st.integers(1, 9)),
    st.tuples(st.just("mark"), ROWS),
    st.tuples(st.just("queue"), ROWS, st.integers(1, 4)),
    st.tuples(st.just("select"), st.lists(st.one_of(st.none(), ROWS), min_size=3, max_size=3)),
    st.tuples(st.just("snapshot"), ROWS),
    st.tuples(st.just("restore"), ROWS, st.booleans()),
    st.tuples(st.just("rejoin"), ROWS, st.booleans(), st.integers(1, 9)),
    st.tuples(st.just("guest"), ROWS, st.integers(1, 9)),
    st.tuples(st.just("fail"), WIDTHS, st.floats(0, 1), st.booleans()),
)


class Run:
    """Does each operation to a mirror, with ids that never repeat."""

    def __init__(self, model: lmstate.Model, rewind: int, carries: int):
        self.mirror = Mirror(model, rows=3, deferred=True, rewind=rewind, carries=carries)
        self.rewind = rewind
        self.kept: tuple[lmstate.Snapshot, list[int]] | None = None
        self.fed = 0

    def ids(self, width: int) -> list[int]:
        self.fed += 1
        return text(width, seed=self.fed)[0].tolist()

    def extend(self, widths: list[int], logits: str) -> None:
        self.mirror.extend([self.ids(width) for width in widths], logits)

    def draft(self, widths: list[int], accepted: tuple[float, ...]) -> None:
        counts = [round(part * width) for part, width in zip(accepted, widths)]
        self.mirror.draft([self.ids(width) for width in widths], counts)

    def discard(self, widths: list[int]) -> None:
        self.mirror.model([self.ids(width) for width in widths], self.mirror.state, commit=False)
        self.mirror.state.discard()

    def near(self, row: int, part: float) -> None:
        length = len(self.mirror.rows[row])
        self.mirror.rewind(row, length - round(part * min(length, self.rewind)))

    def far(self, row: int, part: float) -> None:
        to = round(part * len(self.mirror.rows[row]))
        cost = self.mirror.state.rewind_cost(row, to)
        assert 0 <= cost <= to
        self.mirror.rewind(row, to)

    def aside(self, row: int, part: float, width: int) -> None:
        """Rewind a row while the others have pending tokens, then accept some of those."""
        mirror = self.mirror
        new = [[] if index == row else self.ids(width) for index in range(3)]
        mirror.model(new, mirror.state, commit=False, logits="all")
        self.far(row, part)
        n = width // 2
        mirror.state.commit([0 if index == row else n for index in range(3)])
        for own, ids in zip(mirror.rows, new):
            own += ids[:n]

    def mark(self, row: int) -> None:
        self.mirror.state.mark(row)

    def queue(self, row: int, width: int) -> None:
        ids = self.ids(width)
        self.mirror.state.queue(row, ids)
        self.mirror.rows[row] += ids

    def select(self, rows: list[int | None]) -> None:
        self.mirror.select(rows)

    def snapshot(self, row: int) -> None:
        self.kept = (self.mirror.state.snapshot(row), list(self.mirror.rows[row]))

    def restore(self, row: int, through_disk: bool) -> None:
        if self.kept is None:
            return
        snapshot, tokens = self.kept
        if through_disk:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "row.lmstate"
                snapshot.save(path)
                snapshot = lmstate.Snapshot.load(path)
        self.mirror.restore(row, snapshot, tokens)

    def rejoin(self, row: int, empty: bool, width: int) -> None:
        """Have a row leave, and another one take its number, while the others have pending tokens."""
        mirror = self.mirror
        new = [[] if index == row else self.ids(width) for index in range(3)]
        mirror.model(new, mirror.state, commit=False)
        mirror.state.remove(row)
        snapshot, tokens = (None, []) if empty or self.kept is None else self.kept
        assert mirror.state.add(snapshot) == row
        mirror.rows[row], mirror.sources[row] = list(tokens), None if snapshot is None else snapshot.source
        mirror.state.commit()
        for own, ids in zip(mirror.rows, new):
            own += ids

    def guest(self, row: int, width: int) -> None:
        """Have a fourth row join as a fork of one, beside pending tokens of another, and leave again."""
        mirror = self.mirror
        snapshot = mirror.state.snapshot(row)
        new = [self.ids(width) if index == (row + 1) % 3 else [] for index in range(3)]
        mirror.model(new, mirror.state, commit=False)
        assert mirror.state.add(snapshot) == 3
        mirror.rows.append(list(mirror.rows[row]))
        mirror.sources.append(mirror.sources[row])
        mirror.state.commit()
        for own, ids in zip(mirror.rows, new):
            own += ids
        mirror.extend([*[[]] * 3, self.ids(width)], "all")
        mirror.check(probe=False)
        mirror.state.remove(3)
        mirror.state.select([0, 1, 2])
        mirror.rows.pop()
        mirror.sources.pop()

    def fail(self, widths: list[int], where: float, after: bool) -> None:
        mirror = self.mirror
        ids = [self.ids(width + 1) for width in widths]
        index = int(where * (len(mirror.model.blocks) - 1))
        with failing_layer(mirror.model, index, after=after), pytest.raises(Fault):
            mirror.model(ids, mirror.state)
        layer = mirror.state.layers[index]
        with failing_method(layer, "select"), pytest.raises(Fault):
            mirror.state.select([2, 1, 0])
        with failing_method(layer, "reserve"), pytest.raises(Fault):
            mirror.model(ids, mirror.state)
        if any(mirror.rows):
            row = max(range(3), key=lambda r: len(mirror.rows[r]))
            snapshot = mirror.state.snapshot(row)
            with failing_method(layer, "restore"), pytest.raises(Fault):
                mirror.state.restore(row, snapshot)


every_kind = pytest.mark.parametrize("kind", [*KINDS, *STRETCHED, *OPENED])


@every_kind
def test_any_interleaving_equals_recomputation(kind: str, request: pytest.FixtureRequest) -> None:
    check_interleavings(model_of(kind), request.config.getoption("--interleavings") // 12)


@pytest.mark.parametrize("kind", ["attention", "window", "shared", "latent", "parallel"])
def test_any_interleaving_on_another_device_equals_recomputation(kind: str, request: pytest.FixtureRequest) -> None:
    """Where blocks lie in slabs: on the GPU where there is one, else on a pretended one."""
    theirs, _ = pair(KINDS[kind])
    with tempfile.TemporaryDirectory() as folder, OtherDevice():
        theirs.save_pretrained(folder)
        model = build(WeightLoader(open_source(Path(folder)), "float32", device=DEVICE))
        check_interleavings(model, request.config.getoption("--interleavings") // 33)


@pytest.mark.parametrize("kind", ROUNDED)
def test_any_interleaving_rounds_carries_to_the_same_bits(kind: str, request: pytest.FixtureRequest) -> None:
    check_interleavings(model_of(kind), request.config.getoption("--interleavings") // 40, carries=(16, 8))


@pytest.mark.soak
@every_kind
def test_many_interleavings_equal_recomputation(kind: str, request: pytest.FixtureRequest) -> None:
    check_interleavings(model_of(kind), request.config.getoption("--interleavings"))


def model_of(kind: str) -> lmstate.Model:
    if kind in OPENED:
        return opened(*OPENED[kind])
    return ours(KINDS[kind]) if kind in KINDS else stretched(STRETCHED[kind])


def check_interleavings(model: lmstate.Model, count: int, carries: tuple[int, ...] = (32,)) -> None:
    @settings(
        max_examples=count,
        phases=[Phase.generate],  # shrinking thirty operations on real models takes longer than reading them
        suppress_health_check=list(HealthCheck),
    )
    @given(
        operations=st.lists(OPERATION, min_size=OPERATIONS, max_size=OPERATIONS),
        rewind=st.sampled_from([0, 3, 16]),
        bits=st.sampled_from(carries),
    )
    def interleave(operations: list[tuple], rewind: int, bits: int) -> None:
        run = Run(model, rewind, bits)
        if bits < 32:
            run.extend(NEAR_ROUNDING, "none")
        for turn, (name, *arguments) in enumerate(operations):
            run.mirror.condition()
            getattr(run, name)(*arguments)
            for row, tokens in enumerate(run.mirror.rows):
                if len(tokens) > MOST:
                    run.far(row, 0.3)
            run.mirror.check(probe=turn % 3 == 2)

    interleave()
