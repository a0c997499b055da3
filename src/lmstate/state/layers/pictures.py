"""The state of a layer that attends to the pictures of a row."""

from __future__ import annotations

from lmstate.state.layers.base import Layout
from lmstate.state.layers.composite import CompositeState


class PictureReadingState(CompositeState):
    """None of its own: a row holds its pictures, see `Media.beside`. `dtype`: of the keys and values made of them."""

    kind = "cross"

    def __init__(self, layout: Layout):
        super().__init__([])
        self.dtype = layout.dtype
