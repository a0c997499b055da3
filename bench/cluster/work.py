"""Traffic for a simulated cluster. Texts are chains of segments: who they are, and how many tokens they have."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from lmstate.engine.prefix.digests import ends


@dataclass(frozen=True)
class Segment:
    """A run of tokens behind another one. Two of one chain are the same tokens behind the same text."""

    chain: str
    start: int
    tokens: int

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def beginnings(self) -> list[tuple[int, str]]:
        """Names of the beginnings of the text that end within the segment, and their tokens."""
        return [(end, f"{self.chain}:{end}") for end in ends(self.end) if end > self.start]


def behind(text: tuple[Segment, ...], name: str, tokens: int) -> tuple[Segment, ...]:
    """A text with one more segment."""
    before = text[-1] if text else Segment("", 0, 0)
    chain = hashlib.sha256(f"{before.chain}/{name}/{tokens}".encode()).hexdigest()
    return (*text, Segment(chain, before.end, tokens))


@dataclass(frozen=True)
class Exchange:
    """A prompt's new tokens, those of the answer, and the seconds before it is sent."""

    new: int
    answer: int
    think: float = 0.0


@dataclass
class Client:
    """Sends its turns one after the other, from `begin` on. A client without a name is known by its prompts alone."""

    number: int
    begin: float
    turns: list[Exchange]
    text: tuple[Segment, ...] = ()
    name: str | None = None
    done: int = field(default=0, compare=False)


def agents(count: int = 24, turns: int = 33, seed: int = 1) -> Iterator[Client]:
    """Sessions of agents that share a system prompt of 600 tokens; results of tools are long, answers short."""
    dice, system = random.Random(seed), behind((), "system", 600)
    for number in range(count):
        said = [
            Exchange(dice.choice([60, 200, 500]), dice.randint(10, 30), dice.expovariate(0.5)) for _ in range(turns)
        ]
        yield Client(number, dice.uniform(0, 5), said, system, f"agent {number}")


def one_shots(
    count: int, rate: float, prefixes: int, shared: int, new: int, answer: int, seed: int = 1
) -> Iterator[Client]:
    """Requests without a name that begin with one of some prefixes, `rate` in a second."""
    dice, at = random.Random(seed), 0.0
    texts = [behind((), f"prefix {number}", shared) if shared else () for number in range(prefixes)]
    for number in range(count):
        at += dice.expovariate(rate)
        yield Client(number, at, [Exchange(new, answer)], dice.choice(texts))
