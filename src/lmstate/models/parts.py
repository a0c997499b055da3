"""The parts of a model beside its forward pass: network, tokenizer, and readers of pictures and sounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmstate.models.block import Block
from lmstate.models.config import ModelConfig
from lmstate.models.describe import WeightTotals, describe
from lmstate.models.encoder import Encoder
from lmstate.models.fingerprint import fingerprint
from lmstate.models.heads.head import DraftHead
from lmstate.models.network import Network
from lmstate.models.readers import CheckpointReaders
from lmstate.ops import Norm, Weight
from lmstate.state import SourceFeatures, State
from lmstate.text.replay import Replay

if TYPE_CHECKING:
    from lmstate.text.tokenizer import Tokenizer
    from lmstate.vision.mmproj import Mmproj
    from lmstate.vision.reader import PicturePrompt


@dataclass(eq=False, repr=False)
class ModelParts(CheckpointReaders):
    """The parts of a model, and its files as far as they were read."""

    network: Network
    dtype: torch.dtype = torch.float32  # of stored keys and values, and of large matrix products
    context_size: int | None = None  # tokens that a text may have: what it was made for, unless `load` says otherwise
    name: str = ""
    eos_ids: frozenset[int] = frozenset()
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling that the checkpoint's makers suggest
    notes: tuple[str, ...] = ()  # what was guessed of the checkpoint, and what is held in another storage than its own
    folder: Path | None = None  # of the checkpoint, where it is one
    mmproj: Mmproj | None = None  # the file of a vision tower, of a GGUF model
    commit: str | None = None  # of the Hub's repository that it comes from
    _tokenizer: Tokenizer | None = None
    _fingerprint: str | None = None
    on_part: Callable[[int, int], None] | None = field(default=None, init=False)
    """Called with (tokens done, tokens of the step) before each part of a long step, and at its end."""
    _traced: tuple[Network, Network] | None = field(default=None, init=False)  # a network, and what its graphs hold
    _replay: Replay | None = field(default=None, init=False, repr=False)

    def __repr__(self) -> str:
        return describe(self.name, self.network, self.context_size, self.dtype)

    def check(self) -> None:
        """Raise `RanksError` if a process of the model has ended. One in a single process is always there."""

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    @property
    def embed(self) -> Weight:
        """The embedding, `[V, E]`."""
        return self.network.embed

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.network.blocks

    @property
    def norm(self) -> Norm:
        """The norm in front of the head."""
        return self.network.norm

    @property
    def head(self) -> Weight:
        """The head, `[V, E]`; the embedding itself where they are tied."""
        return self.network.head

    @property
    def heads(self) -> tuple[DraftHead, ...]:
        """The heads that draft."""
        return self.network.heads

    def has_heads(self, state: State) -> bool:
        """Whether a state of this model has layers of its multi-token prediction heads."""
        return len(state.layers) > len(self.blocks)

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of its sources, see `State.condition`; None where there are none."""
        return self.network.encoder

    @property
    def device(self) -> torch.device:
        """The device of the embedding: where tokens go."""
        return self.network.device

    @property
    def output_device(self) -> torch.device:
        """The device of the head: where logits and hidden states come from."""
        return self.network.output_device

    @property
    def devices(self) -> list[torch.device]:
        """The device of each block."""
        return self.network.devices

    def encode(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> PicturePrompt:
        """A conversation as tokens and pictures: `prompt.place(state, row)`, then feed `prompt.tokens`.

        In a message whose content is a list, a picture is `{"type": "image", "image": bytes}`, the bytes of a PNG,
        JPEG, WebP or GIF file, and a sound is `{"type": "audio", "audio": bytes}`, those of a WAV file. A video is
        `{"type": "video", "video": frames, "fps": 2.0}`, where a frame is a picture of Pillow, a path or bytes; or a
        file in place of the frames (`lmstate[video]`): `fps` of its frames are taken for each second. The
        tower of the checkpoint is loaded with the first one (`lmstate[vision]`, `lmstate[audio]`). `variables`: as of
        `Tokenizer.chat_text`, which ends with the beginning of an answer. Raises `StateError` for a file that is
        damaged or too large, `UnsupportedError` for a model whose pictures or sounds are not read, `ModelError` for a
        checkpoint or a chat template without what they need.
        """
        from lmstate.vision.reader import PicturePrompt, pictures_of, with_videos

        messages = with_videos(messages)
        if not pictures_of(messages):
            return PicturePrompt(self.tokenizer.chat(messages, **variables))
        return self.pictures().encode(messages, **variables)

    @property
    def hears(self) -> bool:
        """Whether its sources are sounds."""
        return self.encoder is not None and self.encoder.hears

    def listen(self, sound: bytes | Tensor) -> SourceFeatures:
        """A sound as a source of a model that hears: `state.condition(row, source)`, `generate(source=source)`.

        sound: the bytes of a WAV file, or samples float32 `[N]` at `listener().rate`. At most as long as the encoder
        reads at once, 30 seconds for Whisper. Raises `StateError` for a sound that is damaged or too long,
        `UnsupportedError` for a model that does not hear, `ModelError` for a checkpoint without what sounds need.
        """
        listener = self.listener()
        return listener.features(sound if isinstance(sound, Tensor) else listener.samples(sound))

    @property
    def start_id(self) -> int | None:
        """The token that every answer to a source begins with; None for a model without an encoder."""
        return None if self.encoder is None else self.encoder.start_id

    @property
    def opening_length(self) -> int:
        """Number of learned positions in front of every row (prompt tuning, prefix tuning), which nothing counts."""
        return 0 if self.network.opening is None else self.network.opening.opening.count

    @property
    def opening_numbers(self) -> list[int]:
        """A number for each of them, that depends on all that was learned."""
        return [] if self.network.opening is None else self.network.opening.opening.media.numbers

    @property
    def weight_totals(self) -> WeightTotals:
        """Number of parameters, and bytes by storage."""
        return WeightTotals.of(self.network)

    @property
    def fingerprint(self) -> str:
        """A hash of the config and of a sample of every weight: what a snapshot must agree with."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.config, self.network.parts)
        return self._fingerprint

    @property
    def max_positions(self) -> int | None:
        """Number of learned position embeddings; None: any position will do."""
        return self.network.max_positions

    @property
    def replay(self) -> Replay:
        """The tokens of answers that `chat` gave, by their conversations."""
        if self._replay is None:
            self._replay = Replay()
        return self._replay
