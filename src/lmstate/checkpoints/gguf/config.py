"""Map of each GGUF architecture onto Hugging Face: config values, tensor names, permutations of the converter.

A new architecture is one entry of `ARCHITECTURES`. Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md;
the conversions undone here are those of llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import (
    ATTENTION,
    BLOCK,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    MOST_LAYERS,
    MOST_WIDTH,
    PRE_NORMS,
    ROPE_TENSORS,
    STANDARD,
    Architecture,
    Change,
    HeadTiling,
    TensorLocation,
)
from lmstate.checkpoints.gguf.architectures.chosen import CHOSEN
from lmstate.checkpoints.gguf.architectures.delta import DELTAS
from lmstate.checkpoints.gguf.architectures.dense import DENSE
from lmstate.checkpoints.gguf.architectures.drafters import DRAFTERS
from lmstate.checkpoints.gguf.architectures.encoders import WITH_ENCODERS
from lmstate.checkpoints.gguf.architectures.latent import LATENTS
from lmstate.checkpoints.gguf.architectures.llama_like import LLAMA_LIKE
from lmstate.checkpoints.gguf.architectures.mamba import HYBRIDS
from lmstate.checkpoints.gguf.architectures.moe import MIXTURES
from lmstate.checkpoints.gguf.architectures.older import OLDER
from lmstate.checkpoints.gguf.architectures.shared_kv import SHARED
from lmstate.checkpoints.gguf.architectures.sparse import SPARSER, windows
from lmstate.checkpoints.gguf.architectures.streams import WIDE
from lmstate.checkpoints.gguf.architectures.windowed import WINDOWS_AND_LATENTS
from lmstate.checkpoints.gguf.reader import GgufContents, TensorPlace
from lmstate.checkpoints.gguf.special_ids import special_id
from lmstate.errors import ModelError

MOST_STACKED = 64  # matrices in a tensor outside of blocks


def _llama(metadata: Config, prefix: str, config: dict[str, Any], tensors: dict[str, TensorPlace]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if count := metadata.int(f"{prefix}.expert_count", 0, 4096, default=0):
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_experts": count}
        config["num_experts_per_tok"] = metadata.int(f"{prefix}.expert_used_count", 1, count)


def _attention_bias(metadata: Config, prefix: str, config: dict[str, Any], tensors: dict[str, TensorPlace]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors


def _olmo2(metadata: Config, prefix: str, config: dict[str, Any], tensors: dict[str, TensorPlace]) -> None:
    """OLMo 2, and OLMo 3 where there are windows."""
    _attention_bias(metadata, prefix, config, tensors)
    if metadata.int(f"{prefix}.attention.sliding_window", 0, default=0):
        windows(metadata, prefix, config, tensors)
        config |= {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}


def _qwen3_moe(metadata: Config, prefix: str, config: dict[str, Any], tensors: dict[str, TensorPlace]) -> None:
    _attention_bias(metadata, prefix, config, tensors)
    config["num_experts"] = metadata.int(f"{prefix}.expert_count", 1, 4096)
    config["num_experts_per_tok"] = metadata.int(f"{prefix}.expert_used_count", 1, 4096)
    config["moe_intermediate_size"] = metadata.int(f"{prefix}.expert_feed_forward_length", 1, MOST_WIDTH)
    config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _smollm3(metadata: Config, prefix: str, config: dict[str, Any], tensors: dict[str, TensorPlace]) -> None:
    # GGUF does not say which layers go without rope; llama.cpp fixes it at every fourth, as the released model has it.
    _llama(metadata, prefix, config, tensors)
    config["no_rope_layer_interval"] = 4
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]


def _phi3(metadata: Config, prefix: str, config: dict[str, Any], tensors: dict[str, TensorPlace]) -> None:
    config["sliding_window"] = metadata.int(f"{prefix}.attention.sliding_window", 1, default=None)


ARCHITECTURES = {
    "llama": Architecture(  # Mixtral too
        "llama",
        "LlamaForCausalLM",
        {**STANDARD, **EXPERTS, "ffn_gate_inp": "mlp.gate"},
        paired=True,
        extra=_llama,
        also=("mixtral",),
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**STANDARD, **HEAD_NORMS}, extra=_attention_bias),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**ATTENTION, **PRE_NORMS, **HEAD_NORMS, **EXPERTS, "ffn_gate_inp": "mlp.gate"},
        extra=_qwen3_moe,
    ),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        {
            **ATTENTION,
            **MLP,
            **HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        extra=_olmo2,
        also=("olmo3",),
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", paired=True, extra=_smollm3),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            **PRE_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        extra=_phi3,
    ),
    **DENSE,
    **HYBRIDS,
    **DELTAS,
    **MIXTURES,
    **WINDOWS_AND_LATENTS,
    **SHARED,
    **OLDER,
    **LLAMA_LIKE,
    **SPARSER,
    **LATENTS,
    **CHOSEN,
    **DRAFTERS,
    **WIDE,
    **WITH_ENCODERS,
}


def architecture(metadata: Config) -> tuple[str, Architecture]:
    """The prefix of the architecture's metadata keys, and its entry in the table."""
    name = metadata.str("general.architecture")
    if name == "clip":
        raise ModelError(
            f"{metadata.where} is the vision tower of another file, its text model: load that, with mmproj (--mmproj) "
            f"and this file"
        )
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{metadata.where} is a model of architecture {name[:80]!r}, which lmstate cannot read from GGUF; "
            f"it reads {', '.join(sorted(ARCHITECTURES))}"
        )
    return name, ARCHITECTURES[name]


