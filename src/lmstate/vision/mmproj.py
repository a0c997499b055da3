"""The vision tower that stands beside a GGUF model, in llama.cpp's `mmproj` file, as transformers' own tower."""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.gguf.architecture import TensorLocation
from lmstate.checkpoints.gguf.reader import GgufContents, open_gguf
from lmstate.checkpoints.gguf.source import GgufSource
from lmstate.checkpoints.source import floats
from lmstate.errors import ModelError, UnsupportedError
from lmstate.text.tokenizer import Tokenizer
from lmstate.vision.families import FAMILIES, grids
from lmstate.vision.projectors import (
    MLP_OF_TILES,
    NEWLINE,
    PROJECTORS,
    Described,
    Projector,
    TowerSizes,
    deepened_blocks,
)
from lmstate.vision.reader import PictureReader
from lmstate.vision.tower import TEXT, Tower, lacking, load_weights, without_text

# Beginnings of the names of tensors that may be left over: a token that the text has itself, a norm after the block
# that LLaVA takes, and what is of sounds.
BESIDE = ("v.token_embd.img_break", "v.post_ln.", "mm.a.")
NUMBER = re.compile(r"\.(\d+)\.")


class Mmproj:
    """A file of a vision tower. `open` reads its header alone; `reader` makes transformers' tower of it.

    `text_width`: the hidden size of the text model that it goes with.
    """

    def __init__(self, path: Path, kind: str, contents: GgufContents) -> None:
        self.path, self.kind, self._contents = path, kind, contents
        self.projector: Projector = PROJECTORS[kind]
        fields = Config(contents.metadata, str(path))
        self.sizes = TowerSizes(fields, contents.tensors, *self.projector.merged)
        self._described: Described = self.projector.describe(self.sizes)
        self.text_width = self.sizes.text_width

    @staticmethod
    def open(path: Path) -> Mmproj:
        """Raises `ModelError` for a file that is damaged or has no tower, `UnsupportedError` for another projector."""
        if path.suffix != ".gguf" or not path.is_file():
            raise ModelError(f"mmproj={str(path)!r} was asked for; give the .gguf file of a vision tower")
        _, contents = open_gguf(path)
        fields = Config(contents.metadata, str(path))
        if (found := fields.str("general.architecture", default="none")) != "clip":
            raise ModelError(
                f"mmproj={str(path)!r} was asked for, and it is a model of architecture {found[:80]!r}: give the file "
                f"of its vision tower, which is often called mmproj-....gguf"
            )
        own = fields.str("clip.vision.projector_type", default="")  # of files with towers of several kinds
        kind = fields.str("clip.projector_type", default=own)
        kind = MLP_OF_TILES if kind == "mlp" and NEWLINE in contents.tensors else kind
        if kind not in PROJECTORS:
            raise UnsupportedError(
                f"{path} has a projector of type {kind[:80]!r}; lmstate reads {', '.join(sorted(PROJECTORS))}"
            )
        return Mmproj(path, kind, contents)

    def __str__(self) -> str:
        sizes = self.sizes
        return (
            f"{self.family} in {self.path.name}: {sizes.blocks} blocks of width {sizes.width}, patches of "
            f"{sizes.patch} x {sizes.patch} pixels"
        )

    @property
    def family(self) -> str:
        """The family of transformers that the tower is of."""
        return self.projector.family

    @property
    def can_open(self) -> bool:
        """Whether the packages that it needs are there."""
        return not lacking(self.family)

    @property
    def has_axes(self) -> bool:
        """Whether its pictures have positions of several axes."""
        return FAMILIES[self.family] is grids

    def check(self, width: int, blocks: int, axes: bool, tokenizer: Tokenizer) -> None:
        """Raise `ModelError` for a text model of another size, or without the tokens that stand for pictures.

        width: its hidden size; blocks: how many it has; axes: whether its positions may have several.
        """
        if width != self.text_width:
            raise ModelError(
                f"{self.path} goes with a text model of width {self.text_width}, and this one has {width}: give the "
                f"tower that was published with the model"
            )
        if self.has_axes and not axes:
            raise ModelError(
                f"{self.path} is the tower of a {self.family} model, whose pictures have positions of several axes, "
                f"and this text model's have one"
            )
        if self.family == "qwen3_vl" and len(deepened_blocks(self.sizes.fields, self.sizes.blocks)) > blocks:
            raise ModelError(f"{self.path} gives its pictures to more blocks than the {blocks} of this text model")
        self.placeholder(tokenizer)
        if lacking := [name for name in self.projector.tokens.values() if tokenizer.id_of(name) is None]:
            raise ModelError(f"{self.path} needs the tokens {', '.join(lacking)}, and this text model lacks them")

    def placeholder(self, tokenizer: Tokenizer) -> int:
        """The id of the token at each position of a picture. Raises `ModelError` where the text model has none."""
        for name in self.projector.places:
            if (found := tokenizer.id_of(name)) is not None:
                return found
        raise ModelError(
            f"{self.path} goes with a text model that has the token {' or '.join(self.projector.places)} for pictures, "
            f"and this one has none"
        )

    def reader(self, tokenizer: Tokenizer, device: Any = "cpu") -> PictureReader:
        """transformers' tower and processor, in float32. Raises as `PictureReader.open`."""
        tower = self.tower(self.placeholder(tokenizer), device)
        with TemporaryDirectory(prefix="lmstate-") as folder:
            self._write_processor(Path(folder), tokenizer)
            return PictureReader.beside(tower, Path(folder), tokenizer)

    def tower(self, placeholder: int, device: Any = "cpu") -> Tower:
        """Raises `ModelError` where tensors are missing, have other shapes, or are of no part of the tower."""
        try:
            config = self._config(placeholder)
            without_text(config)
            needed = self._needed(config)
        except (ModelError, UnsupportedError):
            raise
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ModelError(f"transformers cannot make the tower that {self.path} says: {str(error)[:200]}") from error
        weights = {name: self._read(sources, shape) for name, (sources, shape) in needed.items()}
        whole = load_weights(config, str(self.path), weights, self.projector.unused)
        return Tower.of(whole, config, device)

    def _config(self, placeholder: int) -> Any:
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise UnsupportedError("pictures need transformers and pillow: pip install 'lmstate[vision]'") from error
        given = {**self._described.config, "vision_config": dict(self._described.config["vision_config"])}
        vision = given["vision_config"]
        up = self._contents.tensors.get(self._name("v.blk.0.ffn_up.weight"))
        if up is None or len(up.shape) != 2:
            raise ModelError(f"{self.path} lacks the tensor 'v.blk.0.ffn_up.weight' of its tower; it is incomplete")
        if self.family == "qwen2_vl":
            vision["mlp_ratio"] = up.shape[0] // self.sizes.width
        else:
            vision["intermediate_size"] = up.shape[0]
        text = {"hidden_size": self.text_width, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
        if self.family == "mistral3":
            text["rms_norm_eps"] = self.sizes.eps
        family = given.pop("model_type")
        plain: Any = AutoConfig.for_model(family)
        text["model_type"] = plain.text_config.model_type
        if "model_type" not in vision:
            vision["model_type"] = plain.vision_config.model_type
        return type(plain)(**given, text_config=text, image_token_id=placeholder)

    def _needed(self, config: Any) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """The tensors of transformers' tower: the names of their parts in the file, and their shapes."""
        from transformers import AutoModelForMultimodalLM

        with torch.device("meta"):
            empty = AutoModelForMultimodalLM.from_config(config)
        needed, lacking = {}, []
        for name, value in empty.state_dict().items():
            if name.startswith((*TEXT, *self.projector.unused)):
                continue
            sources = self._sources(name)
            lacking += [source for source in sources if source not in self._contents.tensors]
            needed[name] = sources, tuple(value.shape)
        if lacking:
            raise ModelError(f"{self.path} lacks {len(lacking)} tensors of its tower: {', '.join(lacking[:3])}")
        used = {source for sources, _ in needed.values() for source in sources}
        own = (name for name in self._contents.tensors if name.startswith(("v.", "mm.")))
        if others := sorted(name for name in own if name not in used and not name.startswith(BESIDE)):
            raise ModelError(
                f"{self.path} has {len(others)} tensors that transformers' {self.family} has no place for: "
                f"{', '.join(others[:3])}"
            )
        return needed

    def _sources(self, name: str) -> tuple[str, ...]:
        """The names in the file of the parts of one of transformers' tensors."""
        found = NUMBER.search(name)
        number = "" if found is None else found[1]
        if name.startswith("model.visual.deepstack_merger_list."):
            block = deepened_blocks(self.sizes.fields, self.sizes.blocks)[int(number)]
            return (f"v.deepstack.{block}.{name.split('.', 4)[4].replace('linear_fc', 'fc')}",)
        names = self.projector.names
        for whole in (name, NUMBER.sub(".{n}.", name, count=1)):
            stem, _, ending = whole.rpartition(".")
            for given, tail in ((names.get(whole), ""), (names.get(stem), f".{ending}")):
                if given is not None:
                    parts = (given,) if isinstance(given, str) else given
                    sources = tuple(self._name(part.format(n=number) + tail) for part in parts)
                    merged = sources[0].replace("attn_q.", "attn_qkv.")
                    return (merged,) if len(parts) == 3 and merged in self._contents.tensors else sources
        return (name,)

    def _name(self, name: str) -> str:
        """The name of a tensor in this file, where an old converter exchanged up and down."""
        if not self._is_swapped:
            return name
        return re.sub(r"ffn_(up|down)", lambda part: {"up": "ffn_down", "down": "ffn_up"}[part[1]], name)

    @cached_property
    def _is_swapped(self) -> bool:
        up, down = (self._contents.tensors.get(f"v.blk.0.ffn_{part}.weight") for part in ("up", "down"))
        if not self.projector.swapped or up is None or down is None:
            return False
        return down.shape[-1] == self.sizes.width != up.shape[-1]

    def _read(self, sources: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
        """A tensor `shape` of parts that follow each other: queries, keys and values, or patches of two frames."""
        axis = 2 if len(sources) == 2 else 0
        extent = (shape[axis] // len(sources),) if len(sources) == 3 else ()
        part = shape if len(sources) == 1 else (*shape[:axis], *extent, *shape[axis + 1 :])
        if is_flat := sources == ("v.patch_embd.weight",) and len(shape) == 2:  # Gemma 4's: rows, columns, colors
            part = (shape[0], 3, self.sizes.patch, self.sizes.patch)
        for source in sources:
            found = self._contents.tensors[source].shape
            if _without_ones(found) != _without_ones(part):
                raise ModelError(
                    f"{self.path}: tensor {source!r} has the shape {list(found)}, and the tower's sizes make it "
                    f"{list(part)}"
                )
        # Copies: what the kernels of the tower round may depend on where a mapped tensor begins.
        parts = [floats(self._source.read(source)).to(torch.float32, copy=True).view(part) for source in sources]
        whole = parts[0] if len(parts) == 1 else torch.stack(parts, axis) if len(parts) == 2 else torch.cat(parts)
        if is_flat:
            whole = whole.permute(0, 2, 3, 1).reshape(shape)
        return whole - 1.0 if sources[0] in self.projector.one_more else whole

    @cached_property
    def _source(self) -> GgufSource:
        heads = self.sizes.heads if self.projector.paired else None
        located = {
            name: TensorLocation(place, paired_heads=heads if re.search(r"\.attn_[qk]\.", name) else None)
            for name, place in self._contents.tensors.items()
        }
        return GgufSource(self.path, {}, {}, located, None)

    def _write_processor(self, folder: Path, tokenizer: Tokenizer) -> None:
        """The files that transformers reads a processor from."""
        described, normal = self._described, self.sizes.normal
        (place,) = (name for name in self.projector.places if tokenizer.id_of(name) is not None)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "extra_special_tokens": {"image_token": place, **self.projector.tokens},
        }
        files = {
            "config.json": {"model_type": self.family},
            "preprocessor_config.json": {**described.pixels, **normal},
            "processor_config.json": described.processor,
            "tokenizer_config.json": settings,
        }
        for name, content in files.items():
            if content is not None:
                (folder / name).write_text(json.dumps(content), encoding="utf-8")
        (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [extent for extent in shape if extent > 1]
