"""DeepSeek-V4's DSpark equals layers of `transformers` that are wired as its published code is; texts do not change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    apply_rotary_pos_emb,
)

import lmstate
from lmstate.errors import ModelError
from tests.heads.published import altered, check_greedy, check_no_bit
from tests.heads.test_drafts import prompts_of
from tests.heads.zoo import stored, v4_name
from tests.zoo import VOCAB, auto, randomize
from tests.zoo.latent import _v4

SIZE, NOISE, TAPS, RANK, WINDOW = 4, 97, [1, 3], 6, 10


class Reference(nn.Module):
    """Two stages: the first has the projection of the model's streams, the last what says the tokens."""

    def __init__(self) -> None:
        super().__init__()
        config = _v4(layer_types=["sliding_attention"] * 2, num_hidden_layers=2, num_hash_layers=0)
        self.stages = nn.ModuleList([DeepseekV4DecoderLayer(config, index) for index in range(2)])
        width = config.hidden_size
        self.stages[0].main_proj = nn.Linear(len(TAPS) * width, width, bias=False)
        self.stages[0].main_norm = DeepseekV4RMSNorm(width, config.rms_norm_eps)
        last = self.stages[1]
        last.hc_head, last.norm = DeepseekV4HyperHead(config), DeepseekV4RMSNorm(width, config.rms_norm_eps)
        last.markov_head, last.confidence_head = nn.Module(), nn.Module()
        last.markov_head.markov_w1 = nn.Embedding(VOCAB, RANK)
        last.markov_head.markov_w2 = nn.Linear(RANK, VOCAB, bias=False)
        last.confidence_head.proj = nn.Linear(width + RANK, 1, bias=False)

    def forward(self, streams: list[Tensor], embedded: Tensor, rotary: Any) -> Tensor:
        """The stream `[SIZE, E]` of a block behind the streams `[T, N, E]` at the taps."""
        first, last = self.stages
        context = first.main_norm(first.main_proj(torch.cat([each.mean(-2) for each in streams], dim=-1)))
        x = embedded[None, :, None].repeat(1, 1, streams[0].shape[-2], 1)
        positions = torch.arange(len(context) + len(embedded))[None]
        cos, sin = rotary(x, positions, "main")
        for stage in self.stages:
            post, mix, collapsed = stage.attn_hc(x)
            seen = attended(stage.self_attn, stage.input_layernorm(collapsed)[0], context, cos, sin)
            x = post[..., None] * seen[None, :, None] + mix.mT @ x
            post, mix, collapsed = stage.ffn_hc(x)
            x = post[..., None] * stage.mlp(stage.post_attention_layernorm(collapsed))[:, :, None] + mix.mT @ x
        return last.hc_head(x)[0]


