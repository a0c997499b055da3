"""Speculative decoding: drafters propose tokens, the model verifies them in one step, and the depth chooses itself."""

from lmstate.speculation.acceptance import verify, verify_tree
from lmstate.speculation.choose import DraftChoice, make_drafter, make_speculator
from lmstate.speculation.drafter import Draft, Drafter
from lmstate.speculation.heads_drafter import HeadsDrafter
from lmstate.speculation.model_drafter import ModelDrafter
from lmstate.speculation.speculator import DraftReport, Speculator
from lmstate.speculation.text_corpus import TextCorpus
from lmstate.speculation.text_drafter import TextDrafter
from lmstate.speculation.translated_drafter import TranslatedDrafter

__all__ = [
    "Draft",
    "DraftChoice",
    "DraftReport",
    "Drafter",
    "HeadsDrafter",
    "ModelDrafter",
    "Speculator",
    "TextCorpus",
    "TextDrafter",
    "TranslatedDrafter",
    "make_drafter",
    "make_speculator",
    "verify",
    "verify_tree",
]
