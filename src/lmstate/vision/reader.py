"""Conversations with pictures, as the tokens and the pictures that go into a state."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Lock
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from lmstate.errors import ModelError, StateError, UnsupportedError
from lmstate.state.media import MediaSpan, identities
from lmstate.state.sources import Source, SourceFeatures
from lmstate.vision.families import OPTIONS, TIDIED, UNTILED, VIDEOS, WRITERS, Tile
from lmstate.vision.pictures import read_picture
from lmstate.vision.tower import Tower, lacking
from lmstate.vision.video_files import SECONDS
from lmstate.vision.videos import MOST_FRAMES, Video, VideoProcessor, VideoWords, frames_of, read_video

if TYPE_CHECKING:
    from lmstate.state import State
    from lmstate.text.control_tokens import ControlTokens
    from lmstate.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

KINDS = ("image", "audio")  # of parts of messages that have a file: sounds take the road of pictures
SHOWN = (*KINDS, "video")  # of parts beside texts
NAMES = {"image": "a picture", "audio": "a sound", "video": "a video"}
PLURALS = {"image": "pictures", "audio": "sounds", "video": "videos"}
MOST_PICTURES = 64  # of a conversation
MOST_PIXELS = 2**27  # of all of them together


@dataclass(frozen=True)
class PicturePrompt:
    """The tokens of a prompt, and its pictures where they are among them. `seconds`: that the tower took.

    `source`: what its tokens read, of a model with an encoder.
    """

    tokens: list[int]
    media: tuple[MediaSpan, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    source: Source | None = None

    def place(self, state: State, row: int = 0) -> None:
        """Announce its pictures after the tokens of a row, which `tokens` are then fed to; with its source, if any."""
        if self.source is not None:
            state.condition(row, self.source)
        start = state.lengths[row]
        for span in self.media:
            state.place(row, start + span.at, span.media)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def identities(self) -> list[int]:
        """Its tokens, with numbers of a picture's content where one stands."""
        return identities(self.tokens, self.media, self.source)

    @property
    def nbytes(self) -> int:
        """Bytes of its pictures, and of the features that it reads."""
        values = self.source.values if isinstance(self.source, SourceFeatures) else None
        of_source = 0 if values is None else values.nbytes
        return of_source + sum(tensor.nbytes for span in self.media for tensor in span.media.tensors)


