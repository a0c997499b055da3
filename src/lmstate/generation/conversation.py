"""The answer to chat messages, on a state that goes on from turn to turn."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, overload

from lmstate.errors import UnsupportedError
from lmstate.generation.generate import Generation
from lmstate.generation.params import sampling_params
from lmstate.generation.prompts import refuse_no_messages
from lmstate.generation.sampling import Sampler
from lmstate.language_model import LanguageModel
from lmstate.speculation.choose import DraftChoice
from lmstate.state.media import before_picture, identities
from lmstate.vision.reader import PicturePrompt, pictures_of

if TYPE_CHECKING:
    from lmstate.generation.report import RowPiece
    from lmstate.state import State
    from lmstate.text.replay import Message, Replay


class ChatModel(LanguageModel, Protocol):
    """A language model that knows its answers as they were sampled."""

    @property
    def replay(self) -> Replay:
        """The tokens of its answers, by their conversations."""
        ...


@overload
def chat(
    model: ChatModel,
    messages: Sequence[Message],
    state: State | None = None,
    params: Sampler | None = None,
    *,
    stream: Literal[False] = False,
    draft: DraftChoice = "auto",
    template: Mapping[str, Any] | None = None,
    **changes: Any,
) -> str: ...
@overload
def chat(
    model: ChatModel,
    messages: Sequence[Message],
    state: State | None = None,
    params: Sampler | None = None,
    *,
    stream: Literal[True],
    draft: DraftChoice = "auto",
    template: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Iterator[str]: ...
def chat(
    model: ChatModel,
    messages: Sequence[Message],
    state: State | None = None,
    params: Sampler | None = None,
    *,
    stream: bool = False,
    draft: DraftChoice = "auto",
    template: Mapping[str, Any] | None = None,
    **changes: Any,
) -> str | Iterator[str]:
    """The answer to a conversation: `[{"role": "user", "content": "Hello!"}, ...]`, all of it each time.

    messages  a whole conversation, as `Tokenizer.chat` takes it
    state     of one row. It may hold an earlier part of the conversation, or another one: it is rewound to where they
              part, and the rest is computed. Afterwards it holds the conversation with the answer. An answer that this
              model gave comes back as the tokens that were sampled. None: a fresh one
    params    a `lmstate.SamplingParams`; its fields can be given by name too, as in `generate`
    stream    give the answer piece by piece. Pieces given out are in the state, also if the iterator is closed early
    draft     as in `generate`
    template  variables that the chat template knows (`tools`, `enable_thinking`, ...)

    Raises ValueError for anything but messages and for a state of several rows, `ModelError` for a model without a chat
    template, `UnsupportedError` for pictures: `Engine.submit` and `Model.encode` take them.
    """
    refuse_no_messages(messages)
    if pictures_of(messages):
        raise UnsupportedError("chat takes text, and the messages have pictures: give them to Engine.submit")
    chosen = sampling_params(params, changes)
    chosen.check(model)  # before the state is rewound
    variables = dict(template or {})
    ids = model.replay.encode(model.tokenizer, messages, **variables)
    state = model.new_state() if state is None else state
    if state.rows != 1:
        raise ValueError(f"chat takes a state of one row, and this one has {state.rows}")
    chosen = chosen.compiled(model, ids)
    generation = Generation(model, [align(state, PicturePrompt(ids))], state, chosen, draft=draft)
    pieces = _remembered(model, generation, messages, variables)
    return pieces if stream else "".join(pieces)


def _remembered(
    model: ChatModel, generation: Generation, messages: Sequence[Message], variables: dict[str, Any]
) -> Iterator[str]:
    """The pieces of an answer; its tokens are remembered."""
    try:
        with closing(cast("Generator[RowPiece]", iter(generation))) as pieces:
            for piece in pieces:
                yield piece.text
    finally:
        if generation.report().finished[0] != "stop":  # the text may end inside a token
            answer = {"role": "assistant", "content": generation.texts[0]}
            model.replay.remember([*messages, answer], generation.state.tokens(0), **variables)


def align(state: State, prompt: PicturePrompt) -> list[int]:
    """Rewind row 0 to the longest beginning that it shares with a prompt, and announce the pictures after it.

    Returns the tokens that are to be fed after it.
    """
    placed = state.media(0)
    held = identities(state.tokens(0), placed)
    same = min(common_prefix(held, prompt.identities), len(prompt) - 1)  # one token at least is fed, for its logits
    if prompt.media and state.whole_pictures:
        same = before_picture(prompt.media, same)
    if same < max([len(held), *(span.end for span in placed)]):
        state.rewind(0, same)
    for span in prompt.media:
        if span.at >= same:
            state.place(0, span.at, span.media)
    return prompt.tokens[same:]


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """The number of tokens, or messages, with which two sequences begin alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
