"""A drafting model of another vocabulary: its text comes over, and changes no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from lmstate.generation import Generation, Sampler, generate
from lmstate.models.config import ModelConfig
from lmstate.speculation import ModelDrafter, TranslatedDrafter, make_speculator
from lmstate.text.tokenizer import Tokenizer, TokenizerFiles
from tests.generation.fake_model import FakeState
from tests.speculation.drafters import always
from tests.zoo import VOCAB, ours

TEXT = "the river runs to the sea and the sea runs to the sky, and the sky falls into the river again. "


def tokenizer(size: int) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=size, show_progress=False))
    return Tokenizer(TokenizerFiles(tokenizer_json=inner.to_str(), settings={}))


class Reciter:
    """A model that recites one text over and over: its logits put the token that comes next in it first."""

    eos_ids: frozenset[int] = frozenset()

    has_tokenizer = True

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.config = ModelConfig("reciter", tokenizer.vocab_size, hidden_size=1)
        self.calls = 0

    def new_state(self, rows: int = 1, capacity: int | None = None, rewind: int = 16) -> FakeState:
        return FakeState(rows)

    def __call__(
        self, tokens: Sequence[Sequence[int]], state: FakeState, logits: str = "last", commit: bool = True
    ) -> Tensor:
        self.calls += 1
        out = torch.zeros(state.rows, max(map(len, tokens)), self.config.vocab_size)
        state.speculative = [list(new) for new in tokens]
        for row, new in enumerate(tokens):
            for at in range(len(new)):
                out[row, at, self._next(state.tokens(row) + list(new[: at + 1]))] = 9.0
        last = torch.stack([out[row, len(new) - 1] for row, new in enumerate(tokens)])
        if commit:
            state.commit([len(new) for new in tokens])
        return out if logits == "all" else last

    def follow(self, tokens: Sequence[Sequence[int]], state: FakeState, most: int) -> None:
        """It has no graph of several steps."""

    def _next(self, held: list[int]) -> int:
        said = self.tokenizer.decode(held).lstrip()
        rest = (self.text * 9)[len(said) :]
        ids = self.tokenizer.encode((self.text * 9)[: len(said) + 20], add_special_tokens=False)
        return ids[len(held)] if ids[: len(held)] == held else self.tokenizer.encode(rest[:9])[0]


def test_a_drafter_of_another_vocabulary_is_understood() -> None:
    target, drafting = Reciter(tokenizer(60), TEXT), Reciter(tokenizer(34), TEXT)
    assert target.tokenizer.vocabulary != drafting.tokenizer.vocabulary
    plain = generate(target, TEXT[:24], max_new_tokens=60, draft=None)  # type: ignore[arg-type]
    steps = target.calls
    drafter = TranslatedDrafter(drafting, target.tokenizer, rows=1)  # type: ignore[arg-type]
    speculator = always(drafter, target.config.vocab_size, depth=5)
    generation = Generation(target, [target.tokenizer.encode(TEXT[:24])], draft=speculator, max_new_tokens=60)  # type: ignore[arg-type]
    list(generation)
    assert generation.texts[0] == plain
    report = generation.report().draft
    assert report.accepted > 0 and target.calls - steps == steps - report.accepted


def test_two_models_of_different_tokenizers_on_real_states() -> None:
    target: Any = replace(ours("qwen3_5"), _tokenizer=tokenizer(60), eos_ids=frozenset())
    drafting: Any = replace(ours("llama"), _tokenizer=tokenizer(34), eos_ids=frozenset())
    prompts = [TEXT[:30], TEXT[10:50]]
    wanted = generate(target, prompts, max_new_tokens=20, draft=None)
    speculator = always(TranslatedDrafter(drafting, target.tokenizer, rows=2), VOCAB, rows=2)
    assert generate(target, prompts, max_new_tokens=20, draft=speculator) == wanted


def test_the_tokenizers_decide_which_drafter_a_model_is() -> None:
    one: Any = replace(ours("llama"), _tokenizer=tokenizer(60))
    same: Any = replace(ours("llama"), _tokenizer=tokenizer(60))
    other: Any = replace(ours("llama"), _tokenizer=tokenizer(34))
    for draft, kind in ((same, ModelDrafter), (other, TranslatedDrafter), (one, ModelDrafter)):
        made = make_speculator(draft, one, 1, Sampler(), None)
        assert made is not None and isinstance(made.drafter, kind)


def test_other_ids_without_a_tokenizer_are_refused() -> None:
    network = ours("llama").network
    bare: Any = replace(ours("llama"), network=replace(network, config=replace(network.config, vocab_size=50)))
    with pytest.raises(ValueError, match="no tokenizer to translate by"):
        make_speculator(bare, ours("llama"), 1, Sampler(), None)
