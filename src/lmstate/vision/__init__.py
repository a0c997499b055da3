"""Pictures for models that see: the tower is transformers' own, and what it makes of a picture goes into the state."""

from lmstate.vision.tower import Tower

__all__ = ["Tower"]
