"""DFlash and DSpark drafters equal layers of `transformers` that are wired as in their papers; texts do not change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

import lmstate
from lmstate.errors import ModelError
from tests.files.ggufs import write
from tests.files.test_gguf_attention import metadata
from tests.heads.published import acceptance, altered, check_greedy, check_no_bit, target_of
from tests.heads.test_drafts import check_learned, prompts_of
from tests.zoo import VOCAB, randomize

SIZE, MASK, TAPS, RANK = 5, 98, [1, 3, 6], 8
F, S = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Kind:
    """What the config of a drafter says, and so what the layers see of a text and of the block."""

    fields: dict[str, Any] = field(default_factory=dict)
    inside: dict[str, Any] = field(default_factory=dict)
    windows: tuple[int | None, ...] = (None, None)
    causal: tuple[bool, ...] = (False, False)

    @property
    def dspark(self) -> bool:
        return "markov_rank" in self.fields


SPARK = {
    "architectures": ["Qwen3DSparkModel"], "markov_rank": RANK, "markov_head_type": "vanilla",
    "enable_confidence_head": True, "mask_token_id": MASK, "target_layer_ids": TAPS,
}  # fmt: skip
NAMES = {  # of GGUF
    "fc": "fc", "norm": "output_norm", "hidden_norm": "enc.output_norm", "confidence_head.proj": "conf_proj",
    **{f"markov_head.markov_w{at}": f"markov_w{at}" for at in (1, 2)},
    **{
        f"layers.{layer}.{theirs}": f"blk.{layer}.{ours}"
        for layer in (0, 1)
        for theirs, ours in {
            "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
            **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
            **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
            **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        }.items()
    },
}  # fmt: skip
KINDS = {
    "dflash": Kind(),
    "windows": Kind({"layer_types": [S, F], "sliding_window": 9}, windows=(9, None), causal=(True, False)),
    "windows of all": Kind({"sliding_window": 9}, {"use_swa": True}, windows=(9, 9)),
    "causal": Kind({}, {"causal": True}, causal=(True, True)),
    "not causal": Kind({"layer_types": [S, S], "sliding_window": 7}, {"causal": False}, windows=(7, 7)),
    "dspark": Kind({**SPARK, "confidence_head_with_markov": True}),
    "dspark, sure of its stream": Kind({**SPARK, "confidence_head_with_markov": False}),
    "dspark, not sure": Kind({**SPARK, "enable_confidence_head": False}),
}
PAIRS = [
    *(("llama", kind) for kind in KINDS), ("qwen3_next", "dflash"), ("mistral", "dflash"), ("qwen3_next", "dspark"),
    ("mistral", "windows of all"),
]  # fmt: skip


class Layer(nn.Module):
    """A layer: queries of the block, keys of the context and of the block."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        width, heads, kv_heads, self.dim = config.hidden_size, 4, 2, config.head_dim
        self.self_attn = nn.Module()
        for name, shape in {
            "q_proj": (width, heads * self.dim), "k_proj": (width, kv_heads * self.dim),
            "v_proj": (width, kv_heads * self.dim), "o_proj": (heads * self.dim, width),
        }.items():  # fmt: skip
            setattr(self.self_attn, name, nn.Linear(*shape, bias=False))
        self.self_attn.q_norm, self.self_attn.k_norm = Qwen3RMSNorm(self.dim, 1e-6), Qwen3RMSNorm(self.dim, 1e-6)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm, self.post_attention_layernorm = Qwen3RMSNorm(width, 1e-6), Qwen3RMSNorm(width, 1e-6)

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        own, y = self.self_attn, self.input_layernorm(x)

        def heads(part: Tensor) -> Tensor:
            return part.unflatten(-1, (-1, self.dim)).transpose(0, 1)

        both = torch.cat([context, y])
        q, k, v = own.q_norm(heads(own.q_proj(y))), own.k_norm(heads(own.k_proj(both))), heads(own.v_proj(both))
        q = q * cos[-len(y) :] + rotate_half(q) * sin[-len(y) :]
        k = k * cos + rotate_half(k) * sin
        k, v = (part.repeat_interleave(2, 0) for part in (k, v))
        seen = (q @ k.transpose(1, 2) / self.dim**0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        x = x + own.o_proj(seen.transpose(0, 1).flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))


