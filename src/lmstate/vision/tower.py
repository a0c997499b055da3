"""The vision tower of a checkpoint: transformers' own class, without the text model."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmstate.errors import ModelError, StateError, UnsupportedError
from lmstate.state.media import Media, MediaSpan
from lmstate.vision.families import (
    BESIDE,
    FAMILIES,
    FEATURES,
    HEARING,
    MARKS,
    NEEDS,
    PREFIXED,
    PROCESSED,
    Tile,
    filmed,
    heard,
    pooled,
)

KEPT_BYTES = 2**28  # of embeddings of pictures that were seen before
# Parameters of the text model, which is left out.
TEXT = ("model.language_model.", "model.text_model.", "language_model.", "lm_head.")


class Tower:
    """Makes embeddings of pictures. `features` is transformers' `get_image_features`, `placeholder` the id in a text.

    A picture that it has seen is found again by a hash of its pixels, and costs nothing: of such embeddings it keeps
    the latest, `KEPT_BYTES` of them.
    """

    def __init__(self, family: str, module: Any, config: Any, device: torch.device, hears: bool = False) -> None:
        """`hears`: whether it makes embeddings of sounds too."""
        self.hears = hears
        self.family, self.module, self.config, self.device = family, module, config, device
        self.placeholder = int(config.image_token_id)
        self.runs = 0  # tiles that the tower was run for
        with torch.inference_mode(False), torch.no_grad():
            self._marks = MARKS[family](module, config) if family in MARKS else {}
        self._kept: OrderedDict[str, Tensor] = OrderedDict()

    @staticmethod
    def open(path: Path, device: torch.device | str = "cpu") -> Tower:
        """The tower of a checkpoint folder, in float32. No code of the folder runs, and only safetensors are read.

        Raises `UnsupportedError` for a family whose pictures lmstate does not read, and without the extra
        `lmstate[vision]`; `ModelError` where weights are missing.
        """
        whole, config = load_tower(path, "pictures", FAMILIES)
        return Tower.of(whole, config, device, hears_beside(path))

    @staticmethod
    def of(whole: Any, config: Any, device: torch.device | str, hears: bool = False) -> Tower:
        """The tower in transformers' model, which loses its other parts."""
        seeing = whole.base_model
        for name in ("language_model", "text_model", *(() if hears else ("audio_tower",))):
            if name in dict(seeing.named_children()):
                delattr(seeing, name)
        tower = seeing.to(device).eval().requires_grad_(False)
        return Tower(config.model_type, tower, config, torch.device(device), hears)

    def media(self, inputs: Mapping[str, Tensor] | list[Tile], ids: Sequence[int]) -> tuple[MediaSpan, ...]:
        """The pictures at their places in the tokens of a text, which placeholders hold.

        inputs: what transformers' image processor made of them (`pixel_values` and what is beside), or tiles. Raises
        `StateError` where the text has other places than they take.
        """
        tiles = self.tiles(inputs)
        pictures = [tile for tile in tiles if tile.token is None]
        places = [at for at, token in enumerate(ids) if token == self.placeholder]
        if self.family in PREFIXED and places:
            if places != list(range(len(places))):
                raise StateError("the pictures of this model come first in its prompt, and here a text does")
            self._fitting("pictures", sum(len(self.embed(tile)) for tile in pictures), places, self.placeholder)
            whole = torch.cat([self.embed(tile) for tile in pictures])
            return (MediaSpan(0, Media.of(whole, self.placeholder, text=ids[len(places) :])),)
        if self.family in BESIDE:
            self._fitting("pictures", len(pictures), places, self.placeholder)
            seen = (Media.of(self.embed(tile), self.placeholder, beside=True) for tile in pictures)
            return tuple(map(MediaSpan, places, seen))
        spans = self._spans("pictures", pictures, places, self.placeholder)
        for token in dict.fromkeys(tile.token for tile in tiles if tile.token is not None):
            what = "videos" if token == getattr(self.config, "video_token_id", None) else "sounds"
            own = [tile for tile in tiles if tile.token == token]
            spans += self._spans(what, own, [at for at, each in enumerate(ids) if each == token], token)
        if spans:
            marked = ((at, token) for at, token in enumerate(ids) if token in self._marks)
            spans += [MediaSpan(at, Media.of(self._marks[token], token)) for at, token in marked]
        return tuple(sorted(spans, key=lambda span: span.at))

    def _spans(self, what: str, tiles: Sequence[Tile], places: list[int], token: int) -> list[MediaSpan]:
        """The pictures, sounds or videos at their places, which hold `token`."""
        seen = [(self.embed(tile), tile.positions) for tile in tiles]
        self._fitting(what, sum(len(embeddings) for embeddings, _ in seen), places, token)
        spans = []
        for embeddings, positions in seen:
            own, places = places[: len(embeddings)], places[len(embeddings) :]
            cuts = [0, *(i for i in range(1, len(own)) if own[i] != own[i - 1] + 1), len(own)]
            if positions is not None and len(cuts) > 2:
                raise StateError(f"the places of the picture at {own[0]} do not follow each other")
            for start, stop in pairwise(cuts):
                spans.append(MediaSpan(own[start], Media.of(embeddings[start:stop], token, positions)))
        return spans

    @staticmethod
    def _fitting(what: str, count: int, places: Sequence[int], token: int) -> None:
        if count != len(places):
            raise StateError(f"the {what} take {count} places, and the text has {len(places)} tokens {token} for them")

    def tiles(self, inputs: Mapping[str, Tensor] | list[Tile]) -> list[Tile]:
        """The pictures that an image processor made, or their tiles, one by one; tiles as they are."""
        return inputs if isinstance(inputs, list) else list(FAMILIES[self.family](inputs, self.config))

    def embed(self, tile: Tile) -> Tensor:
        """Embeddings of one tile, float32 `[N, E]`, or `[N, (1 + D) E]` of a tower that adds to D blocks."""
        key = _digest(tile.inputs)
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        with torch.inference_mode(False), torch.no_grad():
            given = {name: value.to(self.device) for name, value in tile.inputs.items()}
            inputs = {name: value.float() if value.is_floating_point() else value for name, value in given.items()}
            embeddings = self.features(inputs)
        self.runs += 1
        self._kept[key] = embeddings
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return embeddings

    def places(self, tile: Tile) -> int:
        """Number of tokens of a text that a tile takes."""
        return 1 if self.family in BESIDE else len(self.embed(tile))

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Embeddings of one tile, as `embed` gives them, from its inputs on the tower's device."""
        if "input_features" in inputs:
            return heard(self.module, inputs)
        if "pixel_values_videos" in inputs:
            return filmed(self.module, inputs)
        return FEATURES.get(self.family, pooled)(self.module, inputs)


