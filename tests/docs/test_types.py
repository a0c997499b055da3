"""The README's Python has no error for a type checker, and the calls that it shows have the types that they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Without the types of torch, which take half a minute to read.
SETTINGS = """
[mypy]
strict = True
ignore_missing_imports = True
follow_imports = silent
[mypy-torch.*,numpy.*,transformers.*,pydantic.*,uvicorn.*,rich.*,jinja2.*,PIL.*,ray.*]
follow_imports = skip
"""
CALLS = """
from typing import assert_type

assert_type(model.tokenizer.encode("text"), list[int])
assert_type(model.tokenizer.decode([1]), str)
assert_type(model.chat([{"role": "user", "content": "Hi"}]), str)
assert_type(model.generate("The sea", max_new_tokens=3), str)
assert_type(model.generate([{"role": "user", "content": "Hi"}], state, temperature=0.5), str)
assert_type(model.generate(["a", "b"]), list[str])
assert_type(model.generate([1, 2], return_ids=True), list[int])
assert_type(model.generate([[1, 2], [3]], state, return_ids=True), list[list[int]])
answers, logprobs = model.generate(["a"], logprobs=2)
assert_type(state.lengths, list[int])
greedy = model([[1, 2]], state).argmax(-1).tolist()
every = model([[1], [2]], logits="all")[0, -1]
model([[1, 2]], state, logits="none")
"""
WRONG = """
model([[1]], state, logits="every")
model.new_state(row=2)
model([[1]], state, logits="none").argmax()
"""


def checked(folder: Path, code: str) -> str:
    """The messages of mypy for a module."""
    pytest.importorskip("mypy", reason="pip install mypy")
    (folder / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    (folder / "code.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(folder), "code.py"]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env={"MYPYPATH": str(ROOT / "src")}
    )
    assert found.returncode in (0, 1), found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests: the library is read once."""
    return tmp_path_factory.mktemp("types")


def readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.S | re.M))


def test_the_code_of_the_readme_has_no_error_for_a_type_checker(folder: Path) -> None:
    assert checked(folder, readme() + CALLS).startswith("Success")


def test_wrong_calls_have_one(folder: Path) -> None:
    found = checked(folder, readme() + WRONG)
    assert re.findall(r": error: .*\[([\w-]+)\]$", found, re.M) == ["arg-type", "call-arg", "union-attr"], found
