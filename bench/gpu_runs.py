"""Prompts, decoding and requests of a model on a GPU, and the same by transformers, for `bench.gpu`.

A run does its work once and returns the number of tokens. Random weights: the peer is made from a config class, saved,
and loaded by lmstate in each storage.
"""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lmstate

STEPS = 16
Run = Callable[[], int]


def _llama(**sizes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(max_position_embeddings=32768, **sizes)


def _qwen3_5() -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, tie_word_embeddings=True,
    )  # fmt: skip


def _granite() -> Any:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        hidden_size=1536, shared_intermediate_size=4096, num_hidden_layers=40, num_attention_heads=12,
        num_key_value_heads=4, vocab_size=100352, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128,
        num_local_experts=0, num_experts_per_tok=0, max_position_embeddings=32768, tie_word_embeddings=True,
        layer_types=["attention" if at in (5, 15, 25, 35) else "mamba" for at in range(40)],
        position_embedding_type=None, embedding_multiplier=12, logits_scaling=6, residual_multiplier=0.246,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], Any]] = {
    "tiny": lambda: _llama(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, eos_token_id=0,
    ),
    "135M": lambda: _llama(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True,
    ),
    "1.7B": lambda: _llama(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=49152, tie_word_embeddings=True,
    ),
    "8B": lambda: _llama(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256,
    ),
    "qwen3.5-0.8B": _qwen3_5,
    "granite-h-1B": _granite,
}  # fmt: skip


def models(shape: str, device: str, kinds: list[str]) -> tuple[Any, dict[str, lmstate.Model]]:
    """The peer in bfloat16, and ours for each storage of weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        theirs = AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=torch.bfloat16).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = {kind: lmstate.load(Path(folder), weights=kind, device=device) for kind in kinds}
    return theirs, ours


def ids(length: int, vocab: int, seed: int = 0) -> list[int]:
    return [3 + (7919 * (i + seed)) % (vocab - 3) for i in range(length)]


def our_prompt(model: lmstate.Model, length: int) -> Run:
    tokens = ids(length, model.config.vocab_size)

    def run() -> int:
        model([tokens], model.new_state())
        return length

    return run


def our_decode(model: lmstate.Model, rows: int, near: int) -> Run:
    """The likeliest tokens, several in a replay where the model's graphs hold several steps."""
    state = model.new_state(rows, rewind=STEPS)
    model([ids(near, model.config.vocab_size)] * rows, state)

    def run() -> int:
        step, left = [[7]] * rows, STEPS
        while left:
            found = model.follow(step, state, left)
            logits = model(step, state)[:, None] if found is None else found[1]
            if found is not None:
                state.commit()
            step = logits[:, -1].argmax(-1, keepdim=True).tolist()
            left -= logits.shape[1]
        for row in range(rows):
            state.rewind(row, near)
        return STEPS * rows

    return run


def our_graph(model: lmstate.Model, rows: int, near: int) -> Run:
    """A static state in one graph of torch.compile."""
    step = torch.compile(model.decode_step, fullgraph=True, dynamic=False, mode="reduce-overhead")
    state = model.new_state(rows, capacity=near + 2 * STEPS, static=True)
    model([ids(near, model.config.vocab_size)] * rows, state)

    def run() -> int:
        token = torch.full((rows, 1), 7, device=model.device)
        for _ in range(STEPS):
            token = step(token, state).argmax(-1, keepdim=True)
            state.commit()
        for row in range(rows):
            state.rewind(row, near)
        return STEPS * rows

    return run


def our_engine(model: lmstate.Model, clients: int, prompt: int, answer: int) -> Run:
    """Requests that arrive together. Each run has its own prompts, so that none is found in the prefix store."""
    engine = lmstate.Engine(model, rows=clients, draft=None)
    atexit.register(engine.close)
    seeds = iter(range(1, 1 << 30))

    def run() -> int:
        prompts = [ids(prompt, model.config.vocab_size, 1000 * next(seeds)) for _ in range(clients)]
        requests = [engine.submit(each, max_new_tokens=answer, ignore_eos=True) for each in prompts]
        return sum(len(request.result().tokens[0]) for request in requests)

    return run


def their_prompt(model: Any, length: int) -> Run:
    from transformers import DynamicCache

    tokens = torch.tensor([ids(length, model.config.vocab_size)], device=model.device)

    def run() -> int:
        with torch.inference_mode():
            model(tokens, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
        return length

    return run


def their_decode(model: Any, rows: int, near: int) -> Run:
    """A hybrid's cache cannot go back: its rows grow by `STEPS` tokens with each run."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    tokens = torch.tensor([ids(near, model.config.vocab_size)] * rows, device=model.device)
    grows = "layer_types" in model.config.to_dict() and len(set(model.config.layer_types or ())) > 1
    with torch.inference_mode():
        model(tokens, past_key_values=cache, logits_to_keep=1)

    def run() -> int:
        token = torch.full((rows, 1), 7, device=model.device)
        with torch.inference_mode():
            for _ in range(STEPS):
                token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
                token.tolist()  # as a stream does, and as our commit does
        if not grows:
            cache.crop(-STEPS)
        return STEPS * rows

    return run


def their_graph(model: Any, rows: int, near: int) -> Run:
    """A static cache in one graph of torch.compile."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=near + 2 * STEPS)
    forward = torch.compile(model.forward, fullgraph=True, dynamic=False, mode="reduce-overhead")
    with torch.no_grad():
        tokens = torch.tensor([ids(near, model.config.vocab_size)] * rows, device=model.device)
        model(tokens, past_key_values=cache, logits_to_keep=1)

    def run() -> int:
        token = torch.full((rows, 1), 7, device=model.device)
        for at in range(near, near + STEPS):
            positions = torch.full((rows, 1), at, device=model.device)
            with torch.no_grad():
                logits = forward(token, past_key_values=cache, position_ids=positions).logits
            token = logits[:, -1].argmax(-1, keepdim=True).clone()
            token.tolist()
        for layer in cache.layers:  # the same places again
            layer.cumulative_length.fill_(near)
        return STEPS * rows

    return run


def their_batching(model: Any, clients: int, prompt: int, answer: int) -> Run:
    """transformers' continuous batching."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    seeds = iter(range(1, 1 << 30))

    def run() -> int:
        prompts = [ids(prompt, model.config.vocab_size, 1000 * next(seeds)) for _ in range(clients)]
        answers = model.generate_batch(prompts, generation_config=config, persistent_manager=True)
        return sum(len(each.generated_tokens) for each in answers.values())

    return run
