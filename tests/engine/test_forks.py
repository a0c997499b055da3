"""A process that is forked from one with an engine: told that the engine is not there, and never held up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, sys, lmstate
from tests.zoo import ours

engine = lmstate.Engine(ours("llama"), store=sys.argv[1])
session = engine.session("one")
expected = engine.submit([1, 2, 3], max_new_tokens=4).result(600).tokens
lock = engine._changed
lock.acquire()  # as a thread of the parent may have it at that moment

def child(queue):
    told = []
    for act in (lambda: engine.submit([1]), lambda: engine.explain([1]), lambda: session.send([1]), engine.tree):
        try:
            act()
        except lmstate.engine.EngineClosed as error:
            told.append(str(error))
    engine.close()
    with lmstate.Engine(ours("llama")) as own:
        queue.put((told, own.submit([1, 2, 3], max_new_tokens=4).result(600).tokens))

queue = multiprocessing.get_context("fork").Queue()
process = multiprocessing.get_context("fork").Process(target=child, args=(queue,))
process.start()
lock.release()
try:
    told, tokens = queue.get(timeout=600)
except Exception:
    process.kill()
    sys.exit("the child hangs")
process.join(600)
assert tokens == expected == engine.submit([1, 2, 3], max_new_tokens=4).result(600).tokens
assert len(told) == 4 and all("make an engine in each process" in each for each in told), told
engine.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a platform without fork")
def test_a_forked_child_is_told_and_may_have_an_engine_of_its_own(tmp_path: object) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr
