"""The files of a checkpoint beside its weights: tokenizer, and readers of pictures, sounds and grammars."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

import torch

from lmstate.errors import StateError, UnsupportedError
from lmstate.text.grammars.compiler import GrammarCompiler

if TYPE_CHECKING:
    from pathlib import Path

    from lmstate.audio.listener import Listener
    from lmstate.models.config import ModelConfig
    from lmstate.text.tokenizer import Tokenizer
    from lmstate.vision.mmproj import Mmproj
    from lmstate.vision.reader import PictureReader

OPENING = Lock()  # held while a vision tower or a feature extractor is loaded: requests may come together


class CheckpointReaders:
    """The readers of a model's files, opened when they are needed first: of a model, and of a front that has none."""

    if TYPE_CHECKING:  # at run time these would be the defaults of dataclass fields

        @property
        def config(self) -> ModelConfig: ...

        @property
        def hears(self) -> bool:
            """Whether its sources are sounds."""
            ...

    folder: Path | None  # of the checkpoint, where it is one
    mmproj: Mmproj | None  # the file of a vision tower, of a GGUF model
    name: str
    no_pictures: str | None = None  # why it takes no pictures, and no sounds in conversations, whatever its files are
    no_word_times: str | None = None  # why it does not tell when words are said, whatever its files are
    _tokenizer: Tokenizer | None
    _pictures: PictureReader | None = None
    _listener: Listener | None = None
    _grammars: GrammarCompiler | None = None

    @property
    def device(self) -> torch.device:
        """The device of the vision tower."""
        return torch.device("cpu")

    @property
    def has_tokenizer(self) -> bool:
        """Whether it came with a tokenizer."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise StateError(
                f"{self.name or 'this model'} has no tokenizer; give token ids, or add a tokenizer.json, which "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers makes of other files"
            )
        return self._tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        """The compiler of constraints on its answers. Raises `StateError` if the model has no tokenizer."""
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.config.vocab_size)
        return self._grammars

    @property
    def sees(self) -> bool:
        """Whether it takes pictures, as far as its files and the installed packages tell."""
        from lmstate.vision.tower import has_tower

        if self.no_pictures is not None:
            return False
        if self.mmproj is not None:
            return self.mmproj.can_open
        return self.folder is not None and has_tower(self.folder)

    @property
    def takes_sounds(self) -> bool:
        """Whether it takes sounds in a conversation, as far as its files and the installed packages tell."""
        from lmstate.vision.tower import has_processor

        described = self.folder is not None and has_processor(self.folder)
        return self.no_pictures is None and described and self._lacking_for_sounds == []

    @property
    def _lacking_for_sounds(self) -> list[str] | None:
        from lmstate.audio.heard import lacking_for_sounds

        return None if self.folder is None else lacking_for_sounds(self.folder)

    def pictures(self) -> PictureReader:
        """The reader of its pictures or sounds, opened with the first call. Raises as `Model.encode`."""
        from lmstate.audio.heard import open_reader

        if self.no_pictures is not None:
            raise UnsupportedError(self.no_pictures)
        with OPENING:
            if self._pictures is None:
                if self.mmproj is not None:
                    self._pictures = self.mmproj.reader(self.tokenizer, self.device)
                elif self.folder is None:
                    raise UnsupportedError(
                        "pictures are read by models of checkpoint folders that lmstate.load opened, and by GGUF "
                        "models with the file of their vision tower: load(..., mmproj=...), --mmproj"
                    )
                else:
                    self._pictures = open_reader(self.folder, self.tokenizer, self.device)
            return self._pictures

    def listener(self) -> Listener:
        """The maker of its features of sounds, opened with the first call. Raises as `Model.listen`."""
        from lmstate.audio.listener import Listener

        with OPENING:
            if self._listener is None:
                if not self.hears and (missing := self._lacking_for_sounds):
                    raise UnsupportedError(f"sounds need {' and '.join(missing)}: pip install {' '.join(missing)}")
                if not self.hears:
                    raise UnsupportedError(f"a sound was given, and a {self.config.family} model reads no sounds")
                if self.folder is None:
                    raise UnsupportedError("sounds are read by models of checkpoint folders that lmstate.load opened")
                self._listener = Listener.open(self.folder, self._tokenizer, self.config.vocab_size)
            return self._listener
