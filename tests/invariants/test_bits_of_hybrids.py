"""Recurrent mixers at decode sizes: a row's logits are, bit for bit, those of the row alone."""

from __future__ import annotations

import pytest
import torch

from lmstate.ops import dispatch
from tests.zoo import ours, text

CASES = (
    "qwen3_5",
    "olmo_hybrid",
    "mamba2",
    "mamba",
    "falcon_mamba",
    "bamba",
    "granitemoehybrid",
    "lfm2",
    "lfm3",
    "bailing_hybrid",
    "zaya",
    "xlstm",
    "rwkv",
    "recurrent_gemma",
    "deepseek_v2",
    "deepseek_v3",
)


@pytest.mark.parametrize("case", CASES)
def test_a_row_decodes_to_the_same_bits_beside_others(case: str) -> None:
    if dispatch.choice().library is None:
        pytest.skip("torch's products, which the references use, round by the number of rows")
    model = ours(case)
    # So many rows that torch's elementwise functions would round a row alone (the rest of a vector) otherwise.
    rows = [text(length, seed=length)[0].tolist() for length in (9, 4, 13, 13, 13, 13)]
    together, alone = model.new_state(len(rows)), model.new_state(1)
    model([row[:3] for row in rows], together)
    model([rows[0][:3]], alone)
    for at in range(3, 13):
        got = model([row[at : at + 1] for row in rows], together)
        if at < len(rows[0]):
            wanted = model([rows[0][at : at + 1]], alone)
            assert torch.equal(got[0], wanted[0]), f"token {at}"