class PictureReader:
    """The tower, transformers' image processor and the tokenizer of a checkpoint that sees. Safe for any thread.

    `processor`: transformers' own of the family, which writes the places of tiles; None where there are no tiles.
    `folder`: of the checkpoint, which has the processor of videos, if any.
    """

    kinds: tuple[str, ...] = ("image",)  # of parts that it reads
    folder: Path | None = None
    _videos: VideoProcessor | None = None

    def __init__(self, tower: Tower, pixels: Any, processor: Any, tokenizer: Tokenizer) -> None:
        self.tower, self.pixels, self.processor, self.tokenizer = tower, pixels, processor, tokenizer
        self._one = Lock()  # the pictures of one conversation at a time: they bound the memory, and leave processors

    @classmethod
    def open(cls, path: Path, tokenizer: Tokenizer, device: Any = "cpu") -> PictureReader:
        """Raises what `Tower.open` does, and `ModelError` where transformers cannot read the processor's files."""
        reader = cls.beside(Tower.open(path, device), path, tokenizer)
        reader.folder = path
        if reader.tower.family in VIDEOS:
            reader.kinds = (*cls.kinds, "video")
        return reader

    @classmethod
    def beside(cls, tower: Tower, path: Path, tokenizer: Tokenizer) -> PictureReader:
        """The reader of a tower, with the processor whose files are in a folder.

        Raises `ModelError` without them, `UnsupportedError` without a package that the processor needs.
        """
        from transformers import AutoImageProcessor, AutoProcessor

        if missing := lacking(tower.family):
            told = " and ".join(missing)
            raise UnsupportedError(f"pictures of a {tower.family} model need {told}: pip install {' '.join(missing)}")
        untiled = tower.family in UNTILED
        kind = AutoImageProcessor if untiled else AutoProcessor
        try:
            made = kind.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            raise ModelError(f"transformers cannot read the processor of {path}: {str(error)[:200]}") from error
        return cls(tower, made if untiled else made.image_processor, None if untiled else made, tokenizer)

    def refuse_others(self, kinds: Iterable[str]) -> None:
        """Raise UnsupportedError for kinds of parts that the model does not read."""
        if others := set(kinds) - set(self.kinds):
            raise UnsupportedError(
                f"{NAMES[min(others)]} was given, and {self.tower.family} models read "
                f"{' and '.join(PLURALS[kind] for kind in self.kinds)} alone"
            )

    def encode(self, messages: Sequence[Message], **variables: Any) -> PicturePrompt:
        """See `Model.encode`; videos as `with_videos` gives them."""
        self.refuse_others(part["type"] for part in chain.from_iterable(map(_parts, messages)) if _is_picture(part))
        files, shown = pictures_of(messages), named(messages)
        texts = self.texts(files)
        return texts.prompt(texts.chat(shown, **variables))

    def texts(self, pictures: Sequence[Any]) -> PicturedTexts:
        """A tokenizer for conversations with these pictures: runs the tower. Raises `StateError` for bad ones.

        pictures: the bytes of files, and videos.
        """
        if (count := len(pictures)) > MOST_PICTURES:
            raise StateError(f"the conversation has {count} pictures; it may have {MOST_PICTURES}")
        begin = perf_counter()
        with self._one:
            videos = [each for each in pictures if isinstance(each, Video)]
            reads, images = self._video_processor() if videos else None, []
            for content in (each for each in pictures if not isinstance(each, Video)):
                images.append(read_picture(content))
                size = sum(image.width * image.height for image in images) + sum(video.pixels for video in videos)
                if size > MOST_PIXELS:
                    raise StateError(f"the pictures have {size} pixels and more; all may have {MOST_PIXELS} together")
            try:
                inputs, places = ([], []) if reads and not images else self._processed(images)
                del images
                taken = [self.tower.places(tile) for tile in self.tower.tiles(inputs)]
                if self.processor is None:
                    places = [self.mark * count for count in taken]
                if reads:
                    shown = self._by_picture(self.tower.tiles(inputs), places)
                    pairs = [reads.tiles(each) if isinstance(each, Video) else next(shown) for each in pictures]
                    inputs, places = [tile for tiles, _ in pairs for tile in tiles], [place for _, place in pairs]
                    for tile in inputs:
                        self.tower.embed(tile)
            except (ValueError, TypeError, KeyError) as error:
                raise StateError(f"the model's processor does not take a picture: {str(error)[:200]}") from error
        return PicturedTexts(self, inputs, list(map(name_of, pictures)), places, perf_counter() - begin)

    def _by_picture(self, tiles: list[Tile], places: list[str]) -> Iterator[tuple[list[Tile], str]]:
        """The tiles of each picture, as many as fill its places."""
        left = iter(tiles)
        for place in places:
            own: list[Tile] = []
            while sum(map(self.tower.places, own)) < place.count(self.mark):
                own.append(next(left))
            yield own, place

    def _processed(self, images: list[Any]) -> tuple[Any, list[str]]:
        """The inputs that transformers makes of pictures, and the text of their places, if there are tiles."""
        if self.processor is None:
            return self.pixels(images=images, return_tensors="pt"), []
        # Options of a processor override those of its image processor.
        options = self.processor._merge_kwargs(return_tensors="pt")["images_kwargs"]
        if (write := WRITERS.get(self.tower.family)) is not None:
            inputs = self.pixels(images=images, **options)
            return inputs, [write(self.processor, inputs, index) for index in range(len(images))]
        more = OPTIONS.get(self.tower.family, {})
        inputs, places = self.processor._process_images(images, **options, **more)
        return inputs, places

    def _video_processor(self) -> VideoProcessor:
        if self._videos is None:
            assert self.folder is not None  # where videos are read
            begin, mark, end = map(self._word, ("vision_start_token_id", "video_token_id", "vision_end_token_id"))
            mark = mark if self.processor is None else str(self.processor.video_token)
            if not mark:
                raise ModelError(
                    "the tokenizer has no token where a video is: it lacks the video_token_id of the config"
                )
            words = VideoWords(begin, mark, end)
            self._videos = VideoProcessor.open(self.folder, self.tower.config, words, self.processor)
        return self._videos

    def _word(self, name: str) -> str:
        """The text of a token that the config names; empty where it does not."""
        id = getattr(self.tower.config, name, None)
        return "" if id is None else self.tokenizer.decode([int(id)], skip_special_tokens=False)

    @property
    def marks(self) -> dict[str, str]:
        """The texts that a chat template writes where a picture or a sound stands, with the kind of each."""
        return {self.mark: self.kinds[0]} | ({} if self._videos is None else {self._videos.mark: "video"})

    @property
    def mark(self) -> str:
        """The text of the token that a chat template writes where a picture stands."""
        if self.processor is not None:
            return str(self.processor.image_token)
        return self.tokenizer.decode([self.tower.placeholder], skip_special_tokens=False)


