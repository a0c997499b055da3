"""Models with an encoder in GGUF: T5, with T5 1.1, Flan, mT5 and umT5."""

from __future__ import annotations

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import MOST_LAYERS, Architecture, HFConfig, Tensors


def _t5(metadata: Config, prefix: str, config: HFConfig, tensors: Tensors) -> None:
    """Gates and biases of each layer show in the tensors; distances end at 128, as in all published models."""
    layers = config["num_hidden_layers"]
    if layers > 1 and "enc.blk.1.attn_rel_b.weight" in tensors:
        config |= {"model_type": "umt5", "architectures": ["UMT5ForConditionalGeneration"]}
    config |= {
        "d_model": config["hidden_size"],
        "d_kv": config["head_dim"],
        "d_ff": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "num_layers": layers,
        "num_decoder_layers": metadata.int(f"{prefix}.decoder_block_count", 1, MOST_LAYERS, default=layers),
        "relative_attention_num_buckets": metadata.int(f"{prefix}.attention.relative_buckets_count", 4, 2**12),
        "relative_attention_max_distance": 128,
        "decoder_start_token_id": metadata.int(f"{prefix}.decoder_start_token_id", default=0),
        "feed_forward_proj": "gated-gelu" if "enc.blk.0.ffn_gate.weight" in tensors else "relu",
    }


ATTENTION = {"norm": "layer_norm", **{part: f"{{}}.{part}" for part in "qkvo"}, "rel_b": "{}.relative_attention_bias"}
MLP = {
    "norm": "layer_norm", "gate": "DenseReluDense.wi_0", "up": "DenseReluDense.wi_1", "down": "DenseReluDense.wo"
}  # fmt: skip


def _attention(start: str, layer: int, module: str) -> dict[str, str]:
    return {f"{start}attn_{ours}": f"layer.{layer}.{theirs.format(module)}" for ours, theirs in ATTENTION.items()}


def _feed_forward(start: str, layer: int) -> dict[str, str]:
    return {f"{start}ffn_{ours}": f"layer.{layer}.{theirs}" for ours, theirs in MLP.items()}


WITH_ENCODERS = {
    "t5": Architecture(
        "t5",
        "T5ForConditionalGeneration",
        {
            **_attention("enc.", 0, "SelfAttention"), **_feed_forward("enc.", 1),
            **_attention("dec.", 0, "SelfAttention"), **_attention("dec.cross_", 1, "EncDecAttention"),
            **_feed_forward("dec.", 2),
        },
        extra=_t5,
        outside={
            "token_embd.weight": "shared.weight",
            "output.weight": "lm_head.weight",
            "enc.output_norm.weight": "encoder.final_layer_norm.weight",
            "dec.output_norm.weight": "decoder.final_layer_norm.weight",
        },
        stacks={"enc.": "encoder.block", "dec.": "decoder.block"},
        eps="layer_norm_epsilon",
        also=("mt5", "umt5"),
    ),
}  # fmt: skip
