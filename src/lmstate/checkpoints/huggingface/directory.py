"""A checkpoint directory as `save_pretrained` writes it: config.json, safetensors (one file or shards), tokenizer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from torch import Tensor

from lmstate.checkpoints.huggingface import fp8, mlx, mxfp4, quantization
from lmstate.checkpoints.huggingface.converted import ConvertedCheckpoint
from lmstate.checkpoints.huggingface.packed import find as packed_matrices
from lmstate.checkpoints.huggingface.tekken import NAME as TEKKEN
from lmstate.checkpoints.huggingface.tekken import tekken_files
from lmstate.checkpoints.huggingface.tiktoken import NAME as TIKTOKEN
from lmstate.checkpoints.huggingface.tiktoken import tiktoken_json
from lmstate.checkpoints.longest_match import END, world_json
from lmstate.checkpoints.longest_match import NAME as WORLD
from lmstate.checkpoints.source import GroupedQuant, RowTable, dtype_name, part_of
from lmstate.errors import ModelError
from lmstate.files.json_object import read_object
from lmstate.files.mmap_file import fingerprint
from lmstate.files.regular import open_regular
from lmstate.files.safetensors import TensorFile
from lmstate.text.tokenizer import TokenizerFiles

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_SHARDS = 4096
MOST_TEMPLATE = 2**22  # bytes
POOLINGS = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}  # sentence-transformers' names
FLOATS = ("float32", "float16", "bfloat16")
TABLES = (".tid2eid",)  # of whole numbers: the experts of each token (DeepSeek-V4)


class CheckpointFolder:
    """A `Source` over a directory. Tensors are mapped, not read; shards are opened when first needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: tuple[str, ...] = ()
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json, so it is not a checkpoint directory")
        self.config = read_object(path / "config.json")
        settings = quantization.settings(self.config, path)
        method = settings.get("quant_method")
        self._mxfp4 = method == quantization.MXFP4
        self._fp8 = method in fp8.METHODS
        self._fp8_block = fp8.block_of(settings) if self._fp8 else None
        self._made = ConvertedCheckpoint.of(self.config, path)
        self.weights = self._made.weights
        generation = path / "generation_config.json"
        self.generation: dict[str, Any] = read_object(generation) if generation.is_file() else {}
        if (pooling := _pooling(self.path)) is not None:
            self.generation["pooling"] = pooling
        self._shards = self._open_shards()
        self._where = {name: shard for shard in self._shards for name in shard.entries}
        if sum(len(shard.entries) for shard in self._shards) != len(self._where):
            raise ModelError(
                f"two safetensors files of {path} hold a tensor of the same name; the checkpoint is damaged"
            )

        entries = {name: shard.entries[name] for name, shard in self._where.items()}
        packed = {} if method is None or self._mxfp4 else packed_matrices(entries, self._tensor, settings, path)
        if (by_mlx := mlx.settings_of(self.config, path)) is not None:
            packed = packed | mlx.find(entries, self._tensor, by_mlx, path)
        self._packed = packed
        lossy = Counter(matrix.lossy for matrix in packed.values() if matrix.lossy)
        self.conversions = tuple(
            f"{count} matrices of {how} are dequantized and held as int8, the nearest storage"
            for how, count in lossy.items()
        )
        whole = frozenset(entries) - {part for matrix in packed.values() for part in matrix.parts}
        self._scales = {name: fp8.scales_of(name, self._where) for name in whole if self._is_fp8(name)}
        beside = {each for name in self._scales for each in fp8.of_activations(name)}
        plain = whole - beside - set(self._scales.values())
        quantization.check_read(settings, {name: entries[name] for name in plain}, path)
        self._names = plain | set(packed)

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._packed:
            return self._packed[name].shape
        return self._where[name].entries[name].shape

    def stored(self, name: str) -> str:
        if name in self._packed:
            return self._packed[name].stored
        # 8-bit floats times their scales have the range of bfloat16.
        return "bfloat16" if self._is_fp8(name) else self._dtype(name)

    def activation_bits(self, name: str) -> int:
        return self._made.activation_bits if name not in self._made.rounded else 16

    def read(self, name: str) -> Tensor | GroupedQuant:
        if name in self._packed:
            return self._packed[name].read()
        if self._is_fp8(name):
            return self._dequantized(name)
        blocks = self._mxfp4 and name.endswith(mxfp4.PARTS) and self._dtype(name) == "uint8"
        table = name.endswith(TABLES) and self._dtype(name) in ("int64", "int32")
        if self._dtype(name) not in FLOATS and not blocks and not table:
            raise ModelError(
                f"tensor {name!r} of {self.path} holds {self._dtype(name)} numbers; lmstate reads checkpoints of "
                f"{', '.join(FLOATS)}. A quantized checkpoint of this kind needs converting to one of those first"
            )
        return self._where[name].tensor(name)

    def part(self, name: str, index: int) -> Tensor:
        if name not in self._packed and self._is_fp8(name):
            return self._dequantized(name, index)
        return part_of(self.read(name), index, self.path)

    def rows(self, name: str) -> RowTable:
        numbers = self.read(name)
        if isinstance(numbers, GroupedQuant):
            raise ModelError(f"{self.path}: the table {name!r} is quantized; expected floats")
        return numbers

    def integers(self, name: str) -> Tensor:
        """A tensor of whole numbers, int64: what maps tokens to tokens, say. Raises `ModelError` for one of others."""
        if name not in self._where or self._dtype(name) not in ("int64", "int32"):
            raise ModelError(f"{self.path} lacks the whole numbers {name!r}; the checkpoint is incomplete")
        return self._tensor(name).long()

    def _tensor(self, name: str) -> Tensor:
        return self._where[name].tensor(name)

    def _dtype(self, name: str) -> str:
        return dtype_name(self._where[name].entries[name].dtype)

    def _is_fp8(self, name: str) -> bool:
        return self._fp8 and self._where[name].entries[name].dtype == fp8.DTYPE

    def _dequantized(self, name: str, index: int | None = None) -> Tensor:
        """A tensor of 8-bit floats, or one of those that are stacked in it."""
        scales, shape, block = self._scales[name], self.shape(name), self._fp8_block
        if scales is None or not (
            self._dtype(scales) in FLOATS or self._where[scales].entries[scales].dtype in fp8.EXPONENTS
        ):
            raise ModelError(
                f"{self.path} lacks the scales of the 8-bit floats of {name!r} (in {name}{fp8.SCALES[0]}, say), or "
                "they are not floats"
            )
        if not fp8.scales_fit(self.shape(scales), shape, block):
            raise ModelError(
                f"{self.path}: {scales!r} has the shape {list(self.shape(scales))}, which cannot scale {name!r} "
                f"of shape {list(shape)}{'' if block is None else f' in blocks of {list(block)}'}"
            )
        numbers, of_numbers = self._tensor(name), self._tensor(scales)
        if index is not None:
            numbers, of_numbers = numbers[index], fp8.scales_at(of_numbers, index, len(numbers))
        values = fp8.scale_values(of_numbers)
        if not bool(values.isfinite().all()):
            raise ModelError(f"{self.path} is damaged: the scales of tensor {name!r} hold infinities or NaN")
        return fp8.dequantize(numbers, values, block)

    def key(self) -> str:
        return fingerprint([self.path / "config.json", *(shard.path for shard in self._shards)])

    def tokenizer_files(self) -> TokenizerFiles | None:
        return tokenizer_files(self.path)

    def _open_shards(self) -> list[TensorFile]:
        if (self.path / SINGLE).is_file():
            return [TensorFile(self.path / SINGLE)]
        if not (self.path / INDEX).is_file():
            pickles = sorted(self.path.glob("*.bin")) + sorted(self.path.glob("*.pt*"))
            if pickles:
                raise ModelError(
                    f"{self.path} has its weights as {pickles[0].name}, a pickle file, which can run code when loaded; "
                    f"lmstate reads safetensors only. Save the model again with transformers' save_pretrained"
                )
            raise ModelError(
                f"{self.path} has a config and no weights, neither {SINGLE} nor {INDEX}: download these files too, or "
                "save the model there with save_pretrained"
            )
        index = read_object(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ModelError(f"{self.path / INDEX} has no weight_map; it is damaged")
        names = sorted({self._inside(file) for file in index.values()})
        if len(names) > MOST_SHARDS:
            raise ModelError(f"{self.path / INDEX} names {len(names)} files; at most {MOST_SHARDS} are expected")
        shards = {name: TensorFile(self.path / name) for name in names}
        for name, file in index.items():
            if name not in shards[file].entries:
                raise ModelError(f"{self.path / INDEX} says that {file} holds {name[:80]!r}, and it does not")
        return list(shards.values())

    def _inside(self, file: Any) -> str:
        """A shard's file name, refused if it could leave the directory. Links are followed (the Hub's cache)."""
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or "\0" in file
            or PurePosixPath(file).is_absolute()
            or PureWindowsPath(file).anchor
            or ".." in PureWindowsPath(file).parts
        ):
            raise ModelError(f"{self.path / INDEX} names {str(file)[:80]!r}, which is not a safetensors file inside it")
        return file


