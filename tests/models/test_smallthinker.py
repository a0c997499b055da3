"""SmallThinker: its logits are those of its paper's formulas, from both kinds of files, and cuts change no bit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import lmstate
from lmstate.errors import ModelError
from lmstate.models.model import Model
from tests.files import ggufs
from tests.invariants.mirror import Mirror

WINDOW = 9
CONFIG: dict[str, Any] = {
    "model_type": "smallthinker", "architectures": ["SmallThinkerForCausalLM"], "vocab_size": 64, "hidden_size": 48,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "rope_layout": [0, 1, 1, 1, 0], "sliding_window_layout": [0, 1, 1, 1, 0],
    "sliding_window_size": WINDOW, "moe_num_primary_experts": 6, "moe_num_active_primary_experts": 2,
    "moe_ffn_hidden_size": 32, "moe_primary_router_apply_softmax": False, "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}  # fmt: skip
ROTATING = {"rope_layout": [1] * 5, "sliding_window_layout": [0] * 5, "moe_primary_router_apply_softmax": True}
TEXT = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def weights(config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide, inner, dim = config["hidden_size"], config["moe_ffn_hidden_size"], config["head_dim"]

    def matrix(rows: int, columns: int) -> Tensor:
        return 1.5 * columns**-0.5 * torch.randn(rows, columns, generator=generator)

    made = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], wide, generator=generator)}
    if not config["tie_word_embeddings"]:
        made["lm_head.weight"] = matrix(config["vocab_size"], wide)
    norms = ["model.norm.weight"]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        norms += [f"{name}.input_layernorm.weight", f"{name}.post_attention_layernorm.weight"]
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            made[f"{name}.self_attn.{part}_proj.weight"] = matrix(config[heads] * dim, wide)
        made[f"{name}.self_attn.o_proj.weight"] = matrix(wide, config["num_attention_heads"] * dim)
        mixture, count = f"{name}.block_sparse_moe", config["moe_num_primary_experts"]
        made[f"{mixture}.primary_router.weight"] = matrix(count, wide)
        for expert in range(count):
            for part, shape in (("gate", (inner, wide)), ("up", (inner, wide)), ("down", (wide, inner))):
                made[f"{mixture}.experts.{expert}.{part}.weight"] = matrix(*shape)
    return made | {name: 1 + 0.3 * torch.randn(wide, generator=generator) for name in norms}


def reference(config: dict[str, Any], made: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits of a text, a token and a head at a time, float64 `[T, V]`."""
    w = {name: tensor.double() for name, tensor in made.items()}
    dim, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    turns = config["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + config["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        cos, sin = (position * turns).cos(), (position * turns).sin()
        first, second = x[: dim // 2], x[dim // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin])

    stream = [w["model.embed_tokens.weight"][token] for token in ids]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        mixture = f"{name}.block_sparse_moe"
        given = list(stream)
        kept: list[tuple[list[Tensor], list[Tensor]]] = []
        for t, x in enumerate(given):
            y = norm(x, f"{name}.input_layernorm")
            q, k, v = (list((w[f"{name}.self_attn.{part}_proj.weight"] @ y).view(-1, dim).unbind()) for part in "qkv")
            if config["rope_layout"][layer]:
                q, k = [turned(each, t) for each in q], [turned(each, t) for each in k]
            kept.append((k, v))
            first = max(0, t + 1 - config["sliding_window_size"]) if config["sliding_window_layout"][layer] else 0
            seen = []
            for head in range(heads):
                of = head * kv_heads // heads
                scores = torch.stack([q[head] @ k[of] for k, _ in kept[first:]]) * dim**-0.5
                seen.append(sum(p * v[of] for p, (_, v) in zip(scores.softmax(0), kept[first:])))
            x = x + w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(seen)
            y = norm(x, f"{name}.post_attention_layernorm")
            best = (w[f"{mixture}.primary_router.weight"] @ given[t]).topk(config["moe_num_active_primary_experts"])
            shares = best.values.sigmoid() / best.values.sigmoid().sum()
            if config["moe_primary_router_apply_softmax"]:
                shares = best.values.softmax(0)
            for share, expert in zip(shares, best.indices.tolist()):
                gate, up, down = (w[f"{mixture}.experts.{expert}.{part}.weight"] for part in ("gate", "up", "down"))
                x = x + share * (down @ ((gate @ y).relu() * (up @ y)))
            stream[t] = x
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return torch.stack([head @ norm(x, "model.norm") for x in stream])


def save(folder: Path, config: dict[str, Any], made: dict[str, Tensor]) -> Path:
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write(path: Path, config: dict[str, Any], made: dict[str, Tensor]) -> Path:
    """As llama.cpp's converter does, with the names of the `gguf` package."""
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.SMALLTHINKER, layers)
    tensors: dict[str, Any] = {}
    stacked = f"{{}}.experts.{config['moe_num_primary_experts'] - 1}."
    for name, tensor in made.items():
        before, found, after = name.partition(".experts.")
        if not found:
            tensors[str(names.get_name(name, (".weight",)))] = tensor.numpy()
        elif name.startswith(stacked.format(before)):
            part = after.split(".")[1]
            each = [made[f"{before}.experts.{n}.{part}.weight"] for n in range(config["moe_num_primary_experts"])]
            tensors[names.get_name(f"{before}.experts.{part}") + ".weight"] = torch.stack(each).numpy()
    softmax = config["moe_primary_router_apply_softmax"]
    metadata = {
        "expert_count": config["moe_num_primary_experts"],
        "expert_used_count": config["moe_num_active_primary_experts"],
        "expert_feed_forward_length": config["moe_ffn_hidden_size"],
        "expert_gating_func": (
            gguf.ExpertGatingFuncType.SOFTMAX if softmax else gguf.ExpertGatingFuncType.SIGMOID
        ).value,
        "rope.freq_base": config["rope_theta"],
    }
    if any(config["sliding_window_layout"]):
        metadata["attention.sliding_window"] = config["sliding_window_size"]
    sizes = {
        "hidden": config["hidden_size"], "heads": config["num_attention_heads"], "layers": layers,
        "kv_heads": config["num_key_value_heads"], "head_dim": config["head_dim"], "eps": config["rms_norm_eps"],
        "inner": config["moe_ffn_hidden_size"], "vocab": config["vocab_size"],
    }  # fmt: skip
    keyed = {f"smallthinker.{name}": value for name, value in metadata.items()}
    return ggufs.write(path, "smallthinker", keyed, tensors, sizes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return lmstate.load(save(tmp_path_factory.mktemp("small"), CONFIG, weights(CONFIG)), weights="float32")


@pytest.mark.parametrize(
    "changes", [{}, ROTATING, {"tie_word_embeddings": True}], ids=["windows", "rotating, softmax", "tied"]
)
def test_logits_are_those_of_the_formulas(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {**CONFIG, **changes}
    made = weights(config)
    ours = lmstate.load(save(tmp_path, config, made), weights="float32")
    expected = reference(config, made, TEXT)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours([TEXT])[0].double(), expected, atol=1e-4, rtol=1e-4)
    from_gguf = lmstate.load(write(tmp_path / "model.gguf", config, made), weights="float32")
    assert torch.equal(from_gguf([TEXT]), ours([TEXT]))


@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_cut_changes_a_bit(model: Model, data: st.DataObject) -> None:
    """Beside other rows too, and after drafts that were refused."""
    cuts = sorted(data.draw(st.lists(st.integers(1, len(TEXT) - 1), max_size=5)))
    whole, state = model([TEXT])[0], model.new_state(3)
    for start, stop in itertools.pairwise([0, *cuts, len(TEXT)]):
        drafted = TEXT[start:stop] + [7] * data.draw(st.integers(0, 4))
        got = model([TEXT[:3] if start == 0 else [], drafted, [5]], state, logits="all", commit=False)
        state.commit([3 if start == 0 else 0, stop - start, 1])
        assert torch.equal(got[1, : stop - start], whole[start:stop])
    assert torch.equal(model([TEXT], logits="last")[0], whole[-1])


def test_drafts_and_rewinds_leave_the_state_as_if_they_never_were(model: Model) -> None:
    mirror = Mirror(model, rows=2, rewind=8)
    mirror.extend([TEXT[:12], TEXT[:25]])
    mirror.draft([TEXT[:6], TEXT[:9]], [2, 9])
    mirror.rewind(1, len(mirror.rows[1]) - 5)
    mirror.check()


@pytest.mark.parametrize("weights_", ["int4", "int8", "bfloat16"])
def test_smaller_weights_do_not_depend_on_the_cut(tmp_path: Path, weights_: Any) -> None:
    small = lmstate.load(save(tmp_path, CONFIG, weights(CONFIG)), weights=weights_)
    state = small.new_state(1)
    pieces = [small([TEXT[a:b]], state, logits="all")[0] for a, b in itertools.pairwise([0, 17, 18, 40])]
    assert torch.equal(torch.cat(pieces), small([TEXT])[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_enable_secondary_experts": True}, "moe_enable_secondary_experts=True"),
        ({"moe_enable_early_router": False}, "moe_enable_early_router=False"),
        ({"moe_shared_primary_experts": 1}, "shared experts"),
        ({"moe_layer_layout": [0, 1, 1, 1, 1]}, "without experts"),
        ({"rope_layout": [1, 1]}, "rope_layout"),
    ],
)
def test_what_is_not_run_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        lmstate.load(save(tmp_path, {**CONFIG, **changes}, weights(CONFIG)), weights="float32")
