"""`python -m lmstate` is the program."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lmstate

# As an extension module does that is imported at that moment, the finder loses the exception.
INTERRUPTED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background may have been told to ignore it
import lmstate, lmstate.cli

moment, sys.argv = sys.argv[1], ["lmstate", "generate", "smolm2", "hi"]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            strike()

def strike(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        if moment == "load":
            raise

sys.meta_path.insert(0, Finder())
if moment == "load":
    lmstate.load = strike
lmstate.cli.main()
"""


def test_the_package_runs_as_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "lmstate", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"lmstate {lmstate.__version__}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(("moment", "code"), [("typer", -2), ("torch", -2), ("load", 130)])
def test_an_interrupt_ends_the_program_at_any_moment_and_quietly(moment: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, moment], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
