"""LoRA adapters: the numbers of merged weights and of PEFT, in its files, one for each row."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers.pytorch_utils import Conv1D

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.errors import ModelError, SnapshotError, StateError
from lmstate.files.writing import save_tensors
from lmstate.models.fingerprint import weights_in
from lmstate.training import AdaptedModel, LoraConfig, LoraModel, loss
from lmstate.training.adapted import AdaptedWeights, build_adapted
from lmstate.training.adapter_config import module_key
from tests.training.in_double import InDouble
from tests.training.small import ragged, saved, theirs, whole_loss
from tests.zoo import CASES as ZOO
from tests.zoo import randomize, text

# Stacked, stacked out of order and shared projections, recurrences, and a mixture.
CASES = {
    "llama": "all-linear", "phi3": "all-linear", "falcon-grouped": ["query_key_value", "dense"], "gemma3": "all-linear",
    "lfm2": "all-linear", "gpt_oss": ["q_proj", "o_proj"], "qwen3_next": ["q_proj", "in_proj_qkvz", "out_proj"],
}  # fmt: skip
# Models that transformers names otherwise than their checkpoints, or that store matrices transposed or share them.
BOTH_WAYS = [
    "exaone", "gpt2", "sarvam_moe", "hy_v3", "kimi_linear", "lara_mini", "lfm3", "bailing_hybrid", "zamba2"
]  # fmt: skip


def adapted(
    folder: Path, out: Path, targets: object = "all-linear", seed: int = 1, dora: bool = False
) -> LoraModel:  # fmt: skip
    """A model with an adapter that changes much, saved in `out`."""
    lora = LoraConfig(4, 8.0, targets, dora=dora, ranks={"o_proj": 2})
    model = lmstate.load(folder, weights="float32", trainable="lora", lora=lora)
    assert isinstance(model, LoraModel)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            moved = 0.2 * torch.randn(tensor.shape, generator=generator)
            tensor.copy_(moved if tensor.ndim == 2 else tensor * (1 + moved))
    model.save_pretrained(out)
    written = json.loads((out / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["revision"]) == (str(Path(folder).absolute()), None)
    return model


@pytest.mark.parametrize(
    ("case", "dora"), [*((case, False) for case in CASES), ("falcon-grouped", True), ("phi3", True)]
)
def test_an_adapter_gives_what_merged_weights_give(case: str, dora: bool, tmp_path: Path) -> None:
    ids = text(40, rows=2)
    with saved(theirs(case)) as folder, torch.no_grad():
        model = adapted(folder, tmp_path, CASES[case], dora=dora)
        plain = lmstate.load(folder, weights="float32")
        apart = lmstate.load(folder, weights="float32", adapter=tmp_path)
        merged = lmstate.load(folder, weights="float32", adapter=tmp_path, merge=True)
        assert not torch.allclose(plain(ids), apart(ids), atol=0.1)  # type: ignore[arg-type]
        torch.testing.assert_close(apart(ids), merged(ids), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model(ids), apart(ids), atol=1e-5, rtol=1e-5)
        state = apart.new_state(rows=2)
        apart(ids[:, :17], state)
        cut = apart(ids[:, 17:], state)
        torch.testing.assert_close(cut, merged(ids)[:, -1], atol=1e-4, rtol=1e-4)  # type: ignore[index]


@pytest.mark.parametrize("case", ["qwen2-tied-mqa", "falcon-grouped"])  # biases, and outputs in another order
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_new_adapter_with_magnitudes_changes_nothing(case: str, kind: str, tmp_path: Path) -> None:
    ids = text(20, rows=2)
    with saved(theirs(case)) as folder, torch.no_grad():
        model = lmstate.load(folder, weights=kind, trainable="lora", lora=LoraConfig(2, dora=True))
        got, plain = model(ids), lmstate.load(folder, weights=kind)(ids)
        torch.testing.assert_close(got, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "qwen3_next", "phi3"])
def test_gradients_of_an_adapter_are_those_of_the_weights_that_it_changes(case: str, tmp_path: Path) -> None:
    rows = ragged(40, 13)
    with saved(theirs(case)) as folder, InDouble():
        model = adapted(folder, tmp_path, CASES[case])
        expected = whole_loss(model, rows)
        expected.backward()
        wanted = [leaf.grad for leaf in model.parameters()]
        model.zero_grad()
        got = loss(model, rows, chunk=7)
        got.backward()
        assert float(abs(got - expected).detach()) < 1e-10
        for leaf, grad in zip(model.parameters(), wanted):
            assert grad is not None and float(grad.abs().max()) > 0
            torch.testing.assert_close(leaf.grad, grad, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ["int4", "int8", "bfloat16"])
def test_an_adapter_trains_over_weights_of_few_bits(kind: str, tmp_path: Path) -> None:
    config = theirs("llama").config
    config.hidden_size, config.intermediate_size, config.num_attention_heads = 64, 96, 8
    config.head_dim, config.num_key_value_heads = 8, 2
    torch.manual_seed(0)
    small = type(theirs("llama"))(config)
    randomize(small)
    with saved(small) as folder:
        model = lmstate.load(folder, weights=kind, trainable="lora")
        assert isinstance(model, LoraModel)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            now = loss(model, ragged(24), chunk=10)
            now.backward()
            optimizer.step()
            losses.append(float(now.detach()))
        assert losses[-1] < 0.5 * losses[0]
        model.save_pretrained(tmp_path)
        merged = lmstate.load(folder, weights=kind, adapter=tmp_path, merge=True)
        plain = lmstate.load(folder, weights=kind)
        kinds = [{type(weight) for _, weight in weights_in(each.network)} for each in (merged, plain)]
        assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    ("case", "targets"),
    [("qwen3_next", ["q_proj", "v_proj", "out_proj"]), ("qwen2-tied-mqa", ["q_proj", "up_proj"])],
)
def test_each_row_may_have_an_adapter_of_its_own(case: str, targets: list[str], tmp_path: Path) -> None:
    ids = text(30, rows=3)
    with saved(theirs(case)) as folder, torch.no_grad():
        for seed, name in enumerate("ab"):
            adapted(folder, tmp_path / name, targets, seed, dora=name == "b")
        model = lmstate.load(folder, weights="float32", adapter={name: tmp_path / name for name in "ab"})
        assert isinstance(model, AdaptedModel)
        rows = model.adapted(["b", None, "a"])
        state = rows.new_state(rows=3)
        rows(ids[:, :11], state)
        got = rows(ids[:, 11:], state)
        assert got is not None
        for row, name in enumerate(["b", None, "a"]):
            alone = model.adapted(name)(ids[row : row + 1])
            assert alone is not None
            torch.testing.assert_close(got[row], alone[0, -1], atol=1e-4, rtol=1e-4)
        with pytest.raises(ModelError, match="no adapter 'c'"):
            model.adapted("c")


def test_a_state_of_one_adapter_is_refused_by_another(tmp_path: Path) -> None:
    with saved(theirs("llama")) as folder, torch.no_grad():
        for seed, name in enumerate("ab"):
            adapted(folder, tmp_path / name, seed=seed)
        model = lmstate.load(folder, weights="float32", adapter={name: tmp_path / name for name in "ab"})
        assert isinstance(model, AdaptedModel)
        one, other = model.adapted("a"), model.adapted("b")
        state = one.new_state()
        one(text(9), state)
        for wrong in (other, model):
            with pytest.raises(StateError):
                wrong([[4]], state)
            with pytest.raises(SnapshotError):
                wrong.new_state().restore(0, state.snapshot())
        again = lmstate.load(folder, weights="float32", adapter=tmp_path / "a")
        again([[4]], state)


@pytest.mark.parametrize("alpha", [math.nan, math.inf, -1.0])
def test_an_alpha_that_would_not_load_again_is_refused(alpha: float) -> None:
    for options in ({"alpha": alpha}, {"alphas": {"q_proj": alpha}}):
        with pytest.raises(ModelError, match="alphas are 0 to 1e"):
            LoraConfig(**options)  # type: ignore[arg-type]


def test_what_is_saved_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x.safetensors", {"x": torch.zeros(2, 3).T, "one": torch.tensor(1.0)})
    (tmp_path / "plain").touch()
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} and file.get_tensor("x").shape == (3, 2)


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with saved(theirs("llama")) as folder:
        adapted(folder, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    with saved(theirs("mistral-full-tied")) as folder:
        for changes in (
            {"peft_type": "IA3"},
            {"use_dora": True},  # and no magnitudes
            {"use_qalora": True},
            {"bias": "all"},
            {"r": -1},
            {"rank_pattern": {"(a+)+$": 1}},
            {"init_lora_weights": "pissa_niter_4"},  # beside a base that is not the checkpoint's
            {"init_lora_weights": "OLoRA"},
        ):
            (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
            with pytest.raises(ModelError):
                lmstate.load(folder, adapter=tmp_path)
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with saved(theirs("gpt_neox")) as folder, pytest.raises(ModelError, match="has not"):
        lmstate.load(folder, adapter=tmp_path)


def peft_key(patterns: dict[str, float], module: str) -> str | None:
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)


def check_like_weights(case: str, out: Path, ending: str, named: Callable[[str], str] = str, **config: Any) -> None:
    """An adapter in PEFT's format of all modules that a pattern matches is as its updates in the weights."""
    model, ids, tensors = theirs(case), text(20), {}
    config = {"peft_type": "LORA", "bias": "none", "r": 4, "lora_alpha": 8, "target_modules": ending, **config}
    ranks, alphas = config.get("rank_pattern", {}), config.get("alpha_pattern", {})
    draw = torch.Generator().manual_seed(7)
    with saved(model) as folder, torch.no_grad():
        for module, part in model.named_modules():
            if isinstance(part, torch.nn.Linear) and re.fullmatch(rf"(.*\.)?({ending})", module):
                rank, alpha = ranks.get(peft_key(ranks, module), 4), alphas.get(peft_key(alphas, module), 8)
                down, up = (
                    0.2 * torch.randn(*shape, generator=draw)
                    for shape in ((rank, part.in_features), (part.out_features, rank))
                )
                key = f"base_model.model.{named(module)}.lora"
                tensors |= {f"{key}_A.weight": down, f"{key}_B.weight": up}
                part.weight += alpha / rank * up @ down
        assert tensors
        save_tensors(out / "adapter_model.safetensors", tensors)
        (out / "adapter_config.json").write_text(json.dumps(config))
        adapted = lmstate.load(folder, weights="float32", adapter=out)
        torch.testing.assert_close(adapted(ids), model(ids).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("what", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    "pattern", ["^model.layers.0.self_attn.q_proj", r"layers\.(0|2)\.self_attn\.[qk]_proj", "q_proj"]
)
def test_patterns_are_matched_as_peft_matches_them(what: str, pattern: str, tmp_path: Path) -> None:
    patterns = {pattern: 2 if what == "rank_pattern" else 32, ".*_proj": 3}
    check_like_weights("llama", tmp_path, "[qko]_proj", **{what: patterns})


@pytest.mark.parametrize("case", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("names", ["model.language_model.", "model.", "language_model.model."])
def test_names_of_wrappers_and_of_their_text_models_are_one(case: str, names: str, tmp_path: Path) -> None:
    check_like_weights(
        case, tmp_path, r"model\.language_model\..*[qo]_proj", lambda name: name.replace("model.language_model.", names)
    )


@pytest.mark.parametrize(
    ("case", "ending"),
    [
        ("qwen3_5", "in_proj_[abz]|in_proj_qkv"), ("qwen3_next-dense", "in_proj_ba"), ("olmo_hybrid", "[ab]_proj"),
        ("deepseek_v3", "kv_b_proj|o_proj"), ("qwen2_moe", "shared_expert_gate|q_proj"),
    ],
)  # fmt: skip
def test_gates_and_matrices_that_are_split_take_updates(case: str, ending: str, tmp_path: Path) -> None:
    check_like_weights(case, tmp_path, ending)


@pytest.mark.parametrize("case", ["deepseek_v3", "ernie4_5_moe", "qwen2_moe", "qwen3_next"])
def test_modules_named_as_those_of_experts_are_targeted_by_their_parameters(case: str, tmp_path: Path) -> None:
    """PEFT takes the target `up_proj`, also at the end of a whole name, for that of the experts."""
    ids = text(20)
    with saved(theirs(case)) as folder, torch.no_grad():
        given = adapted(folder, tmp_path)(ids)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        assert not {name.rpartition(".")[2] for name in config["target_modules"]} & {
            "gate_proj",
            "up_proj",
            "down_proj",
        }
        assert all(name.endswith("_proj.weight") for name in config["target_parameters"])
        again = lmstate.load(folder, weights="float32", adapter=tmp_path)
        torch.testing.assert_close(again(ids), given, atol=1e-4, rtol=1e-4)
        config["target_parameters"] = ["mlp.experts.gate_up_proj"]
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match="target_parameters"):
            lmstate.load(folder, adapter=tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        "mamba", "mamba2", "falcon_h1", "nemotron_h", "qwen2_vl", "jamba", "deepseek_v3", "ernie4_5_moe", "qwen2_moe",
        "qwen3_next", *BOTH_WAYS,
    ],
)  # fmt: skip
def test_peft_reads_what_is_saved(case: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    reference, ids = theirs(case), text(20)
    with saved(reference) as folder, torch.no_grad():
        given = adapted(folder, tmp_path)(ids)
        other = peft.PeftModel.from_pretrained(reference, tmp_path)
        torch.testing.assert_close(other(ids).logits, given, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("case", ["llama", "laguna", *BOTH_WAYS])
def test_an_adapter_that_peft_makes_of_all_projections_is_read(case: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    reference, ids = theirs(case), text(20)
    config = peft.LoraConfig(r=3, lora_alpha=9, target_modules="all-linear", init_lora_weights=False)
    with saved(reference) as folder, torch.no_grad():
        other = peft.get_peft_model(reference, config)
        other.save_pretrained(tmp_path)
        own = lmstate.load(folder, weights="float32", adapter=tmp_path)
        torch.testing.assert_close(own(ids), other(ids).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("case", ["laguna", "step3p5", *BOTH_WAYS])
def test_modules_have_the_names_that_transformers_gives_them(case: str) -> None:
    check_names(case)


@pytest.mark.soak
def test_modules_of_every_family_have_the_names_that_transformers_gives_them() -> None:
    for case in {theirs(case).config.model_type: case for case in ZOO}.values():
        check_names(case)


def check_names(case: str) -> None:
    """Every projection of the text's layers is known by its name in transformers, and no other is."""
    model = theirs(case)
    projections = {
        module_key(name)
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear | Conv1D) and module_key(name).startswith(("layers.", "h.", "blocks."))
    }
    with saved(model) as folder:
        weights = AdaptedWeights(WeightLoader(open_source(folder), "float32"), [None])
        build_adapted(weights, [None])
    known = {module_key(name) for name in (*weights.modules, *weights.small)}
    unused = {name for name in projections - known if weights.ignores(f"model.{name}.weight")}
    assert projections - known - unused == set(), "transformers has them, and lmstate does not"
    outside = {name for name in map(module_key, weights.modules) if not name.startswith(("layers.", "h.", "blocks."))}
    routers = {name for name in map(module_key, weights.modules) if re.search(r"(gate|router)(\.layer)?$", name)}
    assert set(map(module_key, weights.modules)) - projections - outside - routers == set()


def test_names_of_a_models_own_code_are_those_of_transformers(tmp_path: Path) -> None:
    """Adapters for EXAONE were made with code beside its weights, which names modules as its checkpoint does."""

    def named(module: str) -> str:
        return module.replace("model.layers.", "transformer.h.").replace("self_attn.", "attn.attention.")

    check_like_weights("exaone", tmp_path, "[qv]_proj", named)


def test_damaged_files_of_an_adapter_are_refused(tmp_path: Path) -> None:
    with saved(theirs("llama")) as folder:
        adapted(folder, tmp_path)
        config = (tmp_path / "adapter_config.json").read_text()
        (tmp_path / "adapter_config.json").write_text(json.dumps({**json.loads(config), "r": 5}))
        with pytest.raises(ModelError, match="has rank 4, and its config says 5"):
            lmstate.load(folder, adapter=tmp_path)
        (tmp_path / "adapter_config.json").write_text(config)
        with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        for module in {name.partition(".lora_")[0] for name in tensors}:
            down, up = (f"{module}.lora_{part}.weight" for part in "AB")
            tensors[down], tensors[up] = tensors[down][:0], tensors[up][:, :0]
        save_tensors(tmp_path / "adapter_model.safetensors", tensors)
        with pytest.raises(ModelError, match="has rank 0"):
            lmstate.load(folder, adapter=tmp_path)
        tensors[f"{module}.lora_A.default.weight"] = tensors[down]
        save_tensors(tmp_path / "adapter_model.safetensors", tensors)
        with pytest.raises(ModelError, match="two tensors A"):
            lmstate.load(folder, adapter=tmp_path)
        (tmp_path / "adapter_config.json").unlink()
        os.mkfifo(tmp_path / "adapter_config.json")
        with pytest.raises(ModelError, match="not a regular file"):
            lmstate.load(folder, adapter=tmp_path)


@pytest.mark.parametrize("dora", [False, True])
def test_peft_reads_what_is_saved_and_its_gradients_and_files_are_the_same(dora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    reference, rows = theirs("llama"), ragged(24, 24)
    with saved(reference) as folder:
        model = adapted(folder, tmp_path / "ours", dora=dora)
        loss(model, rows, chunk=7).backward()
        other = peft.PeftModel.from_pretrained(reference, tmp_path / "ours", is_trainable=True)
        whole_loss(other, rows).backward()
        own = dict(model.named_parameters())
        found = {
            name.replace("_vector.default.weight", "_vector").replace(".default.", "."): leaf
            for name, leaf in other.named_parameters()
            if leaf.requires_grad
        }  # fmt: skip
        assert set(own) == set(found)
        for name, leaf in found.items():
            torch.testing.assert_close(own[name].grad, leaf.grad, atol=1e-4 * float(leaf.grad.abs().max()), rtol=1e-4)
        other.save_pretrained(tmp_path / "theirs")
        again = lmstate.load(folder, weights="float32", adapter=tmp_path / "theirs")
        ids = text(20)
        torch.testing.assert_close(again(ids), other(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["qwen2-tied-mqa", "falcon-grouped"])
def test_gradients_of_magnitudes_in_chunks_are_those_of_the_whole_and_norms_follow_the_optimizer(
    case: str, tmp_path: Path
) -> None:
    rows = ragged(40, 13)
    targets = CASES.get(case, "all-linear")
    with saved(theirs(case)) as folder, InDouble():
        model = adapted(folder, tmp_path, targets, dora=True)
        expected = whole_loss(model, rows)
        expected.backward()
        wanted = [leaf.grad for leaf in model.parameters()]
        model.zero_grad()
        loss(model, rows, chunk=7).backward()
        for leaf, grad in zip(model.parameters(), wanted):
            assert grad is not None and float(grad.abs().max()) > 0
            torch.testing.assert_close(leaf.grad, grad, atol=1e-10, rtol=1e-10)
        with torch.no_grad():  # one whole pass of an optimizer: norms are those of what it wrote
            for leaf in model.parameters():
                leaf -= 0.01 * leaf.grad
            model.save_pretrained(tmp_path)
            again = lmstate.load(folder, weights="float32", adapter=tmp_path, merge=True)
            assert float(abs(whole_loss(again, rows) - whole_loss(model, rows))) < 1e-5
