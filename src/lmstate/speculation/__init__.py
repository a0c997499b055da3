"""Speculative decoding: drafters propose tokens, the model verifies them in one step, and the depth chooses itself."""

from lmstate.speculation.acceptance import verify, verify_tree
from lmstate.speculation.choose import DraftChoice, make_speculator
from lmstate.speculation.drafter import Draft, Drafter
from lmstate.speculation.model_drafter import ModelDrafter
from lmstate.speculation.speculator import DraftReport, Speculator
from lmstate.speculation.text_drafter import TextDrafter
from lmstate.speculation.translated_drafter import TranslatedDrafter

__all__ = [
    "Draft",
    "DraftChoice",
    "DraftReport",
    "Drafter",
    "ModelDrafter",
    "Speculator",
    "TextDrafter",
    "TranslatedDrafter",
    "make_speculator",
    "verify",
    "verify_tree",
]
