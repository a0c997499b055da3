"""An exported step continues by itself, far beyond any window, and equals the model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import lmstate
from lmstate import UnsupportedError
from lmstate.integrations.export import ExportedStep
from lmstate.ops import quantize
from tests.invariants.mirror import close
from tests.sweeps import sampled
from tests.zoo import ours, text

PROMPT = 8


def feed(program: torch.nn.Module, tokens: Tensor, width: int) -> Tensor:
    """tokens `[R, n]` in steps of `width`, the last one padded -> the logits after the last."""
    logits = torch.empty(0)
    for start in range(0, tokens.shape[1], width):
        part = tokens[:, start : start + width]
        counts = torch.full((len(part),), part.shape[1])
        logits = program(torch.nn.functional.pad(part, (0, width - part.shape[1])), counts)
    return logits


# Full attention, windows alone, windows and full; convolutions, the delta rule and the RG-LRU between attention.
EXPORTED = ["llama", "mistral", "gemma3-pattern", "lfm2", "qwen3_5", "recurrent_gemma"]


@pytest.mark.parametrize("case", sampled(EXPORTED, ("gemma3-pattern", "qwen3_5")))
def test_exported_steps_equal_the_model_token_by_token(case: str, tmp_path: Path) -> None:
    model, tokens = ours(case), text(150, rows=2)
    whole = model(tokens)
    torch.export.save(ExportedStep(model, 2, 149, 1, longest=PROMPT).export(), tmp_path / "one.pt2")
    one = torch.export.load(tmp_path / "one.pt2").module()
    many = ExportedStep(model, 2, 149, PROMPT).export().module()
    close(feed(many, tokens[:, :29], PROMPT), whole[:, 28])
    one.load_state_dict(many.state_dict())
    for at in range(29, 149):
        close(feed(one, tokens[:, at : at + 1], 1), whole[:, at])
    assert feed(one, tokens[:, 149:], 1).isnan().all(), "the rows are full"


def test_a_program_of_windows_alone_has_no_end() -> None:
    model, tokens = ours("mistral"), text(400)
    program = ExportedStep(model, 1, 1 << 40)
    assert sum(buffer.nbytes for buffer in program.buffers()) < 60_000
    program = program.export().module()
    close(feed(program, tokens, 1), model(tokens)[:, -1])


def test_a_saved_program_runs_where_lmstate_is_not(tmp_path: Path) -> None:
    model, tokens = ours("lfm2"), text(12)
    torch.export.save(ExportedStep(model, 1, 50, 4).export(), tmp_path / "step.pt2")
    torch.save(tokens, tmp_path / "tokens.pt")
    script = """
import sys, torch
sys.modules["lmstate"] = None
program = torch.export.load("step.pt2").module()
tokens = torch.load("tokens.pt")
for start in (0, 4, 8):
    logits = program(tokens[:, start:start + 4].contiguous(), torch.tensor([4]))
torch.save(logits, "logits.pt")
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True)
    close(torch.load(tmp_path / "logits.pt"), model(tokens)[:, -1])


def test_a_program_may_begin_in_the_middle_of_a_text() -> None:
    model, tokens = ours("mistral"), text(40)
    step = ExportedStep(model, 1, 100, 4)
    feed(step, tokens[:, :30], 4)
    close(feed(step.export().module(), tokens[:, 30:], 4), model(tokens)[:, -1])


def test_what_cannot_be_exported() -> None:
    model = ours("llama")
    with pytest.raises(UnsupportedError, match="must not decrease"):
        ExportedStep(model, 1, 10, 11)
    with pytest.raises(UnsupportedError, match="frequencies change at"):
        ExportedStep(ours("llama-dynamic"), 1, 200)
    with pytest.raises(UnsupportedError, match="cannot hold int8 weights"):
        ExportedStep(replace(model, network=replace(model.network, head=quantize(torch.randn(99, 64), "int8"))), 1, 10)


def test_a_program_holds_bfloat16_as_a_matrix(tmp_path: Path) -> None:
    """On the processor such weights lie in 12 bits, which only native bodies read."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model, tokens = lmstate.load(tmp_path, weights="bfloat16"), text(40) % 64
    program = ExportedStep(model, 1, 50).export()
    assert torch.uint8 not in {tensor.dtype for tensor in program.state_dict.values()}
    whole = model(tokens)[:, -1]
    torch.testing.assert_close(feed(program.module(), tokens, 1), whole, atol=0.02, rtol=0.02)
