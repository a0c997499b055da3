"""Carries of recurrences in 32, 16 and 8 bits: bytes, drift over a long text, perplexity, and the speed of decoding.

Random weights of real shapes, and a small hybrid that is trained here, byte by byte, on a part of Python's reference
and reads another part. `python -m bench.carries [--threads N] [--steps N] [--tokens N]`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

import lmstate
from bench import hybrids

WIDTHS = (32, 16, 8)
CHUNK = 384
BATCH, LENGTH = 8, 256


def small() -> Any:
    """A quarter of Qwen3.5-0.8B's layers, whose carries are as large as there."""
    config = hybrids.qwen3_5()
    config.num_hidden_layers, config.vocab_size = 6, 32768
    config.layer_types = config.layer_types[:6]
    return config


def tiny() -> Any:
    """Three layers of delta rule and one of attention, over bytes."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], Any]] = {"qwen3.5-0.8b, 6 layers": small, "mamba2-130m": hybrids.mamba2}


def trained(folder: Path, steps: int, text: Tensor) -> None:
    """Train `tiny` on bytes `text` int64 `[N]`, and save it."""
    torch.manual_seed(0)
    config = tiny()
    model = hybrids.auto_class(config).from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,)).tolist()
        batch = torch.stack([text[at : at + LENGTH + 1] for at in starts])
        logits = model(batch[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}: {loss:.3f} nats per byte", flush=True)
    model.save_pretrained(folder)


def read(model: lmstate.Model, ids: list[int]) -> None:
    """Read a text in states of all widths side by side, and print how far they part from 32 bits."""
    states = {bits: model.new_state(carries=bits) for bits in WIDTHS}
    parted: dict[int, list[Tensor]] = {bits: [] for bits in WIDTHS}
    agreed: dict[int, list[Tensor]] = {bits: [] for bits in WIDTHS}
    losses: dict[int, list[Tensor]] = {bits: [] for bits in WIDTHS}
    for at in range(0, len(ids) - 1, CHUNK):
        piece = ids[at : min(at + CHUNK, len(ids) - 1)]
        after = torch.tensor(ids[at + 1 : at + 1 + len(piece)])
        exact = None
        for bits, state in states.items():
            says = model([piece], state, logits="all")[0].log_softmax(-1)
            exact = says if exact is None else exact
            parted[bits].append(kl_div(says, exact, reduction="none", log_target=True).sum(-1))
            agreed[bits].append(says.argmax(-1) == exact.argmax(-1))
            losses[bits].append(-says.gather(-1, after[:, None])[:, 0])
    for bits in WIDTHS:
        parts = torch.cat(parted[bits])
        ends = ", ".join(f"{parts[:at][-1000:].mean():.1e} at {at:,}" for at in (1000, 4000, len(parts)))
        print(
            f"  {bits:2} bits: perplexity {torch.cat(losses[bits]).mean().exp():.4f}, the same likeliest token "
            f"{torch.cat(agreed[bits]).float().mean():.2%}, KL over the 1,000 tokens before: {ends}",
            flush=True,
        )


def sizes(model: lmstate.Model, ids: list[int]) -> None:
    """Print the bytes of recurrent layers in a row, and in a snapshot at a multiple of 64 and behind it."""
    for bits in WIDTHS:
        state = model.new_state(carries=bits)
        held = []
        for piece in (ids[:1024], ids[1024:1034]):
            model([piece], state)
            layers = (layer for layer in state.snapshot().layers if "conv" in layer)
            held.append(sum(part.nbytes for layer in layers for part in layer.values()))
        print(
            f"  {bits:2} bits: row {state.memory()['recurrent']:,}, snapshot at 1,024 {held[0]:,}, at 1,034 {held[1]:,}"
        )


def speed(model: lmstate.Model, ids: list[int], rounds: int = 7) -> None:
    """Print milliseconds of a decoded token and of a prompt, each width alternating with 32 bits."""

    def decoding(bits: int) -> Callable[[], None]:
        state = model.new_state(carries=bits)
        model([ids[:1024]], state)

        def run() -> None:
            for token in range(64):
                model([[1000 + token]], state)

        return run

    def reading(bits: int) -> Callable[[], None]:
        def run() -> None:
            model([ids[:1024]], model.new_state(carries=bits))

        return run

    for bits in WIDTHS[1:]:
        for what, made, count in (("decode", decoding, 64), ("prompt", reading, 1024)):
            times = hybrids.alternate(made(bits), made(32), rounds)
            own, whole = (statistics.median(side) / count * 1e3 for side in zip(*times))
            ratio = statistics.median(a / b for a, b in times)
            print(f"  {bits:2} bits: {what} {own:.3f} ms per token, 32 bits {whole:.3f}, ratio {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=800, help="of training; 0 leaves the trained hybrid out")
    parser.add_argument("--tokens", type=int, default=16_000)
    options = parser.parse_args()
    lmstate.set_threads(options.threads)
    hybrids.clock = time.process_time if options.threads == 1 else time.perf_counter
    from pydoc_data.topics import topics

    text = torch.tensor(list("\n".join(topics.values()).encode()))
    if options.steps:
        with tempfile.TemporaryDirectory() as folder:
            trained(Path(folder), options.steps, text[: -options.tokens - 1])
            print(f"trained hybrid, {options.tokens:,} bytes")
            with torch.inference_mode():
                read(lmstate.load(folder, weights="float32"), text[-options.tokens - 1 :].tolist())
    for name in SHAPES:
        with hybrids.checkpoint(name, SHAPES) as folder, torch.inference_mode():
            model, ids = lmstate.load(folder, weights="bfloat16"), hybrids.text(options.tokens + 1)
            print(name)
            sizes(model, ids)
            speed(model, ids)
            read(model, ids)


if __name__ == "__main__":
    main()
