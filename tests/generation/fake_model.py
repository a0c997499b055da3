"""A model without weights, of the same surface as the real one: its logits are a pure function of a row's tokens.

`script` maps a row's whole token history to the next token where it has an answer; elsewhere the logits are
pseudo-random.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmstate.errors import CapacityError, UnsupportedError
from lmstate.models.config import ModelConfig
from lmstate.vision.reader import PicturePrompt

EOS = 0
PIECES: list[bytes] = [b"<eos>"]
PIECES += [bytes([byte]) for byte in range(256)]  # id = byte + 1
PIECES += [b" the", b" END", b"EN", b"D of", b"\xe2\x82", b"\xac!", b" \xf0\x9f", b"\x98\x80", b"hello", b"ST", b"OP"]
IDS = {piece: index for index, piece in enumerate(PIECES)}
VOCAB = len(PIECES)


class FakeStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(PIECES[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def follow(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.push(token)


class FakeTokenizer:
    begin: tuple[int, ...] = ()
    vocabulary = {piece.decode("latin-1"): token for piece, token in IDS.items()}  # noqa: RUF012

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*(self.begin if add_special_tokens else ()), *(byte + 1 for byte in text.encode())]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(PIECES[token] for token in ids).decode("utf-8", "replace")

    def stream(self) -> FakeStream:
        return FakeStream()


class FakeState:
    """Committed tokens and queued tokens per row; `lengths` and `tokens` count both."""

    def __init__(self, rows: int, capacity: int | None = None) -> None:
        self.rows = rows
        self.capacity = capacity
        self.computed: list[list[int]] = [[] for _ in range(rows)]
        self.queued: list[list[int]] = [[] for _ in range(rows)]
        self.speculative: list[list[int]] = [[] for _ in range(rows)]

    @property
    def lengths(self) -> list[int]:
        return [len(a) + len(b) for a, b in zip(self.computed, self.queued)]

    @property
    def pending(self) -> list[int]:
        return [len(ids) for ids in self.speculative]

    def step_room(self, row: int, most: int) -> int:
        return most if self.capacity is None else min(most, self.capacity - self.lengths[row])

    def discard(self) -> None:
        self.speculative = [[] for _ in range(self.rows)]

    def commit(self, counts: Sequence[int]) -> None:
        for row, count in enumerate(counts):
            assert 0 <= count <= len(self.speculative[row])
            self.computed[row] += self.speculative[row][:count]
            self.speculative[row] = []

    def rewind_cost(self, row: int, to: int) -> int:
        return max(0, to - len(self.computed[row]))

    def memory(self) -> dict[str, int]:
        return {"attention": 8 * sum(self.lengths)} if any(self.lengths) else {}

    def tokens(self, row: int) -> list[int]:
        return self.computed[row] + self.queued[row]

    def media(self, row: int) -> tuple[()]:
        return ()

    def queue(self, row: int, ids: Sequence[int]) -> None:
        if self.capacity is not None and self.lengths[row] + len(ids) > self.capacity:
            raise CapacityError("full")
        self.queued[row] += ids

    def mark(self, row: int) -> None:
        assert 0 <= row < self.rows

    def snapshot(self, row: int) -> tuple[list[int], list[int]]:
        return [*self.computed[row]], [*self.queued[row]]

    def restore(self, row: int, snapshot: tuple[list[int], list[int]]) -> None:
        computed, queued = snapshot
        self.computed[row], self.queued[row] = [*computed], [*queued]

    def rewind(self, row: int, to: int) -> None:
        tokens = self.tokens(row)
        assert 0 <= to <= len(tokens)
        self.computed[row], self.queued[row] = tokens[:to], []


class FakeModel:
    config = ModelConfig("fake", VOCAB, hidden_size=1)
    context_size: int | None = None
    start_id: int | None = None
    hears = False
    eos_ids = frozenset({EOS})
    has_tokenizer = True
    defaults: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed

    def __init__(self, script: Callable[[list[int]], int | None] = lambda tokens: None) -> None:
        self.tokenizer = FakeTokenizer()
        self.script = script
        self.calls = 0
        self.fed = 0
        self.fail_at: int | None = None

    def encode(self, messages: Sequence[dict[str, Any]], **variables: Any) -> PicturePrompt:
        return PicturePrompt(self.tokenizer.chat(messages, **variables))  # type: ignore[attr-defined]

    def pictures(self) -> None:
        raise UnsupportedError("pictures are not read by models of the family 'fake'")

    def new_state(self, rows: int = 1, kv: None = None, carries: int = 32) -> FakeState:
        return FakeState(rows)

    def __call__(
        self, tokens: list[list[int]], state: FakeState, logits: str = "last", commit: bool = True
    ) -> Tensor | None:
        assert len(tokens) == state.rows and not any(state.pending)
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("the forward failed")
        for row, new in enumerate(tokens):
            assert all(isinstance(token, int) for token in new)
            self.fed += len(state.queued[row]) + len(new)
            state.computed[row] += state.queued[row]
            state.queued[row] = []
        starts = [list(held) for held in state.computed]
        state.speculative = [list(new) for new in tokens]
        if commit:
            state.commit([len(new) for new in tokens])
        if logits == "none":
            return None
        if logits == "last":
            return torch.stack([self._logits(held + list(new)) for held, new in zip(starts, tokens)])
        out = torch.zeros(len(tokens), max(map(len, tokens)), VOCAB)
        for row, (held, new) in enumerate(zip(starts, tokens)):
            for at in range(len(new)):
                out[row, at] = self._logits(held + list(new[: at + 1]))
        return out

    def follow(self, tokens: list[list[int]], state: FakeState, most: int) -> None:
        """It has no graphs."""

    def _logits(self, held: list[int]) -> Tensor:
        if not held:
            return torch.full((VOCAB,), float("nan"))
        generator = torch.Generator().manual_seed(random.Random(str(held)).getrandbits(31))
        logits = torch.randn(VOCAB, generator=generator) * 3
        logits[EOS] = -20.0
        scripted = self.script(held)
        if scripted is not None:
            logits[scripted] = 100.0
        return logits


def saying(prompt: list[int], answer: Sequence[int]) -> Callable[[list[int]], int | None]:
    """A script: after `prompt`, the tokens of `answer` one by one, then end of sequence."""
    whole = list(prompt) + list(answer) + [EOS]

    def script(held: list[int]) -> int | None:
        return whole[len(held)] if len(held) < len(whole) and held == whole[: len(held)] else None

    return script


def ids(*pieces: bytes | str) -> list[int]:
    """Token ids of the pieces given; a text becomes one token a byte."""
    out: list[int] = []
    for piece in pieces:
        out += [IDS[piece]] if isinstance(piece, bytes) else [byte + 1 for byte in piece.encode()]
    return out
