"""A model whose weights are parameters: named as in its checkpoint, followed by autograd, saved as it was loaded."""

from __future__ import annotations

import itertools
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from lmstate.checkpoints.loader import WIDTHS, WeightLoader
from lmstate.checkpoints.source import dtype_name, floats
from lmstate.errors import ModelError, StateError
from lmstate.language_model import Logits
from lmstate.models.forward import Head, Run
from lmstate.models.model import Model
from lmstate.models.tokens import Tokens
from lmstate.state import Layout, State
from lmstate.state.inference_mode import ordinary_tensors
from lmstate.state.kv.policies.per_layer import Policies
from lmstate.training.streams import follow
from lmstate.training.weights import Leaves, TrainableWeights


class ParameterModel(Model, ABC):
    """A model with parameters: what an optimizer, `lmstate.training.loss` and a state need to know of it.

    An optimizer writes into the parameters, and the next call sees it. A state belongs to the weights that it was made
    with: once they have changed, it is refused.
    """

    _version: int

    @property
    @abstractmethod
    def version(self) -> int:
        """A number that changes when a parameter is written into, or given other memory.

        Writing through `parameter.data` changes it only where that is replaced (`p.data = ...`).
        """

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The name of each parameter in its file, and the parameter: what a gradient is put in (`.grad`)."""

    @abstractmethod
    def apart(self) -> AbstractContextManager[tuple[list[Tensor], Iterator[Model]]]:
        """Leaves with the same numbers and gradients of their own, in the order of `parameters()`, and models of them.

        Each of the models is built when it is asked for, and good for one backward.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Rebuild what is derived from the parameters, from their present values."""

    @abstractmethod
    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write what was trained to a folder. Raises `OSError`."""

    def parameters(self) -> Iterator[Tensor]:
        """The parameters, for an optimizer."""
        yield from (leaf for _, leaf in self.named_parameters())

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for leaf in self.parameters():
            leaf.grad = None

    def _extend(
        self,
        tokens: Tokens,
        state: State | None,
        logits: Logits | None,
        commit: bool,
        run: Run,
        head: Head | None,
        rewindable: bool | Sequence[bool] = True,
    ) -> Tensor | None:
        self.refresh()
        if isinstance(state, State) and torch.is_grad_enabled():
            self._refuse_other(state)
            follow(state.layers, self.blocks, state.layout)  # its scans may be of an earlier build
        return super()._extend(tokens, state, logits, commit, run, head, rewindable)

    @property
    def fingerprint(self) -> str:
        self.refresh()
        return Model.fingerprint.fget(self)  # type: ignore[attr-defined]

    def _new_state(self, layout: Layout, kv: Policies | None = None, heads: bool = False) -> State:
        self.refresh()
        state = super()._new_state(layout, kv, heads)
        _versions[state] = self.version
        return state

    def _refuse_other(self, state: State) -> None:
        super()._refuse_other(state)
        if _versions.setdefault(state, self.version) != self.version:
            raise StateError(
                "the state was made before the weights of this model changed, and holds what the old ones gave; make "
                "a new one with new_state"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise ModelError("a model that trains cannot be copied: save it with save_pretrained and load it again")


class TrainedAdapter(ParameterModel):
    """A model of which an adapter is trained. `adapter.config` describes it."""

    adapter: Any

    @property
    def version(self) -> int:
        return hash(tuple((tensor._version, tensor.data_ptr()) for tensor in self.parameters()))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, part.storage) for name, part in self.adapter.parts())

    def rebuilt(self) -> Model:
        """The model as its parameters are now: a graph of them serves one backward."""
        return self

    @contextmanager
    def apart(self) -> Iterator[tuple[list[Tensor], Iterator[Model]]]:
        own = [part for _, part in self.adapter.parts()]
        held = [part.storage for part in own]
        leaves = [tensor.detach().requires_grad_() for tensor in held]
        try:
            for part, leaf in zip(own, leaves):
                part.storage = leaf
            yield leaves, iter(self.rebuilt, None)
        finally:
            for part, tensor in zip(own, held):
                part.storage = tensor
            self.rebuilt()


_versions: weakref.WeakKeyDictionary[State, int] = weakref.WeakKeyDictionary()


class TrainableModel(ParameterModel):
    """A model of which every weight is a parameter, under its name in the checkpoint.

    Made by `lmstate.load(..., trainable=True)`. `model(tokens)` gives logits that gradients can follow, and
    `lmstate.training.loss` the loss of long texts.
    """

    def __init__(self, weights: WeightLoader) -> None:
        if weights.kind not in ("auto", "float32", "bfloat16"):
            raise ModelError(
                f"weights={weights.kind!r} with trainable=True was asked for; weights that train are float32 or "
                'bfloat16. To train over quantized ones, load with trainable="lora"'
            )
        kind = "float32" if weights.kind == "auto" else weights.kind
        self._source, self._context_size = weights.source, weights.context_size
        self._leaves = Leaves(weights.source, kind, weights.device)
        built = self.built(self._leaves, torch.float32 if kind == "float32" else torch.bfloat16)
        super().__init__(built.network, built.dtype, built.context_size)
        self._version = self.version

    def built(self, leaves: Leaves, dtype: torch.dtype | None = None) -> Model:
        """The model that is made of leaves: autograd, where it is on, follows what it does with them."""
        from lmstate.models.families import build

        return build(TrainableWeights(self._source, leaves, dtype or self.dtype, self._context_size))

    @property
    def version(self) -> int:
        return self._leaves.version

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, leaf) for name, leaf in self._leaves.tensors.items() if leaf.requires_grad)

    @contextmanager
    def apart(self) -> Iterator[tuple[list[Tensor], Iterator[Model]]]:
        leaves = self._leaves.detached()
        parameters = [leaf for leaf in leaves.tensors.values() if leaf.requires_grad]
        yield parameters, iter(lambda: self.built(leaves), None)

    @ordinary_tensors
    def refresh(self) -> None:
        """Build the model again where a gradient is to follow, or where its weights have changed."""
        if torch.is_grad_enabled() or self._version != self.version:
            self.network, self._fingerprint = self.built(self._leaves).network, None
            self._version = self.version

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model as a checkpoint directory, which `lmstate.load` and transformers load.

        Tensors have the dtype that they are trained in. Parts of its checkpoint that the model does not use (a vision
        tower, say) are copied. Raises `OSError`.
        """
        from lmstate.checkpoints.saving import save_checkpoint, without_quantization

        tied = ("lm_head.weight",) if self.head is self.embed else ()
        source, leaves = self._leaves.source, self._leaves.tensors
        others = sorted(source.names() - {*leaves, *tied})
        tensors = itertools.chain(leaves.items(), ((name, floats(source.read(name))) for name in others))
        config = without_quantization(source.config)
        config.pop("torch_dtype", None)
        config["dtype"] = max((dtype_name(leaf.dtype) for leaf in leaves.values()), key=WIDTHS.index)
        save_checkpoint(folder, source, tensors, config)