class SeeingModel(Protocol):
    """A model that may take pictures."""

    def pictures(self) -> PictureReader:
        """The reader of its pictures. Raises as `lmstate.Model.encode` does."""
        ...


class PicturedTexts:
    """The part of a tokenizer that renders conversations, for those with certain pictures, in their order.

    A template's mark of a picture becomes the tokens of its places. `names`, `places`: the SHA-256 of each picture,
    and the text of those tokens.
    """

    def __init__(
        self,
        reader: PictureReader,
        inputs: Any,
        names: list[str],
        places: list[str],
        seconds: float,
        kinds: Sequence[str] = (),
    ) -> None:
        """`kinds`: of the files, where they may be pictures and sounds."""
        self._reader, self._inputs, self._names, self._places = reader, inputs, names, places
        self._seconds, self._kinds = seconds, kinds

    def parts(self) -> list[tuple[Tile, str]]:
        """Each picture of one tile, with the text of its places."""
        return list(zip(self._reader.tower.tiles(self._inputs), self._places, strict=True))

    def prompt(self, tokens: list[int]) -> PicturePrompt:
        """The pictures at their places in the tokens of a rendered conversation."""
        with self._reader._one:
            return PicturePrompt(tokens, self._reader.tower.media(self._inputs, tokens), self._seconds)

    def chat_text(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """As `Tokenizer.chat_text`, of messages as `named` gives them, with all pictures or the first ones.

        A template that knows no pictures gets each message as one text, with a line for each picture. Raises
        `ModelError` where a template leaves out a picture.
        """
        names = [part.get("sha256") for part in chain.from_iterable(map(_parts, messages)) if _is_picture(part)]
        if names != self._names[: len(names)]:
            raise ModelError("the pictures of the conversation stand in another order")
        marks, expected = self._reader.marks, len(names)
        kinds = [part["type"] for part in chain.from_iterable(map(_parts, messages)) if _is_picture(part)]
        for said, own in zip(kinds, self._kinds):
            if said != own:
                raise StateError(f"a part of a message is of the type {said!r}, and its file is {NAMES[own]}")
        if {*kinds} == {"image"} and (own := self._reader.mark) not in (self._reader.tokenizer.template_source or own):
            messages = [_as_text(message, own) for message in messages]
        text = self._reader.tokenizer.chat_text(messages, add_generation_prompt, **variables)
        mark = re.compile("|".join(map(re.escape, marks)))
        if (count := len(found := mark.findall(text))) != expected:
            raise ModelError(
                f"the chat template has {count} places {' or '.join(map(repr, marks))} for {expected} pictures: it "
                "takes none in some message, or a message has that text"
            )
        if [marks[each] for each in found] != kinds:
            raise ModelError("the chat template writes pictures and sounds in another order than the messages have")
        places = iter(self._places)
        text = mark.sub(lambda _: next(places), text)
        tidy = TIDIED.get(self._reader.tower.family)
        return text if tidy is None else tidy(self._reader.processor, text)

    def chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """As `Tokenizer.chat`."""
        control = self.control_tokens()
        return self.encode_rendered(self.chat_text(control.hide(messages), **variables), control)

    def control_tokens(self) -> ControlTokens:
        return self._reader.tokenizer.control_tokens()

    def encode_rendered(self, text: str, control: ControlTokens) -> list[int]:
        return self._reader.tokenizer.encode_rendered(text, control)


def pictures_of(messages: Sequence[Message]) -> list[Any]:
    """The contents of all pictures, sounds and videos of a conversation, in order.

    Raises `UnsupportedError` for a video that `with_videos` has not read.
    """
    parts = [part for part in chain.from_iterable(map(_parts, messages)) if _is_picture(part)]
    if any(part["type"] == "video" and not isinstance(part.get("video"), Video) for part in parts):
        raise UnsupportedError("a video was given, and none is read here: give it to Model.encode or Engine.submit")
    return [part.get(part["type"]) for part in parts]


def with_videos(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with a `Video` in place of the frames of each. Raises as `read_video`."""
    read: list[Video] = []
    until = monotonic() + SECONDS

    def shown(part: Any) -> Any:
        if not _is_picture(part) or part["type"] != "video" or isinstance(part.get("video"), Video):
            return part
        left = MOST_PIXELS - sum(video.pixels for video in read)
        read.append(read_video(part, MOST_FRAMES - frames_of(read), left, until))
        return {"type": "video", "video": read[-1]}

    made = [
        {**message, "content": [*map(shown, _parts(message))]} if any(_parts(message)) else message
        for message in messages
    ]
    return made if read else messages


def named(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with the SHA-256 of pictures and sounds in place of their bytes, which templates need not know."""
    return [_named(message) for message in messages]


def _named(message: Message) -> dict[str, Any]:
    if not any(map(_is_picture, _parts(message))):
        return dict(message)
    return {**message, "content": [_name(part) if _is_picture(part) else part for part in _parts(message)]}


def _name(part: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(file := part.get(part["type"]), bytes | bytearray | memoryview | Video):
        raise StateError(f"a picture or a sound is {file!r:.80}; give the bytes of a file")
    return picture_part(name_of(file), part["type"])


def _as_text(message: Message, mark: str) -> dict[str, Any]:
    """A message whose parts are lines of one text: `mark` for a picture."""
    if isinstance(message.get("content"), str):
        return dict(message)
    lines = [mark if _is_picture(part) else _text_of(part) for part in _parts(message)]
    if not all(isinstance(line, str) for line in lines):
        raise ModelError("the chat template knows texts alone, and a message has parts of another kind")
    return {**message, "content": "\n".join(lines)}


def _text_of(part: Any) -> Any:
    return part.get("text") if isinstance(part, Mapping) else part


def name_of(picture: bytes | bytearray | memoryview | Video) -> str:
    """The SHA-256 of a picture's file, or of a video."""
    if isinstance(picture, Video):
        return picture.name
    return hashlib.sha256(picture).hexdigest()


def picture_part(name: str, kind: str = "image") -> dict[str, Any]:
    """A picture in a message, as a template sees it; or a sound, of the kind "audio"."""
    return {"type": kind, "sha256": name}


def kind_of_file(file: bytes | bytearray | memoryview) -> str:
    """The kind of part that a file is: "audio" for a WAV file, "image" for any other."""
    return "audio" if (file[:4], file[8:12]) == (b"RIFF", b"WAVE") else "image"


def file_part(file: bytes) -> dict[str, Any]:
    """A picture or a sound in a message, with the bytes of its file."""
    kind = kind_of_file(file)
    return {"type": kind, kind: file}


def _parts(message: Any) -> Iterator[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return iter(content if isinstance(content, list | tuple) else ())


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in SHOWN
