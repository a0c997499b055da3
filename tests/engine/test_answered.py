"""Answers that were interrupted at any token go on elsewhere, to the bit as if they had not been."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lmstate
from lmstate.engine import Completion, Piece, Request
from lmstate.speculation import TextDrafter
from tests.engine.chat import thinking
from tests.engine.test_batching import paused
from tests.speculation.drafters import always

COUNT = 14
ASKED = [{"role": "user", "content": "why?"}]
SAMPLED: dict[str, Any] = {"temperature": 1.3, "seed": 5, "top_p": 0.95, "repetition_penalty": 1.2}


class Rhyme:
    """A grammar: of every five tokens the first two may be any, and the others repeat the first."""

    def __init__(self, vocab: int, taken: tuple[int, ...] = ()) -> None:
        self.vocab, self.taken = vocab, list(taken)
        self.complete, self.ended = True, False

    def allowed(self) -> torch.Tensor | None:
        return torch.arange(self.vocab) == self.forced()[0] if self.forced() else None

    def accept(self, token: int) -> None:
        assert not self.forced() or token == self.forced()[0]
        self.taken.append(token)

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    def forced(self) -> list[int]:
        at = len(self.taken) % 5
        return [] if at < 2 else [self.taken[len(self.taken) - at]] * (5 - at)

    def copy(self) -> Rhyme:
        return Rhyme(self.vocab, tuple(self.taken))


def options(name: str, model: lmstate.Model) -> dict[str, Any]:
    given: dict[str, Any] = {"max_new_tokens": COUNT, "ignore_eos": True}
    return (
        given
        | {
            "greedy": {},
            "sampled": SAMPLED | {"presence_penalty": 0.5},
            "grammar": SAMPLED | {"grammar": Rhyme(model.config.vocab_size)},
            "stop string": {"stop": "?"},  # set to what the text has
            "thinking": SAMPLED | {"max_thinking_tokens": 3},
            "several": SAMPLED | {"n": 2},
            "log probabilities": SAMPLED | {"logprobs": 2, "max_thinking_tokens": 3},
            "log probabilities of a grammar": {"logprobs": 0, "grammar": Rhyme(model.config.vocab_size)},
            "an end": {"ignore_eos": False, "stop_token_ids": []},  # set to a token that comes
        }[name]
    )


NAMES = (
    "greedy", "sampled", "grammar", "stop string", "thinking", "several", "log probabilities",
    "log probabilities of a grammar", "an end",
)  # fmt: skip


def told(completion: Completion) -> tuple[Any, ...]:
    return (
        completion.texts, completion.tokens, completion.certain, completion.logprobs, completion.finished,
        completion.stopped_by,
    )  # fmt: skip


def sent(pieces: list[Piece], index: int, count: int) -> str | None:
    """The text of an answer that came with its first `count` tokens; None if pieces do not end there."""
    text, tokens = "", 0
    for piece in [piece for piece in pieces if piece.index == index]:
        if tokens == count and tokens:
            break
        text, tokens = text + piece, tokens + len(piece.tokens)
    return text if tokens == count else None


def check(whole: Request, rest: Request, answered: list[list[int]]) -> None:
    expected, got = whole.result(600), rest.result(600)
    assert told(got) == told(expected), answered
    before, after = list(whole), list(rest)
    for index, had in enumerate(answered):
        pieces = [piece for piece in after if piece.index == index]
        assert [token for piece in pieces for token in piece.tokens] == expected.tokens[index][len(had) :]
        at = len(had)
        for piece in pieces:
            assert piece.start == at
            at += len(piece.tokens)
        assert [piece.finished for piece in pieces if piece.finished] == [expected.finished[index]]
        if had and (text := sent(before, index, len(had))) is not None:
            assert text + "".join(pieces) == expected.texts[index]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("case", ["llama", "qwen3_next-dense"])
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_was_cut_at_any_token_goes_on_as_it_would_have(name: str, case: str, drafts: bool) -> None:
    model = thinking(case)
    given = {"max_new_tokens": COUNT, "ignore_eos": True} | options(name, model)
    draft = always(TextDrafter(reading=20), model.config.vocab_size, depth=4) if drafts else None
    with lmstate.Engine(model, rows=4, draft=draft) as engine:
        if name in ("stop string", "an end"):
            plain = engine.submit(ASKED, **{**given, "stop": (), "ignore_eos": True}).result(600)
            given["stop"] = plain.texts[0][5:7] if name == "stop string" else ()
            given["stop_token_ids"] = [plain.tokens[0][-3]] if name == "an end" else []
        whole = engine.submit(ASKED, **given)
        tokens = whole.result(600).tokens
        assert name not in ("stop string", "an end") or whole.result().finished == ["stop"]
        go = paused(engine)
        cuts = [
            [ids[: (cut + 5 * index) % (len(ids) + 1)] for index, ids in enumerate(tokens)]
            for cut in range(max(map(len, tokens)) + 1)
        ]
        rests = [engine.submit(ASKED, **given, answered=answered) for answered in cuts]
        go.set()
        for answered, rest in zip(cuts, rests):
            check(whole, rest, answered)
    with lmstate.Engine(model, draft=draft) as other:
        check(whole, other.submit(ASKED, **given, answered=cuts[len(cuts) // 2]), cuts[len(cuts) // 2])


def test_little_memory_takes_rows_back_and_changes_nothing() -> None:
    model = thinking("llama")
    given = {"max_new_tokens": 60, "ignore_eos": True, "logprobs": 1, **SAMPLED}
    with lmstate.Engine(model) as engine:
        whole = engine.submit(ASKED, **given)
        tokens = whole.result(600).tokens[0]
    with lmstate.Engine(model, rows=6, memory=150_000, draft=None) as engine:
        go = paused(engine)
        cuts = [[tokens[:cut]] for cut in range(2, 58, 7)]
        rests = [engine.submit(ASKED, **given, answered=answered) for answered in cuts]
        go.set()
        for answered, rest in zip(cuts, rests):
            check(whole, rest, answered)
        assert engine.stats()["preempted"] > 0


def test_what_cannot_have_been_answered_is_refused() -> None:
    model = thinking("llama")
    with lmstate.Engine(model) as engine:
        for answered, options_, match in (
            ([[1], [2]], {}, "n=1"),
            ("text", {}, "n=1"),
            ([[10**6]], {}, "token id"),
            ([[1] * 9], {"max_new_tokens": 8}, "max_new_tokens"),
            ([[1]], {"temperature": 1.0}, "without a seed"),
        ):
            with pytest.raises((ValueError, lmstate.StateError), match=match):
                engine.submit(ASKED, answered=answered, **options_)  # type: ignore[arg-type]
        closing = model.tokenizer.encode("!</think> ", add_special_tokens=False)
        wrong = [token for token in range(20) if token not in closing][:3]
        end = next(iter(model.eos_ids))
        for answered, options_, match in (
            ([wrong], {"max_thinking_tokens": 1}, "cannot come there"),
            ([[3, 4, 5, 6]], {"grammar": Rhyme(model.config.vocab_size)}, "cannot come there"),
            ([[3, end]], {}, "cannot come there"),
            ([[3, 4, 5]], {"stop_token_ids": [4]}, "cannot come there"),
        ):
            with pytest.raises(lmstate.StateError, match=match):
                engine.submit(ASKED, answered=answered, **options_).result(600)
        assert engine.submit(ASKED, max_new_tokens=3, answered=[[]]).result(600).usage.generated <= 3
