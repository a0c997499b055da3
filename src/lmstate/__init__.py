"""lmstate: the inference state of a language model as one value."""

from __future__ import annotations

__version__ = "0.1.0"
