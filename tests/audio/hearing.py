"""Small random models that hear in a conversation, with a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmstate.checkpoints.huggingface.tekken import tekken_files
from lmstate.text.tokenizer import Tokenizer
from tests.files.test_tekken import HEARD, NAMED, tekken, written
from tests.serve.byte_tokenizer import END, START, save_tokenizer
from tests.zoo import randomize

MARK = "<|AUDIO|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'audio' %}<|AUDIO|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "eos_token_id": 257, "bos_token_id": None,
}  # fmt: skip
ENCODER = {
    "num_mel_bins": 16, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 40,
    "max_source_positions": 50,
}  # fmt: skip
FLAMINGO = {
    "num_mel_bins": 16, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_source_positions": 50,
}  # fmt: skip
MEL = {"feature_size": 16, "chunk_length": 1}


def qwen2_audio(tokenizer: Any) -> tuple[Any, Any]:
    import transformers as t

    config = t.Qwen2AudioConfig(
        audio_config=t.Qwen2AudioEncoderConfig(**ENCODER), text_config=t.Qwen2Config(**TEXT), audio_token_index=258
    )
    processor = t.Qwen2AudioProcessor(
        t.WhisperFeatureExtractor(**MEL), tokenizer, chat_template=TEMPLATE, audio_token=MARK
    )
    return t.Qwen2AudioForConditionalGeneration(config), processor


def audioflamingo3(tokenizer: Any) -> tuple[Any, Any]:
    import transformers as t

    config = t.AudioFlamingo3Config(
        audio_config=t.AudioFlamingo3EncoderConfig(**FLAMINGO), text_config=t.Qwen2Config(**TEXT), audio_token_id=258
    )
    processor = t.AudioFlamingo3Processor(
        t.WhisperFeatureExtractor(**MEL), tokenizer, chat_template=TEMPLATE, audio_token=MARK
    )
    return t.AudioFlamingo3ForConditionalGeneration(config), processor


def musicflamingo(tokenizer: Any) -> tuple[Any, Any]:
    import transformers as t

    config = t.MusicFlamingoConfig(
        audio_config=t.AudioFlamingo3EncoderConfig(**FLAMINGO), text_config=t.Qwen2Config(**TEXT), audio_token_id=258,
        audio_bos_token_id=256, audio_eos_token_id=257,
    )  # fmt: skip
    processor = t.MusicFlamingoProcessor(
        t.WhisperFeatureExtractor(**MEL), tokenizer, chat_template=TEMPLATE, audio_token=MARK, audio_bos_token=START,
        audio_eos_token=END,
    )  # fmt: skip
    return t.MusicFlamingoForConditionalGeneration(config), processor


def glmasr(tokenizer: Any) -> tuple[Any, Any]:
    import transformers as t

    names = {
        "num_mel_bins": 16, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 100, "head_dim": 8,
    }  # fmt: skip
    config = t.GlmAsrConfig(
        audio_config=t.GlmAsrEncoderConfig(**names), text_config=t.LlamaConfig(**TEXT), audio_token_id=258
    )
    processor = t.GlmAsrProcessor(
        t.WhisperFeatureExtractor(feature_size=16, chunk_length=2), tokenizer, chat_template=TEMPLATE, audio_token=MARK
    )
    return t.GlmAsrForConditionalGeneration(config), processor


def qwen3_asr(tokenizer: Any) -> tuple[Any, Any]:
    import transformers as t

    names = {
        **{name: value for name, value in ENCODER.items() if name != "max_source_positions"}, "output_dim": 32,
        "downsample_hidden_size": 8,
    }  # fmt: skip
    config = t.Qwen3ASRConfig(
        audio_config=t.Qwen3ASREncoderConfig(**names), text_config=t.Qwen3Config(**TEXT, head_dim=8),
        audio_token_id=258, pad_token_id=257, eos_token_id=257,
    )  # fmt: skip
    processor = t.Qwen3ASRProcessor(t.Qwen3ASRFeatureExtractor(feature_size=16), tokenizer, chat_template=TEMPLATE)
    return t.Qwen3ASRForConditionalGeneration(config), processor


def voxtral(folder: Path) -> tuple[Any, Any]:
    """Its folder has a tekken.json, as published ones do; and its processor needs mistral-common for conversations."""
    import transformers as t

    told = tekken("v7", [*NAMED, *HEARD])
    told["audio"] = {
        "sampling_rate": 16_000, "frame_rate": 12.5, "chunk_length_s": 2.0,
        "audio_encoding_config": {"num_mel_bins": 16, "hop_length": 160, "window_size": 400},
    }  # fmt: skip
    names = {
        "num_mel_bins": 16, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "max_source_positions": 100,
    }  # fmt: skip
    text = t.LlamaConfig(**TEXT | {"vocab_size": Tokenizer(tekken_files(written(folder, told))).vocab_size})
    config = t.VoxtralConfig(audio_config=t.VoxtralEncoderConfig(**names), text_config=text, audio_token_id=len(NAMED))
    extractor = t.WhisperFeatureExtractor(feature_size=16, chunk_length=2)

    class Processor:
        """The features of transformers' processor, and as many places as its model makes of them."""

        feature_extractor = extractor

        def save_pretrained(self, folder: Path) -> None:
            extractor.save_pretrained(folder)

        def __call__(self, *, text: Any, audio: list[Any], sampling_rate: int, return_tensors: str) -> dict[str, Any]:
            options = {**t.VoxtralProcessor.audio_kwargs, "pad_to_multiple_of": extractor.n_samples}
            del options["max_source_positions"]
            features = t.VoxtralProcessor._retrieve_input_features(self, audio, extractor.nb_max_frames, **options)
            with torch.no_grad():
                count = len(theirs.get_audio_features(features).pooler_output)
            return {"input_ids": torch.full((1, count), config.audio_token_id), "input_features": features}

    theirs = t.VoxtralForConditionalGeneration(config)
    return theirs, Processor()


HEARING: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "qwen2_audio": qwen2_audio,
    "audioflamingo3": audioflamingo3,
    "musicflamingo": musicflamingo,
    "glmasr": glmasr,
    "qwen3_asr": qwen3_asr,
    "voxtral": voxtral,
}


def saved(family: str, folder: Path) -> tuple[Any, Any]:
    """Save one; returns transformers' model and processor."""
    torch.manual_seed(0)
    theirs, processor = HEARING[family](folder if family == "voxtral" else _tokenizer(family, folder))
    theirs = theirs.eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    processor.save_pretrained(folder)
    return theirs, processor


def _tokenizer(family: str, folder: Path) -> Any:
    """transformers' tokenizer of bytes, which is saved to a folder."""
    import transformers as t

    save_tokenizer(folder, [MARK], TEMPLATE)
    words: dict[str, Any] = {"eos_token": END, "pad_token": END, "additional_special_tokens": [START, MARK]}
    if family == "qwen3_asr":
        words["extra_special_tokens"] = {"audio_token": MARK, "audio_bos_token": START, "audio_eos_token": END}
        del words["additional_special_tokens"]
    inner = t.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **words)
    inner.chat_template = TEMPLATE
    return inner
