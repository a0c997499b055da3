"""transformers' own tests of generation and of caches pass with a StateCache in place of its DynamicCache.

`LMSTATE_TRANSFORMERS_TESTS` names the folder that holds transformers' `tests` (a checkout of the installed version's
tag; the sdist lacks the tests of generation, caches and models); without it this is skipped. docs/from-transformers.md
says what is left out, and why.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("LMSTATE_TRANSFORMERS_TESTS", "")
ROOT = Path(__file__).parents[2]
PLUGIN = "upstream_plugin"
GENERATES = "generate or beam or assisted or prompt_lookup or sample or cache"
NOT_OURS = "static or quantized or export or compile"
"""Tests of what the page says that a StateCache cannot do, and of other caches."""
MODELS = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "gpt2", "t5", "bart", "mamba", "mamba2", "falcon_mamba",
    "jamba", "bamba", "falcon_h1", "lfm2", "qwen3_next", "deepseek_v3",
)  # fmt: skip
given = pytest.mark.skipif(not FOLDER, reason="LMSTATE_TRANSFORMERS_TESTS names no folder with transformers' tests")


def run(folder: Path, file: str, chosen: str, *plugins: str) -> tuple[dict[str, str], str]:
    """Outcome of each test by its name, and all that pytest wrote."""
    command = [sys.executable, "-m", "pytest", file, "-k", chosen, "-rA", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += [word for plugin in plugins for word in ("-p", plugin)]
    # Not the root: transformers' tests are a package of the name of ours.
    places = [str(folder), str(ROOT / "src"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, places))
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr  # tests ran, and passed or failed
    return {name: kind for kind, name in re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", done.stdout, re.M)}, done.stdout


def worse_with_ours(folder: Path, file: str) -> tuple[list[str], str]:
    """Tests that pass with transformers' own cache and not with ours, and what pytest wrote of the latter."""
    chosen = f"({GENERATES}) and not ({NOT_OURS})"
    theirs, _ = run(folder, file, chosen)
    ours, written = run(folder, file, chosen, PLUGIN)
    return sorted(name for name, kind in theirs.items() if kind == "PASSED" and ours.get(name) != "PASSED"), written


@given
@pytest.mark.parametrize("file", ("utils/test_cache_utils.py", *(f"models/{m}/test_modeling_{m}.py" for m in MODELS)))
def test_what_passes_with_the_dynamic_cache_passes_with_ours(file: str) -> None:
    folder = Path(FOLDER).expanduser().resolve()
    folder = folder.parent if folder.name == "tests" else folder
    if not (folder / "tests" / file).exists():
        pytest.fail(f"{folder}/tests/{file} is not there: name a checkout of transformers with the models' tests")
    worse, written = worse_with_ours(folder, f"tests/{file}")
    assert not worse, f"{worse}\n{written[-6000:]}"


SUITE = """
import pytest, torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)

def kind(**given):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    given = {"max_new_tokens": 2, "return_dict_in_generate": True, **given}
    return type(model.generate(torch.tensor([[3, 4]]), **given).past_key_values).__name__

def test_generate_makes_its_own():
    assert kind() == "DynamicCache"

def test_generate_keeps_that_of_the_caller():
    assert kind(past_key_values=DynamicCache()) == "DynamicCache"

def test_generate_pairs():
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, **heads)
    model = BartForConditionalGeneration(config)
    pair = model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, return_dict_in_generate=True).past_key_values
    assert type(pair.self_attention_cache).__name__ == "DynamicCache"

def test_generate_never_passes():
    assert False

def test_generate_static():
    assert False
"""


@pytest.mark.soak  # of two processes that import transformers, for who names its folder
def test_the_harness_tells_which_tests_fail_because_of_the_cache(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    worse, written = worse_with_ours(tmp_path, "test_suite.py")
    assert worse == ["test_suite.py::test_generate_makes_its_own", "test_suite.py::test_generate_pairs"], written
    assert "'StateCache' == 'DynamicCache'" in written and "3 StateCaches were put in place" in written
