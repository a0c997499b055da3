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
    """Goes on from history `base` with a message of `new` tokens, which is answered with `answer` tokens.

    `back`: so many messages of the user at the end of the history are taken back first, with their answers, and the
    new message begins with the first `same` tokens of the earliest of them: an edit. `cut`: a part of the history's
    tokens, of 1, after which all is taken back, wherever that is. `save`: the name under which the whole, with its
    answer, is kept; None for a side request. Turns of one `wave` come at the same time.
    """

    base: str | None
    new: int
    answer: int
    save: str | None
    wave: int
    back: int = 0
    same: int = 0
    cut: float = 1.0


def conversation(dice: random.Random, turns: int = 8) -> Iterator[Turn]:
    """Append, now and then regenerate the last answer, undo a turn, edit an earlier message, ask for a title."""
    yield Turn(None, 400, 40, "chat:0", 0)
    history = ["chat:0"]
    for wave in range(1, turns):
        name = f"chat:{wave}"
        what = dice.choice(["append", "append", "append", "regenerate", "undo", "edit"])
        if what == "undo" and len(history) > 1:
            history.pop()
        if what == "edit":
            back = dice.randint(1, min(3, len(history)))
            yield Turn(history[-1], dice.randint(20, 60), 40, name, wave, back, dice.randint(0, 4))
        elif what == "regenerate":
            yield Turn(history[-1], 0, 40, name, wave, 1, 10**6)
        else:
            yield Turn(history[-1], dice.randint(20, 120), 40, name, wave)
        yield Turn(name, 12, 8, None, wave)  # a title, of which nothing stays
        history.append(name)


def cuts(dice: random.Random, turns: int = 8) -> Iterator[Turn]:
    """Text that is cut anywhere and goes on otherwise: nothing tells where, before it happens."""
    yield Turn(None, 400, 40, "text:0", 0)
    for wave in range(1, turns):
        cut = dice.uniform(0.3, 0.8) if wave % 3 == 0 else 1.0
        yield Turn(f"text:{wave - 1}", dice.randint(20, 120), 40, f"text:{wave}", wave, cut=cut)


def agents(dice: random.Random, count: int = 5, turns: int = 5) -> Iterator[Turn]:
    """Agents that begin with one system prompt at the same time, then work each for itself with results of tools."""
    yield Turn(None, 600, 1, "system", 0)
    for turn in range(turns):
        for agent in range(count):
            name = f"agent:{agent}"
            base = name if turn else "system"
            yield Turn(base, dice.choice([30, 80, 300]), dice.randint(10, 40), name, turn + 1)


TRACES = {"conversation": conversation, "cuts": cuts, "agents": agents}


def trace(name: str, seed: int = 0) -> list[Turn]:
    return list(TRACES[name](random.Random(f"{name} {seed}")))
