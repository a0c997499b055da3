"""Small random models of transformers, one for every way in which its models use their cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from lmstate.integrations.transformers.cache.hooks import cache_name, parameters
from tests.zoo import CASES as ZOO
from tests.zoo import randomize

FROM_ZOO = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "olmo2", "smollm3", "phi3",  # full
    "mistral", "mixtral", "gemma2", "gemma3", "cohere2", "olmo3", "gpt_oss",  # sliding, alone and between full
    "llama4",  # chunked
    "gemma4", "gemma4-experts",  # heads of two widths, layers that read what others store
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid",  # delta rule between attention
    "mamba", "falcon_mamba", "mamba2",  # recurrent only
    "bamba", "granitemoehybrid", "jamba", "nemotron_h",  # state space between attention
    "falcon_h1", "zamba2",  # both in one layer
    "lfm2", "lfm2_moe",  # convolutions between attention
)  # fmt: skip


def _config(name: str, **values: Any) -> Any:
    import transformers

    sizes = {
        "vocab_size": 99, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return getattr(transformers, name)(**{**sizes, **values})


_LATENT = {
    "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip

MORE: dict[str, Callable[[], Any]] = {
    "gpt2": partial(_config, "GPT2Config", n_embd=48, n_layer=3, n_head=6),
    "gpt_neox": partial(_config, "GPTNeoXConfig"),
    "stablelm": partial(_config, "StableLmConfig"),
    "starcoder2": partial(_config, "Starcoder2Config", sliding_window=12),
    "qwen2-sliding": partial(
        _config, "Qwen2Config", use_sliding_window=True, sliding_window=12, max_window_layers=1
    ),
    "deepseek_v3": partial(_config, "DeepseekV3Config", **_LATENT),
    "deepseek_v2": partial(_config, "DeepseekV2Config", **_LATENT, n_shared_experts=1),
    "gemma3n": partial(
        _config, "Gemma3nTextConfig", num_hidden_layers=6, head_dim=8, num_kv_shared_layers=2, sliding_window=12,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, intermediate_size=[80] * 6,
        vocab_size_per_layer_input=99, hidden_size_per_layer_input=8, laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 6,
    ),
    "inkling": partial(
        _config, "InklingTextConfig", local_layer_ids=[0, 2], sliding_window_size=12, head_dim=8, swa_head_dim=8,
        swa_num_attention_heads=6, swa_num_key_value_heads=2, d_rel=8, rel_extent=32, moe_intermediate_size=16,
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, logits_mup_width_multiplier=1.0,
    ),
    "deepseek_v32": partial(  # index heads enough that no two scores are the same
        _config, "DeepseekV32Config", **_LATENT, n_shared_experts=1, index_n_heads=32, index_head_dim=16, index_topk=8
    ),
    "deepseek_v4": partial(
        _config, "DeepseekV4Config", num_hidden_layers=4, head_dim=16, qk_rope_head_dim=8, q_lora_rank=24,
        o_lora_rank=8, o_groups=2, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        sliding_window=12, index_n_heads=32, index_head_dim=16, index_topk=4,
        layer_types=[
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
    ),
    "zamba": partial(
        _config, "ZambaConfig", num_hidden_layers=6, attn_layer_period=3, attn_layer_offset=2, mamba_d_state=8,
        n_mamba_heads=2,
    ),
    "glm4": partial(_config, "Glm4Config", head_dim=8),
    "exaone4": partial(_config, "Exaone4Config", sliding_window=12, sliding_window_pattern=3),
}  # fmt: skip

DECODERS = (*FROM_ZOO, *MORE)
ENCODER_DECODERS = ("bart", "t5", "t5gemma", "t5gemma2")
CONFIGS: dict[str, Callable[[], Any]] = {**{name: ZOO[name] for name in FROM_ZOO}, **MORE}


@lru_cache(maxsize=80)
def decoder(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.pad_token_id, config.eos_token_id = 0, 2
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    for module in model.modules():
        if hasattr(module, "time_step_limit") and name in ("nemotron_h", "zamba2"):
            # Their forward of one token ignores this limit, in transformers 5.23: where the text is cut would matter.
            module.time_step_limit = (0.0, float("inf"))
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # random models stop at random
    return model


@lru_cache(maxsize=4)
def encoder_decoder(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if name == "bart":
        config = transformers.BartConfig(
            vocab_size=99, d_model=48, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
            encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=128,
        )  # fmt: skip
        model: Any = transformers.BartForConditionalGeneration(config).eval()
    elif name == "t5":
        config = transformers.T5Config(
            vocab_size=99, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
        model = transformers.T5ForConditionalGeneration(config).eval()
    else:  # their decoder slides, and their cross-attention does not
        sizes = {
            "vocab_size": 99, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"], "bos_token_id": 1, "dropout_rate": 0.0,
        }  # fmt: skip
        if name == "t5gemma":
            decoder = {**sizes, "cross_attention_hidden_size": 48}
            config = transformers.T5GemmaConfig(encoder=sizes, decoder=decoder, vocab_size=99, tie_word_embeddings=True)
            model = transformers.T5GemmaForConditionalGeneration(config).eval()
        else:
            vision = {
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14,
            }  # fmt: skip
            encoder = {"text_config": sizes, "vision_config": vision, "mm_tokens_per_image": 4}
            config = transformers.T5Gemma2Config(encoder=encoder, decoder=sizes)
            model = transformers.T5Gemma2ForConditionalGeneration(config).eval()
    randomize(model)
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    return model


COUNT_FROM_PADDING = (
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"
)  # fmt: skip
"""Models that begin to count positions behind the number of the padding, and count right themselves."""


def call(model: Any, ids: torch.Tensor, cache: Any, start: int | None = None) -> torch.Tensor:
    """Logits of new tokens after what a cache holds. Some models count positions from 0 unless they are told."""
    given = {cache_name(model): cache}
    if "position_ids" in parameters(type(model)) and model.config.model_type not in COUNT_FROM_PADDING:
        start = cache.get_seq_length() if start is None else start
        given["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    with torch.no_grad():
        return model(ids, **given, use_cache=True).logits


def text(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Random ids int64 [rows, length], none of them special."""
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


def repetitive(length: int) -> torch.Tensor:
    """A text `[1, length]` that repeats, so that a prompt lookup finds drafts in it."""
    return text(9, seed=3).repeat(1, length // 9 + 1)[:, :length]
