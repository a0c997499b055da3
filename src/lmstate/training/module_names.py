"""Modules as transformers names them, and so PEFT, where checkpoints name or stack their matrices otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.source import Source
from lmstate.checkpoints.text_model import TextModelSource

RENAMED: Mapping[str, Sequence[tuple[str, str]]] = {
    "bailing_hybrid": ((r"self_attn\.f_proj$", "self_attn.forget_gate.f_proj"),),
    "exaone": (
        (r"^(?:transformer\.)?h\.", "model.layers."),
        (r"attn\.attention\.out_proj$", "self_attn.o_proj"),
        (r"attn\.attention\.", "self_attn."),
        (r"mlp\.c_fc_0$", "mlp.gate_proj"),
        (r"mlp\.c_fc_1$", "mlp.up_proj"),
        (r"mlp\.c_proj$", "mlp.down_proj"),
    ),
    "hy_v3": ((r"mlp\.shared_mlp\.", "mlp.shared_experts."),),
    "kimi_linear": (
        (r"block_sparse_moe\.", "mlp."),
        (r"self_attn\.(f_[ab]_proj)$", r"self_attn.forget_gate.\1"),
    ),
    "laguna": ((r"mlp\.shared_expert\.", "mlp.shared_experts."),),
    "lfm3": ((r"self_attn\.gate_proj$", "self_attn.g_proj"),),
    "nemotron_h": ((r"^backbone\.", "model."),),
    "step3p5": ((r"\.share_expert\.", ".mlp.shared_experts."),),
}
"""Patterns of the names in a checkpoint, and the names in transformers, by the model's type."""


def _heads(config: Config) -> list[int]:
    heads = config.int("num_attention_heads", low=1)
    size = config.int("head_dim", low=1, default=config.int("hidden_size", low=1) // heads)
    kv_heads = config.int("num_key_value_heads", low=1, default=heads)
    return [heads * size, kv_heads * size, kv_heads * size]


def _delta(config: Config) -> list[int]:
    keys, values = (
        config.int(f"linear_num_{part}_heads", low=1) * config.int(f"linear_{part}_head_dim", low=1)
        for part in ("key", "value")
    )
    gates = config.int("linear_num_value_heads", low=1)
    return [2 * keys + values, values, gates, gates]


PARTS: Mapping[str, tuple[str, Sequence[str], Callable[[Config], list[int]]]] = {
    "sarvam_moe": ("query_key_value", ("q_proj", "k_proj", "v_proj"), _heads),
    "lara_mini": ("in_proj", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), _delta),
}
"""A matrix that a checkpoint has in one, the modules that it is in transformers, and the outputs of each."""


def named_as_in_transformers(model_type: object, module: str) -> str:
    """The name in transformers of a module that a checkpoint, or an adapter for code of a model's own, names."""
    for pattern, name in RENAMED.get(str(model_type), ()):
        module = re.sub(pattern, name, module)
    return module


def modules_of(source: Source, name: str, outputs: int) -> list[tuple[str, int]]:
    """The modules whose matrices a checkpoint's matrix of `outputs` outputs stacks, each with its number of outputs."""
    config = Config(source.config, f"config of {source.path}")
    model_type = source.config.get("model_type")
    while isinstance(source, TextModelSource):
        inner = "text_model" if "text_model." in source.outer_name(name) else "language_model"
        name, source = name.replace("model.", f"model.{inner}.", 1), source.whole
    module = named_as_in_transformers(model_type, name.removesuffix(".weight"))
    whole, parts, heights = PARTS.get(str(model_type), ("", (), _heads))
    before, _, last = module.rpartition(".")
    if last != whole or sum(heights(config)) != outputs:
        return [(module, outputs)]
    return [(f"{before}.{part}", height) for part, height in zip(parts, heights(config))]