# Chat templates of families that publish none, as their processors in transformers write a prompt.
PROMPTS = {
    "paligemma": """
{%- for m in messages if m.content is not string %}{% for part in m.content if part.type == "image" %}<image>
{%- endfor %}{% endfor %}{{ bos_token }}
{%- for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content if part.type == "text" %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}{{ "\\n" }}""",
}


def tokenizer_files(path: Path) -> TokenizerFiles | None:
    """The tokenizer of a directory: tokenizer.json, and the settings and chat templates that are beside it.

    Without one it is Mistral's tekken.json, Kimi's tiktoken.model or RWKV's vocabulary, if there is one.
    """
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).is_file():
            settings.update(read_object(path / name))
    document: Path | str = path / "tokenizer.json"
    if not (path / "tokenizer.json").is_file():
        if (path / TEKKEN).is_file():
            made = tekken_files(path / TEKKEN)
            document, settings = made.tokenizer_json, {**made.settings, **settings}
        elif (path / TIKTOKEN).is_file() and _model_type(path).startswith("kimi"):
            document = tiktoken_json(path / TIKTOKEN, settings)
        elif (path / WORLD).is_file():
            document, settings = world_json(path / WORLD), {**settings, "bos_token": END, "eos_token": END}
        else:
            return None
    if (path / "chat_template.json").is_file():
        settings.update(read_object(path / "chat_template.json"))
    if (path / "chat_template.jinja").is_file():
        settings["chat_template"] = _template(path / "chat_template.jinja")
    if (path / "additional_chat_templates" / "tool_use.jinja").is_file():
        tool_use = _template(path / "additional_chat_templates" / "tool_use.jinja")
        settings["chat_template"] = [
            {"name": "default", "template": settings.get("chat_template")},
            {"name": "tool_use", "template": tool_use},
        ]
    if settings.get("chat_template") is None and (template := PROMPTS.get(_model_type(path))) is not None:
        settings["chat_template"] = template
    return TokenizerFiles(document, settings)


def _model_type(path: Path) -> str:
    config = path / "config.json"
    return str(read_object(config).get("model_type")) if config.is_file() else ""


def _pooling(path: Path) -> str | None:
    """The pooling that sentence-transformers notes beside a checkpoint (`1_Pooling/config.json`), if it does."""
    file = path / "1_Pooling" / "config.json"
    if not file.is_file():
        return None
    settings = read_object(file)
    modes = [name.removeprefix("pooling_mode_") for name, chosen in settings.items() if chosen is True]
    modes = [mode for mode in modes if f"pooling_mode_{mode}" in settings]
    if isinstance(named := settings.get("pooling_mode"), str):
        modes = [named]
    return "+".join(POOLINGS.get(mode, mode) for mode in modes) or None


def _template(path: Path) -> str:
    """A chat template from a file of its own."""
    with open_regular(path) as file:
        data = file.read(MOST_TEMPLATE + 1)
    if len(data) > MOST_TEMPLATE:
        raise ModelError(f"{path} is too large; a chat template has at most {MOST_TEMPLATE} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
