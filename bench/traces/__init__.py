"""Recorded shapes of agents' traffic, made by a script: what follows what, how long, where it differs.

A trace is a list of requests in the order in which they come. What was said is not in it, nor any model's tokens: a
request names the history that it goes on from, and whoever runs it keeps the histories.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """Goes on from the first `keep` (a part of 1) of history `base`, with `new` tokens, to `answer` tokens more.

    `save`: the name under which the whole, with its answer, is kept; None for a side request. Turns of one `wave`
    come at the same time.
    """

    base: str | None
    keep: float
    new: int
    answer: int
    save: str | None
    wave: int


def conversation(dice: random.Random, turns: int = 8) -> Iterator[Turn]:
    """Append, now and then regenerate the last answer, undo a turn, edit in the middle, ask for a title."""
    yield Turn(None, 1.0, 400, 40, "chat:0", 0)
    history = ["chat:0"]
    for wave in range(1, turns):
        name = f"chat:{wave}"
        what = dice.choice(["append", "append", "append", "regenerate", "undo", "edit"])
        if what == "undo" and len(history) > 1:
            history.pop()
        if what == "edit":
            yield Turn(history[-1], dice.uniform(0.3, 0.8), dice.randint(20, 60), 40, name, wave)
        elif what == "regenerate":
            yield Turn(history[-1], 1.0, 30, 40, name, wave)
            yield Turn(history[-1], 1.0, 30, 40, name, wave)
        else:
            yield Turn(history[-1], 1.0, dice.randint(20, 120), 40, name, wave)
        yield Turn(name, 1.0, 12, 8, None, wave)  # a title, of which nothing stays
        history.append(name)


def agents(dice: random.Random, count: int = 5, turns: int = 5) -> Iterator[Turn]:
    """Agents that begin with one system prompt at the same time, then work each for itself with results of tools."""
    yield Turn(None, 1.0, 600, 1, "system", 0)
    for turn in range(turns):
        for agent in range(count):
            name = f"agent:{agent}"
            base = name if turn else "system"
            yield Turn(base, 1.0, dice.choice([30, 80, 300]), dice.randint(10, 40), name, turn + 1)


TRACES = {"conversation": conversation, "agents": agents}


def trace(name: str, seed: int = 0) -> list[Turn]:
    return list(TRACES[name](random.Random(f"{name} {seed}")))