def load_tower(path: Path, what: str, families: Collection[str]) -> tuple[Any, Any]:
    """transformers' model of a checkpoint folder without its text model, in float32, and its config.

    what: it takes beside texts, "pictures" or "sounds"; families: that lmstate reads them of. Raises as `Tower.open`.
    """
    if not (path / "config.json").is_file():
        raise UnsupportedError(f"{path} is not a checkpoint folder; lmstate reads the towers of folders alone")
    _refuse_family(family_of(path), what, families)
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UnsupportedError(
            f"{what} need transformers and pillow: pip install 'lmstate[vision]', or 'lmstate[audio]' for sounds alone"
        ) from error
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"transformers cannot read the config of {path}: {str(error)[:200]}") from error
    _refuse_family(config.model_type, what, families)
    without_text(config, hears_beside(path))
    return load_weights(config, str(path)), config


def load_weights(config: Any, path: str, weights: dict[str, Tensor] | None = None, unused: tuple[str, ...] = ()) -> Any:
    """transformers' model of a config, in float32, with the tower's weights of a folder, or with those given.

    unused: beginnings of names that may be missing beside the text model's. Raises `ModelError` where others are.
    """
    from transformers import AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

    try:
        with _quiet():
            tables: tuple[Any, ...] = (AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)
            table = next((each for each in tables if type(config) in each._model_mapping), tables[0])
            given: Any = table if weights is None else table._model_mapping[type(config)]
            loaded: Any = given.from_pretrained(
                path if weights is None else None, config=config, dtype=torch.float32, local_files_only=True,
                trust_remote_code=False, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True,
                **({} if weights is None else {"state_dict": weights}),
            )  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ModelError(f"transformers cannot load the tower of {path}: {str(error)[:200]}") from error
    whole, report = loaded
    named = [*report["missing_keys"], *(str(each[0]) for each in report["mismatched_keys"])]
    if bad := sorted(name for name in named if not name.startswith((*TEXT, *unused))):
        raise ModelError(f"{path} lacks {len(bad)} tensors of its tower, or has them of other shapes: {bad[0]}")
    return whole


def has_tower(path: Path) -> bool:
    """Whether a checkpoint folder has a vision tower that can be opened here, as far as small files tell."""
    try:
        family = family_of(path)
    except ModelError:
        return False
    return family in FAMILIES and has_processor(path) and not lacking(family)


def has_processor(path: Path) -> bool:
    """Whether a checkpoint folder describes how what its towers read is made."""
    return any((path / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))


def lacking(family: str) -> list[str]:
    """The packages that pictures of a family need and that are not here."""
    needed = ("transformers", "PIL", NEEDS.get(family, "PIL"), *PROCESSED.get(family, ()))
    return [name for name in dict.fromkeys(needed) if find_spec(name) is None]


def hears_beside(path: Path) -> bool:
    """Whether a checkpoint folder with a vision tower has one for sounds too, whose places see what is before them."""
    try:
        if family_of(path) not in HEARING:
            return False
    except ModelError:
        return False
    told = json.loads((path / "config.json").read_bytes())
    text = told.get("text_config")
    # Where the tokens of a picture see all of it, those of a sound do not, and a state has one rule for both.
    together = isinstance(text, dict) and text.get("use_bidirectional_attention") == "vision"
    return isinstance(told.get("audio_config"), dict) and not together


def family_of(path: Path) -> str:
    """The family of a checkpoint folder, read without transformers, which takes seconds to import."""
    try:
        return str(json.loads((path / "config.json").read_bytes())["model_type"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"{path / 'config.json'} names no model_type: {str(error)[:200]}") from None


def _refuse_family(family: str, what: str, families: Collection[str]) -> None:
    if family not in families:
        others = "" if what == "sounds" else ", and sounds by other families"
        raise UnsupportedError(
            f"{what} are not read by models of the family {family[:80]!r}; they are by {', '.join(sorted(families))}"
            f"{others}"
        )
    if (needed := NEEDS.get(family)) is not None and find_spec(needed) is None:
        raise UnsupportedError(f"pictures of a {family} model need {needed}: pip install {needed}")


def without_text(config: Any, hears: bool = False) -> None:
    """Have transformers make no text model: one of no layers and no words. `hears`: its sounds are read as well."""
    text = config.text_config
    text.layer_types = []
    text.num_hidden_layers = 0
    text.vocab_size, text.pad_token_id, config.pad_token_id = 1, 0, 0  # the id of the only word
    if config.model_type in ("gemma4", "gemma4_unified") and not hears:
        config.audio_config = None  # a tower of its own, which may be left out
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def _digest(inputs: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(inputs):
        value = inputs[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report of the text model's tensors, which are not loaded here, and without its bar."""
    from transformers.utils import logging

    before, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()
