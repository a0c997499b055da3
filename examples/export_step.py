"""Export a model's step with its state, save it, load it again, and generate from the file alone.

    python examples/export_step.py

First SmolLM2 (its weights in float32, as in the file that `lmstate.load` finds or fetches), then a small model with a
sliding window, which goes on far beyond its window. The two programs of a model, one for prompts and one for single
tokens, share one state.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import lmstate
from lmstate.integrations.export import ExportedStep

PROMPT = 16  # tokens that the prompts' program takes at a time; the last part is padded


def export(model: lmstate.Model, folder: Path, capacity: int) -> None:
    """Write `prompt.pt2`, a step of 16 tokens, and `decode.pt2`, a step of one."""
    torch.export.save(ExportedStep(model, 1, capacity, PROMPT).export(), folder / "prompt.pt2")
    torch.export.save(ExportedStep(model, 1, capacity, 1, longest=PROMPT).export(), folder / "decode.pt2")


def generate(folder: Path, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy, from the two files; nothing here is lmstate."""
    prefill = torch.export.load(folder / "prompt.pt2").module()
    decode = torch.export.load(folder / "decode.pt2").module()
    for start in range(0, len(prompt), PROMPT):
        part = prompt[start : start + PROMPT]
        padded = torch.tensor([part + [0] * (PROMPT - len(part))])
        logits = prefill(padded, torch.tensor([len(part)]))
    decode.load_state_dict(prefill.state_dict())  # the state: everything that the prompt left
    ids: list[int] = []
    one = torch.tensor([1])
    while len(ids) < new_tokens:
        token = logits.argmax(-1, keepdim=True)
        ids.append(int(token))
        logits = decode(token, one)
    return ids


def expected(model: lmstate.Model, prompt: list[int], new_tokens: int) -> list[int]:
    """The same from the model itself."""
    state, ids, given = model.new_state(), [], prompt
    while len(ids) < new_tokens:
        given = [int(model([given], state).argmax())]
        ids += given
    return ids


def sliding_window_model(folder: Path) -> lmstate.Model:
    """A small Mistral of random weights; every layer sees 24 tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=24, max_position_embeddings=4096, initializer_range=0.3,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(folder)
    return lmstate.load(folder, weights="float32")


def main() -> None:
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        smol = lmstate.load("smollm2", weights="float32")
        export(smol, folder, capacity=256)
        prompt = smol.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
        ids = generate(folder, prompt, 12)
        assert ids == expected(smol, prompt, 12)
        answer = ids[: next((at for at, token in enumerate(ids) if token in smol.eos_ids), len(ids))]
        print("SmolLM2, from the file:", repr(smol.tokenizer.decode(answer)))

        model = sliding_window_model(folder / "mistral")
        export(model, folder, capacity=1 << 40)  # all layers forget: the capacity costs nothing
        prompt = [(7 * at) % 500 for at in range(40)]
        ids = generate(folder, prompt, 300)
        assert ids == expected(model, prompt, 300)
        print(f"a window of 24 tokens, {len(prompt) + len(ids)} tokens on: the file and the model agree on all")


if __name__ == "__main__":
    main()
