"""`python -m lmstate` is the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lmstate
from lmstate.files.safetensors import write_tensors

# As an extension module does that is imported at that moment, the finder loses the exception.
INTERRUPTED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background may have been told to ignore it
import lmstate, lmstate.cli

moment, sys.argv = sys.argv[1], ["lmstate", "generate", "smollm2", "hi"]

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

# Mistakes that are told before torch is imported, which takes seconds.
MISTAKES = """
import sys

sys.modules["torch"] = None  # importing it is an error
from typer.testing import CliRunner
from lmstate.cli.app import app

for line in sys.stdin:
    result = CliRunner().invoke(app, line.split())
    print(result.exit_code, " ".join(result.stderr.split()))
"""
TOLD = {
    "generate smolm2 hi": "1 lmstate: no model called 'smolm2'",
    "chat smolm2": "1 lmstate: no model called 'smolm2'",
    "serve smolm2 --port 0": "1 lmstate: no model called 'smolm2'",
    "bench smolm2": "1 lmstate: no model called 'smolm2'",
    "convert smolm2 out --weights int4": "1 lmstate: no model called 'smolm2'",
    "convert smollm2 src --weights int4": "2 Usage:",
    "convert smollm2 out": "2 Usage:",
    "demo smolm2": "1 lmstate: no model called 'smolm2'",
    "inspect smolm2": "1 lmstate: no model called 'smolm2'",
    "generate smollm2 hi --draft smolm2": "1 lmstate: --draft is auto, text, heads, none or a model: no model called",
    "generate smollm2 hi --threads many": "2 Usage:",
    "generate smollm2 hi --top-p 3": "2 Usage:",
    "generate smollm2 hi --kv-bits 5": "2 Usage:",
    "generate smollm2 hi --logit-bias x": "2 Usage:",
    "generate smollm2 hi --state no-file": "1 lmstate: no-file: no such file",
    "generate smollm2 -f no-file": "1 lmstate: no-file: no such file",
    "generate smollm2 hi --raw --system x": "2 Usage:",
    "generate smollm2 hi --adapter no-folder": "2 Usage:",
    "serve smollm2 --api-key-file no-file": "2 Usage:",
    "perplexity smollm2 README.md --window 512 --ctx-size 256": "2 Usage:",
    "finetune smollm2 README.md -o out --epochs 0": "2 Usage:",
    "finetune smollm2 README.md -o out --full --dora": "2 Usage:",
    "finetune smollm2 README.md -o out --eval-every 2": "2 Usage:",
}


def test_the_package_runs_as_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "lmstate", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"lmstate {lmstate.__version__}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(("moment", "code"), [("typer", -2), ("torch", -2), ("load", 130)])
def test_an_interrupt_ends_the_program_at_any_moment_and_quietly(moment: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, moment], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_mistakes_are_told_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MISTAKES], input="\n".join(TOLD), capture_output=True, text=True, check=True
    )
    for (line, told), got in zip(TOLD.items(), done.stdout.splitlines(), strict=True):
        assert got.startswith(told), (line, got)
        assert "torch" not in got


@pytest.mark.parametrize(
    "line", ["models", "list", "cache list", "cache prune", "cache remove conversion", "ps --help"]
)
def test_tables_of_files_are_shown_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setenv("LMSTATE_CACHE", str(tmp_path))
    for folder, source in (("a" * 32, "model"), ("b" * 32, "other")):
        (tmp_path / folder).mkdir()
        with (tmp_path / folder / "int4.safetensors").open("wb") as file:
            write_tensors(file, {"x": torch.zeros(3)}, {"source": str(tmp_path / source)})
    (tmp_path / "model").mkdir()
    done = subprocess.run([sys.executable, "-c", MISTAKES], input=line, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"], done.stdout
    kept = {"cache prune": {"a" * 32}, "cache remove conversion": set()}.get(line, {"a" * 32, "b" * 32})
    assert {path.name for path in tmp_path.iterdir() if len(path.name) == 32} == kept


# What is imported is not searched for garbage; what is made later is.
COLLECTED = """
import gc, sys, lmstate, lmstate.cli

usual, early = gc.get_threshold(), []

def load(*_, **__):
    imported, counted = gc.get_freeze_count() > 10**5, gc.get_threshold() == usual
    raise ValueError(f"{early} {imported} {counted} {'torch' in sys.modules}")

lmstate.load, sys.argv = load, ["lmstate", "bench", "smollm2", "--threads", "1"]
gc.callbacks.append(lambda *_: early.append(len(sys.modules)) if gc.get_threshold() != usual else None)
lmstate.cli.main()
"""


def test_no_garbage_is_looked_for_while_torch_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "lmstate: [] True True True\n")


def test_what_loads_models_imports_no_compiler() -> None:
    heavy = "'torch._dynamo', 'torch._inductor', 'sympy', 'triton', 'transformers', 'pandas'"
    script = f"import sys, lmstate.loading; assert not {{{heavy}}} & set(sys.modules), set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