class Reference(nn.Module):
    def __init__(self, width: int, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.config = Qwen3Config(
            vocab_size=VOCAB, hidden_size=width, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
        )  # fmt: skip
        self.layers = nn.ModuleList([Layer(self.config) for _ in range(2)])
        self.norm, self.hidden_norm = Qwen3RMSNorm(width, 1e-6), Qwen3RMSNorm(width, 1e-6)
        self.fc = nn.Linear(len(TAPS) * width, width, bias=False)
        if kind.dspark:
            self.markov_head, self.confidence_head = nn.Module(), nn.Module()
            self.markov_head.markov_w1 = nn.Embedding(VOCAB, RANK)
            self.markov_head.markov_w2 = nn.Linear(RANK, VOCAB, bias=False)
            both = kind.fields.get("confidence_head_with_markov", True)
            self.confidence_head.proj = nn.Linear(width + RANK * both, 1)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """The stream behind the layers, normed, of a block behind the features `[T, taps * E]` of a text."""
        context = self.hidden_norm(self.fc(features))
        positions = torch.arange(len(context) + len(embedded))[None]
        cos, sin = (part[0] for part in Qwen3RotaryEmbedding(self.config)(context, positions))
        own, stored = torch.arange(len(context), len(context) + len(embedded))[:, None], torch.arange(len(cos))
        for layer, window, causal in zip(self.layers, self.kind.windows, self.kind.causal):
            mask = (stored <= own) | (not causal)
            embedded = layer(embedded, context, cos, sin, mask & (stored > own - (window or len(cos) + 1)))
        return self.norm(embedded)


class Pair:
    """A target of `transformers` and a drafter for it, and both in lmstate."""

    def __init__(self, case: str, folder: Path, kind: str = "dflash") -> None:
        self.kind, self.folder = KINDS[kind], folder
        self.target = target_of(case)
        self.drafter = Reference(self.target.config.hidden_size, self.kind).eval()
        randomize(self.drafter, seed=1)
        self.target.save_pretrained(folder / "target")
        (folder / "drafter").mkdir()
        told = self.drafter.config.to_dict() | {"architectures": ["DFlashDraftModel"], "block_size": SIZE}
        inside = {} if self.kind.dspark else {"mask_token_id": MASK, "target_layer_ids": TAPS}
        told |= {"layer_types": None, "dflash_config": inside | self.kind.inside} | self.kind.fields
        (folder / "drafter" / "config.json").write_text(json.dumps(told))
        self.save()
        self.ours = self.load()

    def save(self) -> None:
        save_file({name: x.contiguous() for name, x in self.drafter.state_dict().items()}, self.weights)

    @property
    def weights(self) -> Path:
        return self.folder / "drafter" / "model.safetensors"

    def save_gguf(self, path: Path, **more: Any) -> None:
        """The drafter as llama.cpp's converter writes it; the blocks are counted by what goes into them."""
        kind, tensors = self.kind, {}
        for name, tensor in self.drafter.state_dict().items():
            stem, _, ending = name.rpartition(".")
            if stem != "confidence_head.proj" or kind.fields["enable_confidence_head"]:
                tensors[f"{NAMES[stem]}.{ending}"] = tensor.numpy()
        values: dict[str, Any] = {"block_size": SIZE, "target_layers": [index + 1 for index in TAPS]}
        if any(kind.windows):
            values["attention.sliding_window"] = max(filter(None, kind.windows))
            values["attention.sliding_window_pattern"] = [window is not None for window in kind.windows]
        values = metadata(self.drafter.config, "dflash", **values | more)
        values |= {"tokenizer.ggml.mask_token_id": MASK, "tokenizer.ggml.tokens": [f"t{at}" for at in range(VOCAB)]}
        write(path, "dflash", values, tensors)

    def load(self, drafter: str = "drafter") -> lmstate.Model:
        return lmstate.load(self.folder / "target", weights="float32", heads=self.folder / drafter)

    def stream(self, ids: list[int], token: int) -> Tensor:
        """The stream `[SIZE, E]` behind the drafter, of a block behind a text and its next token."""
        with torch.no_grad():
            streams = self.target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = torch.cat([streams[index + 1][0] for index in TAPS], dim=-1)
        words = self.target.get_input_embeddings()(torch.tensor([token, *[MASK] * (SIZE - 1)])).detach()
        return self.drafter(features, words)

    def block(self, ids: list[int], token: int, drafts: list[int]) -> tuple[Tensor, Tensor]:
        """Logits `[n, V]` of the first drafts behind a text and its next token, and how sure of them it is `[n]`.

        `drafts`: what is chosen; each is chosen behind those before it.
        """
        stream, count = self.stream(ids, token), len(drafts)
        stream = stream[:count] if self.kind.dspark else stream[1 : 1 + count]
        logits = self.target.get_output_embeddings()(stream)
        if self.kind.dspark:
            before = self.drafter.markov_head.markov_w1(torch.tensor([token, *drafts[:-1]]))
            logits = logits + self.drafter.markov_head.markov_w2(before)
        if not self.kind.fields.get("enable_confidence_head"):
            return logits, logits.softmax(-1).gather(1, torch.tensor(drafts)[:, None])[:, 0]
        told = torch.cat([stream, before], -1) if self.kind.fields["confidence_head_with_markov"] else stream
        return logits, self.drafter.confidence_head.proj(told)[:, 0].sigmoid()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    return lru_cache(lambda case, kind="dflash": Pair(case, tmp_path_factory.mktemp(case), kind))


def drafted(made: Pair, model: lmstate.Model) -> tuple[list[list[int]], lmstate.State, dict[int, int], dict[int, Any]]:
    """Rows, their state, the tokens after two of them, and the drafts after these."""
    rows = prompts_of(9, 4, 70)
    state = model.new_state(3)
    for first in range(0, 70, 11):
        logits = model([row[first : first + 11] for row in rows], state)
    assert logits is not None
    last = {row: int(logits[row].argmax()) for row in (0, 2)}
    return rows, state, last, model.draft_ahead(state, last, SIZE + 3)


def check_drafts(made: Pair, rows: list[list[int]], last: dict[int, int], drafts: dict[int, Any]) -> None:
    """The drafts are what the layers of `transformers` say."""
    for row, draft in drafts.items():
        assert draft.tokens and len(draft.tokens) <= SIZE - (not made.kind.dspark)
        expected, sure = made.block(rows[row], last[row], list(draft.tokens))
        assert draft.tokens == tuple(expected.argmax(-1).tolist())
        assert draft.confidence == pytest.approx(sure.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["dflash", "not causal", "dspark", "dspark, not sure"])
def test_a_drafter_in_gguf_is_the_drafter_in_its_folder(kind: str, tmp_path: Path) -> None:
    made = Pair("llama", tmp_path, kind)
    made.save_gguf(tmp_path / "drafter.gguf")
    model = made.load("drafter.gguf")
    assert model.fingerprint == made.ours.fingerprint
    rows, _, last, drafts = drafted(made, model)
    check_drafts(made, rows, last, drafts)
    check_greedy(model)


@pytest.mark.parametrize(
    ("message", "more"),
    [
        ("lmstate reads neither", {"hyper_connection.count": 4}),
        ("nothing at the first place", {"sample_from_anchor": False}),
        ("of a model of 8", {"target_layers": [1, 9]}),
        ("target_layers", {"target_layers": [0, 3]}),
        ("sliding_window_pattern", {"attention.sliding_window": 4, "attention.sliding_window_pattern": [True]}),
    ],
)
def test_a_drafter_in_gguf_that_does_not_fit_is_refused(message: str, more: dict[str, Any], tmp_path: Path) -> None:
    made = Pair("llama", tmp_path, "dspark")
    made.save_gguf(tmp_path / "drafter.gguf", **more)
    with pytest.raises(ModelError, match=message):
        made.load("drafter.gguf")


def test_learned_positions_are_positions_of_the_drafter_too(pairs: Callable[..., Pair]) -> None:
    check_learned(pairs("llama").ours)


@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_a_draft_is_what_the_drafter_says(case: str, kind: str, pairs: Callable[..., Pair], tmp_path: Path) -> None:
    made = pairs(case, kind)
    rows, state, last, drafts = drafted(made, made.ours)
    assert state.lengths == list(map(len, rows))
    check_drafts(made, rows, last, drafts)
    state.snapshot(2).save(tmp_path / "row")
    state.restore(1, lmstate.Snapshot.load(tmp_path / "row"))
    again = made.ours.draft_ahead(state, {1: last[2]}, SIZE)[1].tokens  # alone it may end earlier
    assert again and again == drafts[2].tokens[: len(again)]
    state.rewind(2, len(rows[2]) - 9)  # farther than a window: the drafter goes back with its model
    made.ours([[], [], rows[2][-9:]], state)
    again = made.ours.draft_ahead(state, {2: last[2]}, SIZE)[2].tokens
    assert again and again == drafts[2].tokens[: len(again)]
    full = made.ours.new_state(1, capacity=12)
    made.ours([rows[0]], full)
    assert made.ours.draft_ahead(full, {0: 1}, 3)[0].tokens == ()


@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_greedy_with_a_drafter_equals_greedy_without(case: str, kind: str, pairs: Callable[..., Pair]) -> None:
    check_greedy(pairs(case, kind).ours)


@pytest.mark.parametrize(("case", "kind"), [("llama", "windows"), ("qwen3_next", "dspark"), ("mistral", "dflash")])
def test_the_drafter_changes_no_bit_of_its_model(case: str, kind: str, pairs: Callable[..., Pair]) -> None:
    check_no_bit(pairs(case, kind).ours)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_drafter_that_learned_its_model_is_accepted(kind: str, tmp_path: Path) -> None:
    """Distilled for a few seconds on the texts of a small target."""
    made = Pair("llama", tmp_path, kind)
    prompts = [[seed] for seed in range(1, 25)]
    texts = made.ours.generate(prompts, max_new_tokens=16, ignore_eos=True, return_ids=True)
    whole = [[*prompt, *own] for prompt, own in zip(prompts, texts)]
    optimizer = torch.optim.AdamW(made.drafter.parameters(), lr=3e-3)
    for epoch in range(14):
        total = torch.zeros(())
        for ids in whole:
            at = 2 + (epoch * 5 + ids[0]) % 9
            drafts = ids[at + 1 : at + SIZE]
            logits, _ = made.block(ids[:at], ids[at], drafts)
            total = total + nn.functional.cross_entropy(logits, torch.tensor(drafts))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    made.save()
    rates = [acceptance(model, prompts[:8], tokens=14, depth=1) for model in (made.ours, made.load())]
    assert rates[1] > rates[0] + 0.2, rates


WRONG: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "drafts for a model 32 wide": ({"hidden_size": 32}, {}),
    "mask_token_id": ({"dflash_config": {"mask_token_id": 99, "target_layer_ids": TAPS}}, {}),
    "of a model of 8": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 8]}}, {}),
    "how long it is": ({"dflash_config": {"mask_token_id": 1, "use_swa": True}, "sliding_window": None}, {}),
    "block_size": ({"block_size": 1}, {}),
    "does not use": ({}, {"layers.0.other.weight": torch.zeros(3)}),
    "no head that lmstate can draft with": ({"architectures": ["DFlash2DraftModel"]}, {}),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_drafter_that_does_not_fit_is_refused(message: str, tmp_path: Path) -> None:
    made = Pair("llama", tmp_path)
    altered(tmp_path / "drafter", *WRONG[message])
    with pytest.raises(ModelError, match=message):
        made.load()


WRONG_SPARKS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "markov_head_type": ({"markov_head_type": "gated"}, {}),
    "markov_w1": ({"markov_rank": RANK + 1}, {}),
    "confidence_head.proj.weight": ({}, {"confidence_head.proj.weight": torch.zeros(1, 3)}),
}


@pytest.mark.parametrize("message", WRONG_SPARKS)
def test_a_dspark_drafter_that_does_not_fit_is_refused(message: str, tmp_path: Path) -> None:
    made = Pair("llama", tmp_path, "dspark")
    altered(tmp_path / "drafter", *WRONG_SPARKS[message])
    with pytest.raises(ModelError, match=message):
        made.load()