def attended(own: Any, y: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Attention of a block `[SIZE, E]` to the last tokens of the context and to all of itself."""
    here = cos[:, -SIZE:], sin[:, -SIZE:]
    kv = apply_rotary_pos_emb(own.kv_norm(own.kv_proj(torch.cat([context, y])))[None, None], cos, sin)[0, 0]
    kv = kv[-WINDOW - SIZE :]
    q = own.q_b_proj(own.q_a_norm(own.q_a_proj(y))).unflatten(-1, (own.num_heads, -1)).transpose(0, 1)[None]
    q = apply_rotary_pos_emb(own.q_b_norm(q), *here)[0]  # [H, SIZE, D]
    scores = torch.cat([q @ kv.T * own.scaling, own.sinks[:, None, None].expand(-1, SIZE, 1)], dim=-1)
    seen = (scores.softmax(-1)[..., :-1] @ kv)[None]
    seen = apply_rotary_pos_emb(seen, here[0], -here[1])[0].transpose(0, 1)
    return own.o_b_proj(own.o_a_proj(seen.reshape(1, SIZE, own.config.o_groups, -1)).flatten(2))[0]


def published(drafter: Reference) -> Iterator[tuple[str, Tensor]]:
    """The tensors under their published names."""
    for name, tensor in drafter.state_dict().items():
        yield from stored(v4_name(name.replace("stages.", "mtp.")), tensor.contiguous()).items()


class Pair:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        config = _v4()
        self.target = auto(config).from_config(config, dtype=torch.float32).eval()
        randomize(self.target)
        self.drafter = Reference().eval()
        for parameter in self.drafter.parameters():  # some of which begin as whatever the memory held
            nn.init.normal_(parameter, std=0.2)
        randomize(self.drafter, seed=1)
        self.target.save_pretrained(folder)
        weights = folder / "model.safetensors"
        save_file(load_file(weights) | dict(published(self.drafter)), weights)
        fields = {"block_size": SIZE, "noise_token_id": NOISE, "target_layer_ids": TAPS, "markov_rank": RANK}
        altered(folder, {f"dspark_{name}": value for name, value in fields.items()}, {})
        self.ours = self.load()

    def load(self) -> lmstate.Model:
        return lmstate.load(self.folder, weights="float32", heads=True)

    @torch.no_grad()
    def block(self, ids: list[int], token: int, drafts: list[int]) -> tuple[Tensor, Tensor]:
        """Logits `[n, V]` of the first drafts behind a text and its next token, and how sure of them it is `[n]`."""
        found: dict[int, Tensor] = {}
        hooks = [
            self.target.model.layers[index].register_forward_hook(
                lambda _, __, out, index=index: found.update({index: out[0]})
            )
            for index in TAPS
        ]
        self.target(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        words = self.target.get_input_embeddings()(torch.tensor([token, *[NOISE] * (SIZE - 1)]))
        stream = self.drafter([found[index] for index in TAPS], words, self.target.model.rotary_emb)[: len(drafts)]
        last = self.drafter.stages[-1]
        before = last.markov_head.markov_w1(torch.tensor([token, *drafts[:-1]]))
        logits = self.target.get_output_embeddings()(last.norm(stream)) + last.markov_head.markov_w2(before)
        return logits, last.confidence_head.proj(torch.cat([stream, before], dim=-1))[:, 0].sigmoid()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Pair]:
    return lru_cache(lambda: Pair(tmp_path_factory.mktemp("dspark")))


def test_a_draft_is_what_the_drafter_says(pair: Callable[[], Pair], tmp_path: Path) -> None:
    made = pair()
    rows = prompts_of(9, 4, 70)  # shorter than the window, and longer
    state = made.ours.new_state(3)
    for first in range(0, 70, 11):
        logits = made.ours([row[first : first + 11] for row in rows], state)
    assert logits is not None
    last = {row: int(logits[row].argmax()) for row in range(3)}
    drafts = made.ours.draft_ahead(state, last, SIZE + 3)
    assert state.lengths == list(map(len, rows))
    for row, draft in drafts.items():
        assert draft.tokens
        expected, sure = made.block(rows[row], last[row], list(draft.tokens))
        assert draft.tokens == tuple(expected.argmax(-1).tolist())
        assert draft.confidence == pytest.approx(sure.tolist(), abs=1e-4)
    state.rewind(2, 50)  # farther than the window: the drafter goes back with its model
    made.ours([[], [], rows[2][50:]], state)
    state.snapshot(2).save(tmp_path / "row")
    state.restore(1, lmstate.Snapshot.load(tmp_path / "row"))
    again = made.ours.draft_ahead(state, {1: last[2]}, SIZE)[1].tokens
    assert again and again == drafts[2].tokens[: len(again)]


def test_greedy_with_dspark_equals_greedy_without(pair: Callable[[], Pair]) -> None:
    check_greedy(pair().ours)


def test_dspark_changes_no_bit_of_its_model(pair: Callable[[], Pair]) -> None:
    check_no_bit(pair().ours)


def test_without_heads_it_is_not_read(pair: Callable[[], Pair]) -> None:
    assert not lmstate.load(pair().folder, weights="float32").heads


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dspark_target_layer_ids": [1, 4]}, "dspark_target_layer_ids"),
        ({"dspark_target_layer_ids": [3, 1]}, "must rise"),
        ({"dspark_noise_token_id": VOCAB}, "dspark_noise_token_id"),
        ({"dspark_markov_rank": 5}, "markov_w1"),
    ],
)
def test_a_dspark_that_does_not_fit_is_refused(fields: dict[str, Any], message: str, pair: Callable[[], Pair]) -> None:
    config = pair().folder / "config.json"
    before = config.read_text()
    try:
        config.write_text(json.dumps(json.loads(before) | fields))
        with pytest.raises(ModelError, match=message):
            pair().load()
    finally:
        config.write_text(before)
