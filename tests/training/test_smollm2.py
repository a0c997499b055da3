"""Real weights learn a text by heart, in chunks as whole."""

from __future__ import annotations

import pytest
import torch

import lmstate
from lmstate.training import TrainableModel, loss
from tests.real_model import smollm2

TEXT = (
    "The lighthouse keeper of Varn counts seventeen gulls every morning and writes their number in green ink into a "
    "ledger that nobody has opened since the winter of the blue frost. On Sundays he counts them twice, and if the two "
    "numbers differ he rows out to the skerry, and asks the seals."
)
STEPS = 48


def losses(chunk: int) -> list[float]:
    model = lmstate.load(smollm2(), weights="float32", trainable=True)
    assert isinstance(model, TrainableModel)
    ids = model.tokenizer.encode(TEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, [ids], chunk=chunk)
        value.backward()
        optimizer.step()
        seen.append(float(value.detach()))
    return seen


@pytest.mark.soak
def test_a_text_is_learned_by_heart_in_chunks_as_whole() -> None:
    whole, chunks = losses(512), losses(24)
    apart = max(abs(one - other) for one, other in zip(whole, chunks))
    print(f"{STEPS} steps: loss {chunks[0]:.4f} to {chunks[-1]:.4f}, at most {apart:.2e} from that of whole texts")
    assert chunks[-1] < 0.1
    assert apart < 1e-4
