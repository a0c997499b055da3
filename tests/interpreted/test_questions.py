"""The questions to a card, as far as the interpreter can answer them; and what `lmstate doctor` tells of a GPU."""

from __future__ import annotations

import pytest
import torch
from bench.gpu_questions import attention, bits, recurrences

from lmstate.ops import dispatch
from lmstate.ops.cuda import device


def test_products_attention_and_recurrences_have_equal_bits() -> None:
    assert [answer["rows that differ"] for answer in bits("cpu", small=True)] == [[]] * 4
    assert all(answer["equal"] for answer in recurrences("cpu", small=True))
    assert [answer.get("queries that differ alone", []) for answer in attention("cpu", small=True)] == [[], []]


def test_what_runs_on_a_gpu_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert dispatch.gpu_info() == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "reason", lambda index: "")
    monkeypatch.setattr(device, "shared_bytes", lambda index: 101_376)
    found = {each["op"]: each for each in dispatch.gpu_info()}
    assert found["linear"]["body"] == found["sample"]["body"] == "Triton"
    assert found["attend_latent"]["body"] == "Triton or reference"
    monkeypatch.setenv("LMSTATE_OPS", "reference")
    assert {each["why"] for each in dispatch.gpu_info()} == {"LMSTATE_OPS=reference"}
