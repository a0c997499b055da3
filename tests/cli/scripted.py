"""A small real model that follows a script: engines and states run it, and its next token is what a test says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import lmstate
from lmstate.language_model import Logits
from lmstate.state import State, Step
from lmstate.text.control_tokens import ControlTokens
from tests.generation.fake_model import EOS, VOCAB, FakeTokenizer, ids


class Templated:
    """The part of a tokenizer that writes conversations, over `encode` of a text."""

    has_chat_template = True

    def chat_text(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = "".join(f"[{message['role']}]{message['content']}[end]\n" for message in messages)
        return text + "[assistant]" * add_generation_prompt

    def chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        return self.encode(self.chat_text(messages, add_generation_prompt))  # type: ignore[attr-defined,no-any-return]

    def control_tokens(self) -> ControlTokens:
        return ControlTokens(re.compile("(?!)"))

    def encode_rendered(self, text: str, control: ControlTokens) -> list[int]:
        return self.encode(text)  # type: ignore[attr-defined,no-any-return]


class ChatTokenizer(Templated, FakeTokenizer):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return super().decode(ids)


def repeat(held: list[int]) -> int:
    """The next token of the answer "You said ...": of the last user message of a chat, or of the plain text."""
    text = FakeTokenizer().decode(held)
    before, _, answer = text.rpartition("[assistant]") if "[assistant]" in text else ("", "", "")
    said = before.rpartition("[user]")[2].partition("[end]")[0] if before else text.partition(":")[0]
    wanted = f"You said {said}." if before else " and so on"
    done = answer if before else text.partition(":")[2]
    return ids(wanted[len(done) :])[0] if len(done) < len(wanted) else EOS


class ScriptedModel(lmstate.Model):
    """Counts its steps and the tokens that they read. `script`: a row's tokens -> the next one."""

    script: Callable[[list[int]], int]
    calls = fed = 0
    fail_at: int | None = None

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def _forward(self, *parts: Any) -> Any:
        forward = super()._forward(*parts)

        def scripted(new: list[list[int]], step: Step, state: State, logits: Logits) -> Tensor | None:
            self.calls += 1
            if self.fail_at is not None and self.calls >= self.fail_at:
                raise RuntimeError("the forward failed")
            self.fed += sum(map(len, new))
            out = forward(new, step, state, logits)
            for row, own in enumerate(new if out is not None else []):
                places = out[row] if out.ndim == 3 else out[row][None]  # `[K, V]`, of the row's last tokens
                wanted = len(own) if isinstance(logits, str) else logits[row]
                text = [*state.tokens(row)[: step.starts[row]], *own]
                count = min(wanted, len(own), len(places))
                for place, end in zip(places, range(len(text) - count + 1, len(text) + 1)):
                    place.zero_()[self.script(text[:end])] = 100.0
            return out

        return scripted


@cache
def tiny() -> lmstate.Model:
    """One layer of Llama with random weights, made without transformers, which is slow to import."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, **sizes}
    parts = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    norms = ["model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"]
    weights = {f"model.layers.0.{part}.weight": torch.randn(16, 16) for part in parts}
    weights |= {f"{name}.weight": torch.ones(16) for name in norms}
    weights["model.embed_tokens.weight"] = torch.randn(VOCAB, 16)
    with TemporaryDirectory() as folder:
        save_file(weights, Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return lmstate.load(folder, weights="float32")


def scripted(script: Callable[[list[int]], int] = repeat) -> ScriptedModel:
    """A model of its own, whose tokens are bytes, with a template of marks that are text."""
    values = {each.name: getattr(tiny(), each.name) for each in fields(lmstate.Model) if each.init}
    tokenizer = ChatTokenizer()
    model = ScriptedModel(
        **{**values, "_tokenizer": tokenizer, "eos_ids": frozenset({EOS}), "context_size": None, "folder": None}
    )
    model.script = script
    return model