def config_of(contents: GgufContents, rope_factors: dict[str, list[float]], where: str) -> dict[str, Any]:
    """The model's config.json, from metadata. `rope_factors`: the values of those `ROPE_TENSORS` that are there."""
    metadata, tensors = Config(contents.metadata, where), contents.tensors
    prefix, arch = architecture(metadata)
    hidden = metadata.int(f"{prefix}.embedding_length", 1, MOST_WIDTH)
    vocab = _vocab_size(metadata, tensors, hidden, arch.drafter)
    layers = metadata.int(f"{prefix}.block_count", 1, MOST_LAYERS)
    least = 0 if arch.hybrid else 1
    heads = _of_layers(metadata, f"{prefix}.attention.head_count", layers, None, least, arch.varied)
    config: dict[str, Any] = {
        "model_type": arch.model_type,
        "architectures": [arch.class_name],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": _of_layers(
            metadata,
            f"{prefix}.feed_forward_length",
            layers,
            metadata.int(f"{prefix}.expert_feed_forward_length", 1, MOST_WIDTH, default=None),  # where all are experts
            least,
            arch.varied,
        ),
        "num_attention_heads": heads,
        "num_key_value_heads": _of_layers(
            metadata, f"{prefix}.attention.head_count_kv", layers, heads, least, arch.varied
        ),
        "head_dim": metadata.int(f"{prefix}.attention.key_length", 1, MOST_WIDTH, default=hidden // max(heads, 1)),
        "hidden_act": "silu",
        **_eps(arch, metadata, prefix),
        "max_position_embeddings": metadata.int(f"{prefix}.context_length", 1),
        "vocab_size": vocab,
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": metadata.float(f"{prefix}.rope.freq_base", 1e-3, 1e18, default=10000.0),
    }
    if not config["head_dim"]:
        raise ModelError(f"{where}: {heads} heads cannot share a width of {hidden}")
    if not arch.whole_rope:
        rotated = metadata.int(f"{prefix}.rope.dimension_count", 1, MOST_WIDTH, default=config["head_dim"])
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    scaling = _rope_scaling(metadata, prefix, config, rope_factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
        if "original_max_position_embeddings" in scaling:
            config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if sections := metadata.ints(f"{prefix}.rope.dimension_sections", default=()):
        # Pairs of features that each axis of a position turns; GGUF has room for four axes.
        config["rope_scaling"] = {"rope_type": "default", **(scaling or {}), "mrope_section": list(sections[:3])}
    for key in ("bos", "eos"):
        config[f"{key}_token_id"] = special_id(metadata, key, vocab)
    if arch.extra is not None:
        arch.extra(metadata, prefix, config, tensors)
    return config


def _vocab_size(metadata: Config, tensors: dict[str, TensorPlace], hidden: int, drafter: bool) -> int:
    """The tokens of the embedding; of a drafter without one, those of the tokenizer."""
    place = tensors.get("token_embd.weight")
    if place is None and drafter:
        return len(metadata.strs("tokenizer.ggml.tokens"))
    if place is None:
        raise ModelError(f"{metadata.where} has no tensor 'token_embd.weight'; the file is incomplete")
    if len(place.shape) != 2 or place.shape[1] != hidden:
        raise ModelError(
            f"{metadata.where}: its embedding has the shape {place.shape} and its metadata say a width of {hidden}"
        )
    return place.shape[0]


def _eps(arch: Architecture, metadata: Config, prefix: str) -> dict[str, float]:
    rms, layer = (f"{prefix}.attention.layer_norm{kind}_epsilon" for kind in ("_rms", ""))
    if arch.eps == "rms_norm_eps" or (arch.either_norm and layer not in metadata):
        return {"rms_norm_eps": metadata.float(rms, 0.0, 1.0)}
    return {arch.eps: metadata.float(layer, 0.0, 1.0)}


def _of_layers(metadata: Config, name: str, layers: int, default: int | None, least: int, varied: bool) -> int:
    """A number that GGUF may give once or per layer; it must be the same in all layers that have any (if `least` is 0).

    0 if none has; one of them where they may be `varied`.
    """
    if isinstance(metadata.get(name), list):
        values = set(metadata.ints(name, layers, least, MOST_WIDTH)) - {0}
        if len(values) > 1 and not varied:
            raise ModelError(f"{metadata.where} has {name!r} differ from layer to layer, which lmstate cannot run")
        return values.pop() if values else 0
    if default is None:
        return metadata.int(name, least, MOST_WIDTH)
    return metadata.int(name, least, MOST_WIDTH, default=default)


def _rope_scaling(
    metadata: Config, prefix: str, config: dict[str, Any], factors: dict[str, list[float]]
) -> dict[str, Any] | None:
    key = f"{prefix}.rope.scaling"
    longest = config["max_position_embeddings"]
    original = metadata.int(f"{key}.original_context_length", 1, default=longest)
    if "rope_factors_long.weight" in factors and "rope_factors_short.weight" in factors:
        return {
            "rope_type": "longrope",
            "long_factor": factors["rope_factors_long.weight"],
            "short_factor": factors["rope_factors_short.weight"],
            "original_max_position_embeddings": original,
            "attention_factor": metadata.float(f"{key}.attn_factor", 0.0, 1e6, default=1.0),
        }
    if "rope_freqs.weight" in factors:
        # Llama 3's scaling, already worked out by the converter into one divisor per frequency. Longrope with the same
        # divisors at every length and no attention factor is exactly that.
        divisors = factors["rope_freqs.weight"]
        return {
            "rope_type": "longrope",
            "long_factor": divisors,
            "short_factor": divisors,
            "original_max_position_embeddings": longest,
            "factor": 1.0,
            "attention_factor": 1.0,
        }
    kind = metadata.str(f"{key}.type", ("none", "linear", "yarn", "longrope"), default="linear")
    if kind == "none":  # whatever the factor
        return None
    # "scale_linear" is how files of 2023 say it.
    factor = metadata.float(
        f"{key}.factor", 1e-3, 1e6, default=metadata.float(f"{prefix}.rope.scale_linear", 1e-3, 1e6, default=1.0)
    )
    if kind == "longrope":
        raise ModelError(f"{metadata.where} uses longrope and lacks its tensors {', '.join(ROPE_TENSORS[1:])}")
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            value = metadata.float(f"{key}.yarn_{name}", 0.0, 1e6, default=None)
            if value is not None:
                scaling[name] = value
        return scaling
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None


def locate(contents: GgufContents, config: dict[str, Any], where: str) -> dict[str, TensorLocation]:
    """Every tensor under its Hugging Face name. One that the table does not know keeps its own name.

    Raises `ModelError` for tensors that do not fit the config, and for two that are the same one.
    """
    _, arch = architecture(Config(contents.metadata, where))
    found: dict[str, TensorLocation] = {}
    for name, place in contents.tensors.items():
        if name in ROPE_TENSORS:
            continue
        for full, located in _located(arch, name, place, config, where):
            if full in found:
                raise ModelError(f"{where} is damaged: two of its tensors are {full[:80]!r}, and {name[:80]!r} is one")
            found[full] = located
    return found


def _located(
    arch: Architecture, name: str, place: TensorPlace, config: dict[str, Any], where: str
) -> Iterator[tuple[str, TensorLocation]]:
    """Hugging Face names of one tensor of the file: one tensor, or one for each expert."""
    match = re.fullmatch(r"(\w+\.)??" + BLOCK + r"(([\w.]+?)(?:\.(weight|bias))?)", name)
    stack = arch.stacks.get(match[1] or "", arch.layers) if match else ""
    inside = _inside(arch, match[1] or "", match[3], match[4], match[5]) if match else None
    if match is None or inside is None:
        outside = arch.outside.get(name, name)
        if "{ngrams}" in outside:
            outside = outside.format(ngrams=_layer_with_ngrams(config, name, where))
        if "{each}" not in outside:
            yield outside, TensorLocation(place, change=_change(arch, outside))
            return
        yield from _few(outside, name, place, where)
        return
    full = f"{stack}.{match[2]}.{inside}"
    if "{each}" in full:
        yield from _few(full, name, place, where)
        return
    if "{qkv}" in full:
        yield from _qkv(full, name, place, config, where)
        return
    heads = _heads(config, int(match[2])) if arch.paired else {}
    if arch.paired_norms:
        heads |= {"attn_q_norm": 1, "attn_k_norm": 1}
    paired = heads.get(match[4])
    if paired is not None and (not paired or place.shape[0] % (2 * paired)):
        raise ModelError(f"{where}: tensor {name!r} has {place.shape[0]} rows, which {paired} heads cannot share")
    if "{expert}" not in full:
        tiled = _tiled(arch, full, config, place, where)
        yield full, TensorLocation(place, paired_heads=paired, change=_change(arch, full), tiled=tiled)
        return
    if len(place.shape) != 3 or place.shape[0] != config.get("num_experts"):
        raise ModelError(f"{where}: tensor {name!r} has the shape {place.shape}, not one matrix per expert")
    for expert in range(place.shape[0]):
        yield full.format(expert=expert), TensorLocation(place, expert)


def _layer_with_ngrams(config: dict[str, Any], name: str, where: str) -> int:
    if not config.get("ple_layer_ids"):
        raise ModelError(f"{where}: tensor {name!r} is a table of n-grams, and its metadata name no layer with them")
    return int(config["ple_layer_ids"][0]) - 1


def _few(full: str, name: str, place: TensorPlace, where: str) -> Iterator[tuple[str, TensorLocation]]:
    """Each matrix of a tensor that holds a few."""
    if len(place.shape) != 3 or place.shape[0] > MOST_STACKED:
        raise ModelError(f"{where}: tensor {name!r} has the shape {place.shape}, not a few matrices")
    for each in range(place.shape[0]):
        yield full.format(each=each), TensorLocation(place, each)


def _heads(config: dict[str, Any], layer: int) -> dict[str, int]:
    """Counts of heads of the queries and the keys of a layer."""
    names = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    listed = {ours: config.get(f"{theirs}_by_layer", ()) for ours, theirs in names.items()}
    return {
        ours: listed[ours][layer] if layer < len(listed[ours]) else config[theirs] for ours, theirs in names.items()
    }


def _qkv(
    full: str, name: str, place: TensorPlace, config: dict[str, Any], where: str
) -> Iterator[tuple[str, TensorLocation]]:
    """Queries, keys and values of a tensor that holds all three, one after the other."""
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    widths = {"q": config["num_attention_heads"] * config["head_dim"], "k": kv_width, "v": kv_width}
    if place.shape[0] != sum(widths.values()):
        raise ModelError(
            f"{where}: tensor {name!r} has {place.shape[0]} rows, and {widths} make {sum(widths.values())}"
        )
    first = 0
    for part, width in widths.items():
        yield full.format(qkv=part), TensorLocation(place, rows=(first, width))
        first += width


def _change(arch: Architecture, name: str) -> Change | None:
    return next((change for end, change in arch.changed.items() if name.endswith(end)), None)


def _tiled(arch: Architecture, name: str, config: dict[str, Any], place: TensorPlace, where: str) -> HeadTiling | None:
    """Order of the value heads of a tensor in the file; None if it is Hugging Face's."""
    spans = next((spans for end, spans in arch.tiled.items() if name.endswith(end)), None)
    if spans is None or config["linear_num_key_heads"] == config["linear_num_value_heads"]:
        return None
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = 1 if spans == "row each" else config["linear_value_head_dim"]
    extent = place.shape[-1 if spans == "columns" else 0]
    if values % keys or extent < values * width:
        raise ModelError(
            f"{where}: {values} value heads of {width} over {keys} key heads cannot share the {extent} of {name!r}"
        )
    return HeadTiling(keys, values // keys, width, spans == "columns")


def _inside(arch: Architecture, stack: str, whole: str, stem: str, ending: str | None) -> str | None:
    """The name inside a Hugging Face layer of a tensor inside a block; None if the table does not know it.

    `stack`: what comes before the block in the file's name.
    """
    if f"{stack}{whole}" in arch.whole:
        return arch.whole[f"{stack}{whole}"]
    return f"{arch.layer[stack + stem]}.{ending}" if ending is not None and stack + stem in arch.layer else None
