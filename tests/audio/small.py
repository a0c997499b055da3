"""A small random Whisper that hears one second at a time, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.serve.byte_tokenizer import END, save_tokenizer
from tests.zoo import randomize

SECONDS = 1
STEPS = 50 * SECONDS  # of timestamps, and positions of the encoder
SPECIAL = [
    "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>", "<|startofprev|>",
    "<|nospeech|>", "<|notimestamps|>", *(f"<|{step * 0.02:.2f}|>" for step in range(STEPS + 1)),
]  # fmt: skip
IDS = {name: 258 + index for index, name in enumerate(SPECIAL)} | {END: 257}
SUPPRESSED = [1, 2, 7, IDS["<|translate|>"], IDS["<|transcribe|>"], IDS["<|startofprev|>"]]


def saved(folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Save it, and return transformers' model. `changes`: of its config."""
    import transformers as t

    save_tokenizer(folder, SPECIAL, "")
    config = t.WhisperConfig(**{
        "vocab_size": 258 + len(SPECIAL), "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "max_source_positions": STEPS, "max_target_positions": 64, "pad_token_id": 257, "bos_token_id": 257,
        "eos_token_id": 257, "decoder_start_token_id": IDS[SPECIAL[0]], "begin_suppress_tokens": None, **changes,
    })  # fmt: skip
    torch.manual_seed(seed)
    theirs = t.WhisperForConditionalGeneration(config).eval()
    randomize(theirs, seed)
    generation = theirs.generation_config
    generation.is_multilingual, generation.max_length = True, config.max_target_positions
    generation.lang_to_id = {name: IDS[name] for name in SPECIAL[1:4]}
    generation.task_to_id = {"transcribe": IDS["<|transcribe|>"], "translate": IDS["<|translate|>"]}
    generation.no_timestamps_token_id = IDS["<|notimestamps|>"]
    generation.prev_sot_token_id = IDS["<|startofprev|>"]
    generation.suppress_tokens, generation.begin_suppress_tokens = SUPPRESSED, [32, 257]
    generation.max_initial_timestamp_index = 25
    generation.decoder_start_token_id, generation.eos_token_id, generation.pad_token_id = IDS[SPECIAL[0]], 257, 257
    generation.return_timestamps = False
    theirs.save_pretrained(folder)
    t.WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS).save_pretrained(folder)
    return theirs
