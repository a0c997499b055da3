"""`load(context_size=...)`: past what a model was made for, its positions are those of transformers' YaRN."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lmstate
from lmstate.errors import ModelError
from lmstate.models.families import MOST_STRETCHED
from tests.zoo import auto, pair, text

MADE_FOR, LONGER = 40, 160
YARN = {"rope_type": "yarn", "factor": LONGER / MADE_FOR, "original_max_position_embeddings": MADE_FOR}


def saved(case: str, folder: Path) -> dict[str, Any]:
    """Save a model of the zoo as made for few tokens. Returns its config."""
    pair(case)[0].save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = MADE_FOR
    (folder / "config.json").write_text(json.dumps(config))
    return config


# Every pair of features turns, some do, those of full layers among sliding ones, latents, beside recurrences.
@pytest.mark.parametrize("case", ["llama", "glm", "gemma3", "deepseek_v3", "qwen3_next", "falcon_h1"])
def test_longer_texts_have_the_logits_of_transformers_with_yarn(case: str, tmp_path: Path) -> None:
    config = saved(case, tmp_path)
    ours = lmstate.load(tmp_path, "float32", context_size=LONGER)
    short = lmstate.load(tmp_path, "float32", context_size=20)
    as_made = lmstate.load(tmp_path, "float32")
    assert (ours.context_size, short.context_size, as_made.context_size) == (LONGER, 20, MADE_FOR)
    assert f"{LONGER} tokens, stretched by YaRN from {MADE_FOR}" in repr(ours)
    assert short.fingerprint == as_made.fingerprint != ours.fingerprint
    inner = config.get("text_config", config)
    ropes = inner["rope_parameters"]
    ropes.get("full_attention", ropes).update(YARN)
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = text(140)
    theirs = auto(pair(case)[0].config).from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    state = ours.new_state()
    for cut in ids[0].split(35):
        ours([cut.tolist()], state)
    snapshot = state.snapshot(0)
    with pytest.raises(lmstate.StateError, match="another model"):
        as_made.new_state().restore(0, snapshot)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("apertus", "stretched to them already"),  # by llama3's way
        ("xglm", "does not stretch its positions"),  # of sines
        ("jamba", "does not stretch its positions"),  # there are none
        ("gpt2", "does not stretch its positions"),  # learned
    ],
)
def test_positions_that_yarn_does_not_stretch_are_refused(case: str, why: str, tmp_path: Path) -> None:
    if case == "gpt2":
        pair(case)[0].save_pretrained(tmp_path)
        longer = 1 + json.loads((tmp_path / "config.json").read_text())["n_positions"]
    else:
        saved(case, tmp_path)
        longer = LONGER
    with pytest.raises(ModelError, match=why):
        lmstate.load(tmp_path, "float32", context_size=longer)


@pytest.mark.parametrize("times", [MOST_STRETCHED, MOST_STRETCHED + 1])
def test_a_context_that_yarn_was_never_measured_for_warns(times: int, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert lmstate.load(tmp_path, "float32", context_size=times * MADE_FOR).context_size == times * MADE_FOR
    assert [f"{times} times the {MADE_FOR} tokens" in str(one.message) for one in told] == [True] * (
        times > MOST_STRETCHED
    )


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_a_context_of_no_tokens_is_refused(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="context_size"):
        lmstate.load(tmp_path, context_size=size)


def test_a_state_of_more_tokens_than_the_model_was_made_for_warns() -> None:
    model = pair("llama")[1]
    assert model.context_size is not None
    with pytest.warns(UserWarning, match=f"made for {model.context_size} tokens"):
        model.new_state(capacity=model.context_size + 1)
