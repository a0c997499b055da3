"""The questions to a card, as far as the interpreter can answer them; and what `lmstate doctor` tells of a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from bench import gpu_questions
from lmstate.ops import dispatch
from lmstate.ops.cuda import device


def test_products_attention_and_recurrences_have_equal_bits(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_questions.main(["--device", "cpu", "--small"])
    card, *answers = map(json.loads, capsys.readouterr().out.splitlines())
    assert card["card"] == "cpu" and {"bits", "cublas", "attention", "recurrences"} <= {a["question"] for a in answers}
    assert [answer["rows that differ"] for answer in answers if answer["question"] == "bits"] == [[]] * 4
    assert all(answer["equal"] for answer in answers if answer["question"] == "recurrences")
    apart = [answer.get("queries that differ alone", []) for answer in answers if answer["question"] == "attention"]
    assert apart == [[], []]


def test_what_runs_on_a_gpu_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert dispatch.gpu_info() == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "reason", lambda index: "")
    monkeypatch.setattr(device, "shared_bytes", lambda index: 101_376)
    found = {each["op"]: each for each in dispatch.gpu_info()}
    assert found["linear"]["body"] == found["sample"]["body"] == "Triton"
    assert found["attend_latent"]["body"] == "Triton or reference"
    monkeypatch.setenv("LMSTATE_GPU_BITS", "0")
    assert {each["op"]: each for each in dispatch.gpu_info()}["linear"]["body"] == "Triton and torch"
    monkeypatch.setenv("LMSTATE_OPS", "reference")
    assert {each["why"] for each in dispatch.gpu_info()} == {"LMSTATE_OPS=reference"}
