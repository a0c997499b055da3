"""A model whose weights are parameters: named as in its checkpoint, followed by autograd, saved as it was loaded."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor

from lmstate.errors import ModelError, StateError
from lmstate.models.decoder import Logits, Model, Tokens
from lmstate.models.weights.weights import Weights
from lmstate.state import Layout, State
from lmstate.state.kv.per_layer import Policies
from lmstate.training.weights import Leaves, TrainableWeights

OWN = ("name", "eos_ids", "defaults", "_tokenizer")
"""Fields that a build knows nothing of."""


class TrainableModel(Model):
    """A `Model` of which every weight is a parameter. Made by `lmstate.load(..., trainable=True)`.

    `model(tokens)` gives logits that gradients can follow, and `lmstate.training.loss` the loss of long texts. An
    optimiser writes into the parameters, and the next call sees it. A state belongs to the weights that it was made
    with: once they have changed, it is refused.
    """

    def __init__(self, weights: Weights) -> None:
        if weights.kind not in ("auto", "float32", "bfloat16"):
            raise ModelError(
                f"weights={weights.kind!r} with trainable=True was asked for; weights that train are float32 or "
                'bfloat16. To train over quantised ones, load with trainable="lora"'
            )
        kind = "float32" if weights.kind == "auto" else weights.kind
        self._source = weights.source
        self._leaves = Leaves(weights.source, kind, weights.device)
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        self._adopt(self.built(self._leaves, dtype))

    def built(self, leaves: Leaves, dtype: torch.dtype | None = None) -> Model:
        """The model that is made of leaves: autograd, where it is on, follows what it does with them."""
        from lmstate.models.families import build

        return build(TrainableWeights(self._source, leaves, dtype or self.dtype))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The name of each parameter in the checkpoint, and the parameter: what a gradient is put in (`.grad`)."""
        yield from ((name, leaf) for name, leaf in self._leaves.tensors.items() if leaf.requires_grad)

    def parameters(self) -> Iterator[Tensor]:
        """The parameters, for an optimiser."""
        yield from (leaf for _, leaf in self.named_parameters())

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for leaf in self.parameters():
            leaf.grad = None

    @contextmanager
    def apart(self) -> Iterator[tuple[list[Tensor], Iterator[Model]]]:
        """Leaves with the same numbers and gradients of their own, in the order of `parameters()`, and models of them.

        Each of the models is built when it is asked for, and good for one backward.
        """
        leaves = self._leaves.detached()
        parameters = [leaf for leaf in leaves.tensors.values() if leaf.requires_grad]
        yield parameters, iter(lambda: self.built(leaves), None)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model as a checkpoint directory, which `lmstate.load` and transformers load.

        Tensors have the dtype that they are trained in. What the model does not use of its checkpoint (a vision tower,
        say) is copied.
        """
        from lmstate.training.saving import save_checkpoint

        tied = ("lm_head.weight",) if self.head is self.embed else ()
        save_checkpoint(folder, self._leaves.source, self._leaves.tensors, without=tied)

    # ---- built again where the leaves have moved on

    def _adopt(self, built: Model) -> None:
        for field in fields(Model):
            if field.init and field.name not in OWN:
                setattr(self, field.name, getattr(built, field.name))
        self.__dict__.pop("_stretching", None)
        self._traced = None
        self._version = self._leaves.version

    def refresh(self) -> None:
        """Build the model again where a gradient is to follow, or where its weights have changed."""
        if torch.is_grad_enabled() or self._version != self._leaves.version:
            self._adopt(self.built(self._leaves))

    def __call__(
        self, tokens: Tokens, state: State | None = None, logits: Logits | None = None, commit: bool = True
    ) -> Tensor | None:
        self.refresh()
        return super().__call__(tokens, state, logits, commit)

    @property
    def fingerprint(self) -> str:
        self.refresh()
        return super().fingerprint

    def _new_state(self, layout: Layout, kv: Policies | None = None) -> State:
        self.refresh()
        state = super()._new_state(layout, kv)
        _versions[state] = self._version
        return state

    def _refuse_other(self, state: State) -> None:
        super()._refuse_other(state)
        if _versions.setdefault(state, self._version) != self._leaves.version:
            raise StateError(
                "the state was made before the weights of this model changed, and holds what the old ones gave; make "
                "a new one with new_state"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise ModelError("a model that trains cannot be copied: save it with save_pretrained and load it again")


_versions: weakref.WeakKeyDictionary[State, int] = weakref.WeakKeyDictionary()
