"""Pictures, sounds and videos in texts of messages: a mark stands for each, so that joined texts keep their places."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from lmstate.errors import ModelError, StateError
from lmstate.serve.answer.handlers import unreadable
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.picture_sources import SOUND, video_part
from lmstate.vision.reader import MOST_PICTURES, kind_of_file, name_of, picture_part, with_videos

if TYPE_CHECKING:
    from lmstate.vision.reader import PicturedTexts, PictureReader

PictureOpener: TypeAlias = "Callable[[], PictureReader]"
Fetch: TypeAlias = Callable[[str], bytes]  # the file that a URL has or names; raises `ApiError`
# Private characters around the digest of a URL: a text that has them for a picture of its conversation means it.
MARK = re.compile("\U000f0000([0-9a-f]{64})\U000f0001")


def picture_mark(url: str) -> str:
    """The text that stands for a picture in the content of a message, whose `pictures` have its URL."""
    return f"\U000f0000{hashlib.sha256(url.encode()).hexdigest()}\U000f0001"


def without_marks(text: str) -> str:
    """A text without its pictures."""
    return MARK.sub("", text)


class Pictures:
    """The pictures of a conversation, as its template and its tokenizer take them."""

    def __init__(self, urls: Iterable[str], texts: Iterable[str], open: PictureOpener, fetch: Fetch) -> None:
        """`urls`: those that its messages have. `texts`: their contents, in order. Raises `ApiError`."""
        known = {picture_mark(url): url for url in urls}
        placed = [known[mark[0]] for text in texts for mark in MARK.finditer(text) if mark[0] in known]
        if len(placed) > MOST_PICTURES:
            raise ApiError(f"the conversation has {len(placed)} pictures; it may have {MOST_PICTURES}")
        try:
            try:
                reader = open()  # a model without pictures says so before any is fetched
            except ModelError as error:
                raise unreadable(error) from error
            kinds = {url: _kind(url) for url in dict.fromkeys(placed)}
            reader.refuse_others(kind for kind in kinds.values() if kind)  # before anything is decoded
            # A video comes as one with its frames.
            parts = with_videos([{"content": [video_part(url)]} for url, kind in kinds.items() if kind == "video"])
            videos = iter([part["content"][0]["video"] for part in parts])
            files = {url: next(videos) if kind == "video" else fetch(url) for url, kind in kinds.items()}
            kinds = {url: kind or kind_of_file(files[url]) for url, kind in kinds.items()}
            reader.refuse_others(kinds.values())
            self.texts: PicturedTexts = reader.texts([files[url] for url in placed])
        except (StateError, ModelError) as error:
            raise ApiError(str(error), param="messages") from None
        self._parts: Mapping[str, dict[str, Any]] = {
            mark: picture_part(name_of(files[url]), kinds[url]) for mark, url in known.items() if url in files
        }

    def parts(self, content: str) -> list[dict[str, Any]]:
        """The content of a message as parts of text and pictures."""
        found: list[dict[str, Any]] = []
        at = 0
        for mark in MARK.finditer(content):
            if (part := self._parts.get(mark[0])) is not None:
                found += [*text_parts(content[at : mark.start()]), part]
                at = mark.end()
        return [*found, *text_parts(content[at:])]


def _kind(url: str) -> str:
    """The kind of what a URL has; empty where only its file tells."""
    return "audio" if url.startswith(SOUND) else "video" if url[:11].lower() == "data:video/" else ""


def text_parts(text: str) -> list[dict[str, Any]]:
    """A text as the parts of a message, without the line breaks that set pictures apart."""
    stripped = text.strip("\n")
    return [{"type": "text", "text": stripped}] if stripped else []
