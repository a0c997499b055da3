"""A fault at any torch call on the engine's thread ends one operation, and leaves sessions, rows and answers whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import lmstate
from lmstate.engine import Session
from tests.engine.alone import alone
from tests.faults.harness import FailingCall
from tests.zoo import ours, text

PROMPT, OTHER = text(70, seed=1)[0].tolist(), text(30, seed=2)[0].tolist()
KINDS = ("llama", "mistral", "qwen3_next-dense", "deepseek_v3")


class Standing:
    """An engine with a session of two turns and a mark, a file of it, and a request of its prompt behind it."""

    def __init__(self, engine: lmstate.Engine, folder: Path) -> None:
        self.engine, self.file, self.written = engine, folder / "before", folder / "after"
        self.session = engine.session("one")
        self.session.send(PROMPT, max_new_tokens=4, ignore_eos=True).result(60)
        self.session.mark()
        self.session.send([5, 6], max_new_tokens=3, ignore_eos=True).result(60)
        self.session.save(self.file)

    def told(self, session: Session) -> tuple[list[int], str]:
        return session.tokens, session.record.to_json()


def submit(prompt: list[int], **options: int) -> Callable[[Standing], object]:
    return lambda at: at.engine.submit(prompt, max_new_tokens=4, ignore_eos=True, **options).result(60)


OPERATIONS: dict[str, Callable[[Standing], object]] = {
    "submit": submit(OTHER),
    "submit what is known": submit([*PROMPT, 3]),
    "several answers": submit(OTHER, n=2),
    "explain": lambda at: at.engine.explain([*PROMPT, 3]),
    "held": lambda at: at.engine.held(PROMPT),
    "tree": lambda at: at.engine.tree(),
    "prefixes": lambda at: at.engine.prefixes(PROMPT),
    "stats": lambda at: at.engine.stats(),
    "load": lambda at: at.engine.load_session("two", at.file),
    "begin": lambda at: at.engine.session("two"),
    "send": lambda at: at.session.send([8, 9], max_new_tokens=3, ignore_eos=True).result(60),
    "rewind": lambda at: at.session.rewind(40),
    "mark": lambda at: at.session.mark(),
    "undo": lambda at: at.session.undo(),
    "fork": lambda at: at.session.fork("two"),
    "save": lambda at: at.session.save(at.written),
    "close": lambda at: at.session.close(),
}


@contextmanager
def failing(engine: lmstate.Engine, at: int | None) -> Iterator[FailingCall]:
    """Count torch calls on the engine's thread, and have the one at this place fail."""
    mode = FailingCall(at)
    engine.call(lambda _: mode.__enter__()).result()
    try:
        yield mode
    finally:
        mode.at = None
        engine.call(lambda _: mode.__exit__(None, None, None)).result()


def sweep(kind: str, operation: str, most: int, folder: Path) -> int:
    """Have about `most` of the calls of an operation fail, each in an engine of its own; how many calls there are."""
    model, act = ours(kind), OPERATIONS[operation]
    with lmstate.Engine(model, rows=2) as engine:
        standing = Standing(engine, folder)
        with failing(engine, None) as counting:
            act(standing)
        whole = standing.told(standing.session)
        calls = counting.calls
        standing.written.unlink(missing_ok=True)
    for at in range(1, calls + 1, max(1, calls // most)):
        with lmstate.Engine(model, rows=2) as engine:
            standing = Standing(engine, folder)
            session = standing.session
            before, sessions = standing.told(session), engine.sessions()
            failed = False
            with failing(engine, at):
                try:
                    act(standing)
                except (MemoryError, RuntimeError, lmstate.StateError):
                    failed = True
            place = f"{operation}, torn at call {at} of {calls}"
            if failed:
                assert standing.told(session) == before, place
                assert operation == "close" or engine.sessions() == sessions, place
                assert not standing.written.exists(), place
            else:
                assert standing.told(session) == whole, place
                standing.written.unlink(missing_ok=True)
            assert not engine.at_work() and engine.stats()["decoding"] == engine.stats()["reading"] == 0, place
            requests = [engine.submit(OTHER, max_new_tokens=4, ignore_eos=True) for _ in range(3)]
            if operation != "close":
                requests.append(session.send([3], max_new_tokens=4, ignore_eos=True))
            answers = [request.result(60).tokens[0] for request in requests]
            prompts = [OTHER] * 3 + [[*(before if failed else whole)[0], 3]]
            wanted = [alone(model, prompt, 4, ends=frozenset())[0] for prompt in (prompts[0], prompts[3])]
            assert answers == [wanted[0]] * 3 + wanted[1:] * (operation != "close"), place
    return calls


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_fault_at_any_call_of_an_engine_leaves_it_whole(operation: str, tmp_path: Path) -> None:
    sweep("qwen3_next-dense" if operation in ("rewind", "send", "load") else "llama", operation, 4, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_fault_at_every_single_call_of_an_engine_leaves_it_whole(kind: str, operation: str, tmp_path: Path) -> None:
    sweep(kind, operation, 10_000, tmp_path)
