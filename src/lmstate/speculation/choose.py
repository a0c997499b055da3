"""The `draft` argument of `generate`: which speculation it stands for."""

from __future__ import annotations

from typing import Any, TypeAlias

from lmstate.language_model import LanguageModel
from lmstate.speculation.drafter import Drafter
from lmstate.speculation.heads_drafter import HeadedModel, HeadsDrafter
from lmstate.speculation.model_drafter import Distribution, ModelDrafter
from lmstate.speculation.speculator import Speculator
from lmstate.speculation.text_drafter import TextDrafter
from lmstate.speculation.translated_drafter import TranslatedDrafter
from lmstate.state import State

DraftChoice: TypeAlias = "str | Drafter | LanguageModel | Speculator | None"


def make_speculator(
    draft: DraftChoice,
    model: LanguageModel,
    rows: int,
    sampler: Distribution,
    seed: int | None,
    state: State | None = None,
) -> Speculator | None:
    """The speculation for a batch of `rows`; None: none.

    draft    "heads": the model's own multi-token prediction heads; "text": the text itself; "auto": the text, and
             where it does not repeat itself the heads, if the state has them; None or "none": none. A model: drafts
             with it, through text if its tokenizer is another one; a `Drafter`; or a `Speculator` made for this batch
    state    the batch's, for the heads
    sampler  what `model` draws with. A drafting model draws its drafts alike, unless a seed asks for the text that
             comes without drafts: then it drafts its most likely tokens
    Raises ValueError for anything else.
    """
    if isinstance(draft, Speculator):
        draft.resize(rows)  # a step of more tokens than it may have would not have the bits of steps of one
        return draft
    own = _heads_drafter(draft, model, state)
    drafter = make_drafter(draft, model, rows, sampler, seed) if own is None else own
    return None if drafter is None else Speculator(drafter, model.config.vocab_size, rows)


def _heads_drafter(draft: DraftChoice, model: LanguageModel, state: State | None) -> Drafter | None:
    """A drafter with the model's own heads, if `draft` asks for them."""
    if draft not in ("auto", "heads") or state is None or not isinstance(model, HeadedModel):
        return None
    if draft == "heads":
        return HeadsDrafter(model, state)
    return HeadsDrafter(model, state, TextDrafter()) if model.has_heads(state) else None


def make_drafter(
    draft: str | Drafter | LanguageModel | None,
    model: LanguageModel,
    rows: int,
    sampler: Distribution,
    seed: int | None,
    reading: int | None = None,
) -> Drafter | None:
    """The drafter that `draft` stands for, see `make_speculator`; `reading` as in `TextDrafter`."""
    if draft is None or draft == "none":
        return None
    if draft in ("auto", "text"):
        return TextDrafter(reading=reading)
    if isinstance(draft, str):
        raise ValueError(
            f'draft={draft!r} was asked for; there are "auto", "heads" (of a model that has them), "text" and "none", '
            "a model, and a Drafter"
        )
    if isinstance(draft, Drafter):
        return draft
    if not callable(draft):
        raise ValueError(
            f'draft is {draft!r:.80}; give "auto", "text", None, a model, or an object with the methods propose '
            "and observe"
        )
    if _same_tokens(draft, model):
        return ModelDrafter(draft, rows, model.config.vocab_size, sampler if seed is None else None, reading=reading)
    return TranslatedDrafter(draft, model.tokenizer, rows, reading)


def _same_tokens(one: LanguageModel, other: LanguageModel) -> bool:
    """Whether ids mean the same to both models. Two models without tokenizers are told by their vocabulary's size."""
    first, second = _vocabulary(one), _vocabulary(other)
    if first is None or second is None:
        if one.config.vocab_size == other.config.vocab_size:
            return True
        raise ValueError(
            "the drafting model has another vocabulary, and one of the models has no tokenizer to translate by: give "
            "both their tokenizers, or draft with a model of the same vocabulary"
        )
    return first == second


def _vocabulary(model: LanguageModel) -> Any:
    try:
        return model.tokenizer.vocabulary
    except ValueError:  # it has none
        return None
