"""State space models from GGUF: the logits of the model that was converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmstate.checkpoints.gguf.source import GgufSource
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.errors import ModelError
from lmstate.models.families import build
from tests.files import ggufs, hybrid_ggufs
from tests.zoo import CASES, text

# architecture, a case of the zoo, and what the format cannot hold or the converter insists on
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("mamba", "mamba", {}),
    ("mamba", "falcon_mamba", {"mixer_rms_eps": 1e-6}),
    ("mamba2", "mamba2-groups", {"use_bias": False, "time_step_limit": (0.0, float("inf"))}),
    ("jamba", "jamba", {}),
    ("jamba", "jamba-dense", {"mamba_proj_bias": False}),
    ("granite", "granitemoehybrid-attention", {}),
    ("granitehybrid", "granitemoehybrid", {}),
    ("granitehybrid", "granitemoehybrid-moe", {"mamba_proj_bias": False}),
    ("falcon-h1", "falcon_h1", {}),
    (
        "falcon-h1",
        "falcon_h1-norm",
        {"mamba_d_ssm": 96, "mamba_proj_bias": False, "attention_bias": False, "mlp_bias": False,
         "projectors_bias": False, "tie_word_embeddings": False},
    ),
    ("nemotron_h", "nemotron_h", {"time_step_min": 0.001}),
    ("nemotron_h_moe", "nemotron_h-latent", {"time_step_min": 0.001, "mlp_bias": False}),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "case", "changes"), MODELS, ids=[f"{arch}-{case}" for arch, case, _ in MODELS])
def test_a_converted_model_gives_the_logits_of_the_original(
    arch: str, case: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    make = CASES[case]
    theirs = hybrid_ggufs.randomized(make.func(*make.args, **{**make.keywords, **changes}))
    path = hybrid_ggufs.write(tmp_path / "model.gguf", arch, theirs, tmp_path / "saved")
    ours = build(WeightLoader(open_source(path), "float32"))
    assert ours.config.family == theirs.config.model_type
    ids = text(70)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    again = GgufSource.from_json(path, open_source(path).to_json(), None)
    name = next(name for name in sorted(again.names()) if name.endswith(("A_log", "q_proj.weight")))
    assert torch.equal(again.read(name), open_source(path).read(name))


def test_a_decay_that_grows_is_refused(tmp_path: Path) -> None:
    theirs = hybrid_ggufs.randomized(CASES["mamba"]())
    path = hybrid_ggufs.write(tmp_path / "model.gguf", "mamba", theirs, tmp_path / "saved")
    negated = (-np.exp(theirs.backbone.layers[0].mixer.A_log.detach().numpy())).tobytes()
    raw = path.read_bytes()
    assert raw.count(negated) == 1
    path.write_bytes(raw.replace(negated, bytes(len(negated))))
    with pytest.raises(ModelError, match="must be negative"):
        build(WeightLoader(open_source(path), "float32"))


def test_more_heads_than_features_are_refused(tmp_path: Path) -> None:
    theirs = hybrid_ggufs.randomized(CASES["granitemoehybrid"]())
    path = hybrid_ggufs.write(tmp_path / "model.gguf", "granitehybrid", theirs, tmp_path / "saved", heads=64)
    with pytest.raises(ModelError, match="64 heads cannot share"):
        open_source(path)


def test_paired_rows_of_no_heads_are_refused(tmp_path: Path) -> None:
    theirs = hybrid_ggufs.randomized(CASES["granitemoehybrid"]())
    none = [0] * theirs.config.num_hidden_layers
    path = hybrid_ggufs.write(tmp_path / "model.gguf", "granitehybrid", theirs, tmp_path / "saved", kv_heads=none)
    with pytest.raises(ModelError, match="0 heads cannot share"):
        open_source(path)


@pytest.mark.parametrize(
    ("layers", "message"), [(("0", "1", "3"), "irregular pattern"), (("1", "00001"), "lacks|does not use")]
)
def test_attention_in_no_regular_pattern_is_refused(layers: tuple[str, ...], message: str, tmp_path: Path) -> None:
    tensors = {"token_embd.weight": ggufs.floats(64, 64)}
    tensors |= {f"blk.{layer}.attn_q.weight": ggufs.floats(64, 64) for layer in layers}
    keys = {f"jamba.ssm.{key}": 4 for key in ("state_size", "conv_kernel", "time_step_rank", "inner_size")}
    path = ggufs.write(tmp_path / "a.gguf", "jamba", keys, tensors, sizes={"layers": 4})
    with pytest.raises(ModelError, match=message):
        build(WeightLoader(open_source(path), "float32"))
