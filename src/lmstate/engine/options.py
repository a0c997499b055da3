"""Prompts and sizes as callers give them, checked before a request is queued."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmstate.errors import UnsupportedError
from lmstate.generation.params import SamplingParams, check_token
from lmstate.generation.prompts import are_messages, as_token_lists, read_sources
from lmstate.state import SourceFeatures
from lmstate.state.validate import token_ids, whole_number
from lmstate.threads import available
from lmstate.vision.reader import PicturePrompt, named, pictures_of, with_videos

if TYPE_CHECKING:
    import torch

    from lmstate.engine.serving import ServingModel
    from lmstate.text.replay import Replay

MAX_SALT = 128  # characters


def check_salt(salt: object) -> None:
    """Raise ValueError for what prefixes cannot be kept under."""
    if not isinstance(salt, str) or len(salt) > MAX_SALT or not salt.isprintable():
        raise ValueError(f"salt is {salt!r:.80}; it must be a printable text of at most {MAX_SALT} characters")


def read_prompt(model: ServingModel, prompt: Any, replay: Replay, salt: str = "") -> PicturePrompt:
    """The ids and pictures of a prompt: a text, ids, chat messages, or what `Model.encode` gave.

    `(text,)` follows another text, and gets no begin token. Raises ValueError for anything else.
    """
    if isinstance(prompt, PicturePrompt):
        read = prompt
    elif are_messages(prompt) and (pictures := pictures_of(prompt)):
        texts = model.pictures().texts(pictures)
        read = texts.prompt(replay.encode(texts, named(prompt), salt))
    else:
        read = PicturePrompt(prompt_ids(model, prompt, replay, salt))
    for token in read.tokens:
        check_token(token, "the prompt", model.config.ids)
    return read


def with_frames(prompt: Any) -> Any:
    """A prompt of `submit` with a `Video` in place of each video of its messages. Raises as `with_videos`."""
    return with_videos(prompt) if are_messages(prompt) else prompt


def read_sourced(model: ServingModel, source: Any, prompt: Any) -> PicturePrompt:
    """A source, and the ids of what the answer begins with. Raises as `read_sources`, ValueError for several."""
    sources, prompts, single = read_sources(model, source, prompt)
    if not single:
        raise ValueError(f"submit takes one source, and this is a list of {len(sources)}: submit each by itself")
    read = sources[0]
    if isinstance(read, SourceFeatures):
        return PicturePrompt(prompts[0], source=read)
    ids = token_ids(read, "the source", model.config.vocab_size)
    if not ids:
        raise ValueError("the source has no tokens: there is nothing to read")
    return PicturePrompt(prompts[0], source=tuple(ids))


def refuse_sources(model: ServingModel) -> None:
    """Raise UnsupportedError for a model whose tokens read a text, where requests have no such sources."""
    if model.start_id is not None and not model.hears:
        raise UnsupportedError(
            f"a server was asked for with a {model.config.family} model, whose tokens read a source, and a server's "
            "requests have none: use lmstate generate --source, or Engine.submit(source=...)"
        )


def prompt_ids(model: ServingModel, prompt: Any, replay: Replay, salt: str = "") -> list[int]:
    """The ids of a prompt of text alone, as `read_prompt` takes it. Raises ValueError for pictures too."""
    if are_messages(prompt):
        if pictures_of(prompt):
            raise ValueError("messages with pictures were given, and only text is taken here: submit them to an Engine")
        ids = replay.encode(model.tokenizer, prompt, salt)
    elif isinstance(prompt, str):
        ids = model.tokenizer.encode(prompt)
    elif isinstance(prompt, tuple) and len(prompt) == 1 and isinstance(prompt[0], str):
        ids = model.tokenizer.encode(prompt[0], add_special_tokens=False)
    else:
        rows, single = as_token_lists(model.tokenizer if model.has_tokenizer else None, prompt, None)
        if not single:
            raise ValueError(f"submit takes one prompt, and this is a list of {len(rows)}: submit each by itself")
        ids = rows[0]
    return ids


def answered_ids(answered: Any, params: SamplingParams, model: ServingModel) -> list[list[int]]:
    """The tokens that each answer of a request began with elsewhere; [] if none did.

    Raises ValueError for anything but a list of tokens for each answer, and where an exact continuation is impossible.
    """
    told = list(answered) if isinstance(answered, Sequence) and not isinstance(answered, str | bytes) else None
    if told is None or (told and len(told) != params.n):
        raise ValueError(f"answered is {answered!r:.80}; give a list of tokens for each of the n={params.n} answers")
    lists = [token_ids(ids, f"answered[{index}]", model.config.vocab_size) for index, ids in enumerate(told)]
    longest = max(map(len, lists), default=0)
    if longest > params.max_new_tokens:
        raise ValueError(f"{longest} tokens were answered, more than max_new_tokens, which is {params.max_new_tokens}")
    if longest and not params.greedy and params.seed is None:
        raise ValueError("answered tokens were given without a seed: what was drawn elsewhere is not known here")
    return lists


def refuse_sourceless(model: ServingModel, prompt: PicturePrompt) -> None:
    """Raise ValueError for a prompt without a source, where the model's tokens read one."""
    if model.start_id is not None and prompt.source is None:
        raise ValueError(f"a {model.config.family} model reads a source: submit(source=...) gives it one")


def check_length(model: ServingModel, ids: Sequence[int]) -> None:
    """Raises ValueError for a text that the model cannot continue."""
    if not ids:
        raise ValueError("the prompt has no tokens: there is nothing to continue")
    most = model.max_positions
    if most is not None and len(ids) > most:
        raise ValueError(f"the prompt has {len(ids)} tokens; the model has learned {most} positions: shorten it")


def default_rows(device: torch.device) -> int:
    """Number of sequences that a server works on at a time: 8 to 32 on processors, by how many, and 64 elsewhere.

    More rows than that share the weights' reading with little gain, and each adds to the time of a step.
    """
    return min(max(8, 2 * available()), 32) if device.type == "cpu" else 64


def as_bytes(size: int | str) -> int:
    """A number of bytes, or a text like "4GiB" or "500 MB"."""
    if isinstance(size, str):
        number = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(i?)B?\s*", size, re.IGNORECASE)
        if number is None or number[1].count(".") > 1 or not number[1].strip("."):
            raise ValueError(f"{size!r} is not a size; give bytes, or a text like '4GiB' or '500MB'")
        power = "KMGT".find(number[2].upper()) + 1 if number[2] else 0
        size = int(float(number[1]) * (1024 if number[3] else 1000) ** power)
    if whole_number(size, "a number of bytes") < 0:
        raise ValueError(f"{size} bytes were asked for; give 0 or more")
    return int(size)
