"""Conversations with pictures, as the tokens and the pictures that go into a state."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmstate.errors import ModelError, StateError
from lmstate.state.media import MediaSpan
from lmstate.vision.families import UNTILED
from lmstate.vision.pictures import read_picture
from lmstate.vision.tower import Tower

if TYPE_CHECKING:
    from lmstate.state import State
    from lmstate.text.tokenizer import Tokenizer

MOST_PICTURES = 64  # of a conversation


@dataclass(frozen=True)
class PicturePrompt:
    """The tokens of a conversation, and its pictures where they stand among them."""

    tokens: list[int]
    media: tuple[MediaSpan, ...]

    def place(self, state: State, row: int = 0) -> None:
        """Announce its pictures behind the tokens of a row, which `tokens` are then fed to."""
        start = state.lengths[row]
        for span in self.media:
            state.place(row, start + span.at, span.media)


class PictureReader:
    """The tower, transformers' image processor and the tokenizer of a checkpoint that sees.

    `processor`: transformers' own of the family, which writes the places of tiles; None where there are no tiles.
    """

    def __init__(self, tower: Tower, pixels: Any, processor: Any, tokenizer: Tokenizer) -> None:
        self.tower, self.pixels, self.processor, self.tokenizer = tower, pixels, processor, tokenizer

    @staticmethod
    def open(path: Path, tokenizer: Tokenizer, device: Any = "cpu") -> PictureReader:
        """Raises what `Tower.open` does, and `ModelError` where transformers cannot read the processor's files."""
        tower = Tower.open(path, device)
        from transformers import AutoImageProcessor, AutoProcessor

        untiled = tower.family in UNTILED
        kind = AutoImageProcessor if untiled else AutoProcessor
        try:
            made = kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            raise ModelError(f"transformers cannot read the processor of {path}: {str(error)[:200]}") from error
        return PictureReader(tower, made if untiled else made.image_processor, None if untiled else made, tokenizer)

    def encode(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> PicturePrompt:
        """See `Model.encode`."""
        if (count := len(_pictures(messages))) > MOST_PICTURES:
            raise StateError(f"the conversation has {count} pictures; it may have {MOST_PICTURES}")
        pictures = [read_picture(content) for content in _pictures(messages)]
        control = self.tokenizer.control_tokens()
        text = self.tokenizer.chat_text(control.hide(_without_bytes(messages)), **variables)
        mark = self.tokenizer.decode([self.tower.placeholder], skip_special_tokens=False)
        if (count := text.count(mark)) != len(pictures):
            raise ModelError(
                f"the chat template has {count} places {mark!r} for {len(pictures)} pictures: it takes none in some "
                "message, or a message has that text"
            )
        try:
            inputs = self.pixels(images=pictures, return_tensors="pt")
            if self.processor is None:
                places = iter([mark * len(self.tower.embed(tile)) for tile in self.tower.tiles(inputs)])
            else:
                places = iter([self.processor.replace_image_token(inputs, index) for index in range(count)])
        except (ValueError, TypeError, KeyError) as error:
            raise StateError(f"the model's processor does not take a picture: {str(error)[:200]}") from error
        tokens = self.tokenizer.encode_rendered(re.sub(re.escape(mark), lambda _: next(places), text), control)
        return PicturePrompt(tokens, self.tower.media(inputs, tokens))


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some message of a conversation has a picture."""
    return bool(_pictures(messages))


def _pictures(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The contents of all pictures, in order."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return [part.get("image") for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]


def _without_bytes(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a template sees them: it needs to know where a picture is, not which."""
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            content = [
                {"type": "image"} if isinstance(part, Mapping) and part.get("type") == "image" else part
                for part in content
            ]
        plain.append({**message, "content": content})
    return plain
