"""`lmstate.load`: from a name to a model that runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch

from lmstate.checkpoints.placement import DevicePlacement, Devices
from lmstate.errors import ModelError
from lmstate.models.model import Model
from lmstate.state.validate import whole_number

if TYPE_CHECKING:
    from lmstate.distributed.ranks import Ranks
    from lmstate.training.adapter_config import AdapterConfig
    from lmstate.training.lora import LoraConfig
    from lmstate.training.network_adapter import NetworkConfig
    from lmstate.vision.mmproj import Mmproj


def load(
    name: str | os.PathLike[str],
    weights: str = "auto",
    dtype: torch.dtype | None = None,
    device: Devices | None = None,
    trainable: bool | Literal["lora", "adapter"] | AdapterConfig | NetworkConfig = False,
    lora: LoraConfig | None = None,
    adapter: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None = None,
    merge: bool = False,
    heads: bool | str | os.PathLike[str] = False,
    activations: Literal["auto", 8, 16] = "auto",
    context_size: int | None = None,
    parallel: int = 1,
    parallel_timeout: float = 60.0,
    parallel_mode: Literal["exact", "sum"] = "exact",
    mmproj: str | os.PathLike[str] | None = None,
) -> Model:
    """Load a model by alias ("smollm2"), directory, `.gguf` file or Hub id ("organization/name@revision").

    weights: storage of the matrices, "auto", "int4" (embeddings, heads, matrices that a file holds in more bits and
    those that would lose too much are int8, the last with a `UserWarning`), "int8", "bfloat16" or "float32". "auto"
    keeps the precision of a quantized file, and takes float checkpoints in bfloat16 where the processor multiplies it,
    else in float32.
    dtype: of stored keys and values and of large products; float32 for float32 weights, else bfloat16.
    device: the CPU unless given. Several devices share the model's blocks by bytes (`["cuda:0", "cuda:1"]`) or as given
    (`{"cuda:0": 20, "cpu": 12}`); "auto" fills the GPUs and leaves the rest to the CPU. `{"cuda:0": 20, "offload": 12}`
    keeps the weights of the last 12 blocks in host memory, and brings them to the GPU for each step. See
    docs/devices.md.
    trainable: True for a model of which every weight is a parameter; "lora" for one of which an adapter is, described
    by `lora`, over weights of any storage. A config of `lmstate.training` trains an adapter of its kind, "adapter" the
    one in the folder `adapter`.
    adapter: a folder with an adapter as PEFT saves it, of LoRA, (IA)3, LoHa, LoKr, prompt tuning, prefix tuning or
    adaption prompts. It runs beside the weights, or `merge` puts it into them. Several by name: `model.adapted(name)`
    runs one of them, or one for each row.
    heads: also load the checkpoint's multi-token prediction heads, to draft with (`generate(draft="heads")`; "auto"
    uses them too). Each is one more layer, which every state of the model then keeps and every step runs. Or the path
    or Hub id of a head that was published apart (EAGLE-3, DFlash, Gemma 4's assistants), a folder or a .gguf file.
    activations: bits of the activations that int4 and int8 weights multiply on the CPU, 8 or 16; "auto" is 8 for the
    quantized tensors of a GGUF file, as in llama.cpp, and 16 elsewhere. With 8, prompts are faster and perplexity is
    some tenths of a percent higher; heads keep 16.
    context_size: the most tokens that texts will have. More than the model was made for stretches its positions by YaRN
    (Peng et al. 2023), which costs short texts some quality; less is a limit for the server and the command line.
    parallel: the number of processes that share the weights and the state, on the CPU; each computes a part of every
    product, and the results are the same to the bit. The others are started here, end with the model, and take their
    shares of the threads. Or torchrun has started them, on one machine or several: then this returns in rank 0 alone,
    and the others end with the model by `SystemExit`. See docs/devices.md. parallel_timeout: the seconds after which a
    process that does not answer ends the model with a `RanksError`. parallel_mode: "sum" adds the products of parts of
    the inputs, which exchanges half as often; its bits are others than those of one process, and so are its snapshots
    and stores.
    mmproj: the file of the vision tower of a GGUF model (llama.cpp's `mmproj-....gguf`), by path or Hub id: the model
    takes pictures then. See docs/models.md for the types that are read.
    Raises `ModelError` (a `ValueError`) for a checkpoint that is damaged or not supported, `OSError` for files that are
    missing or cannot be fetched.
    """
    from lmstate.checkpoints.hub import commit_of, resolve
    from lmstate.checkpoints.open import open_checkpoint
    from lmstate.models.families import build

    placement = DevicePlacement.of(device)
    adapted = trainable or lora is not None or adapter is not None or merge
    if heads and adapted:
        raise ModelError("heads do not go with training or adapters: they were made for the model alone")
    if context_size is not None and whole_number(context_size, "context_size") < 1:
        raise ValueError(f"context_size={context_size} was asked for; give 1 token or more")
    own = heads if isinstance(heads, bool) else False
    if (placement.spreads or placement.offloaded) and adapted:
        raise ModelError(
            f"load(device={device!r}) was asked for with training or an adapter, which take one device: name one"
        )
    if whole_number(parallel, "parallel") < 1:
        raise ValueError(f"parallel={parallel} was asked for; give 1 process or more")
    if parallel_mode not in ("exact", "sum"):
        raise ValueError(f"unknown parallel_mode={parallel_mode!r}; expected exact or sum")
    if parallel > 1 and (adapted or mmproj or placement.spreads or placement.devices[0].type != "cpu"):
        raise ModelError(
            f"parallel={parallel} was asked for with training, adapters, mmproj or a device: a model over "
            "several processes has none of these, and is on the CPU"
        )
    tower = None if mmproj is None else _tower(mmproj)  # before a model is loaded for nothing
    with _ranks(parallel, parallel_timeout) as ranks:
        opened, tokenizer, defaults = open_checkpoint(
            name, weights, dtype, placement, heads=own, activations=activations, context_size=context_size
        )
        drafter = None if isinstance(heads, bool) else (resolve(heads), weights)
        if adapted:
            from lmstate.training import open_model

            model = open_model(opened, trainable, lora, adapter, merge)
        elif ranks is not None:
            from lmstate.distributed.open import open_parallel

            model = open_parallel(opened, ranks(), parallel_mode, drafter)
        else:
            model = build(opened)
    if drafter is not None and ranks is None:
        from lmstate.models.heads.published import with_head_at

        model = with_head_at(model, *drafter)
    model.name = str(name)
    model.defaults = defaults
    model.notes = (*opened.source.notes, *opened.source.conversions)
    model.commit = commit_of(opened.source.path)
    model.folder = opened.source.path if opened.source.path.is_dir() else None
    model._tokenizer = tokenizer
    if tower is not None:
        _check_beside(model, tower)
        model.mmproj = tower
    eos = defaults.get("eos_token_id")
    model.eos_ids = frozenset(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos])
    return model


def _tower(name: str | os.PathLike[str]) -> Mmproj:
    from lmstate.checkpoints.hub import resolve
    from lmstate.vision.mmproj import Mmproj

    return Mmproj.open(resolve(name))


def _check_beside(model: Model, tower: Mmproj) -> None:
    """Raise `ModelError` where the file of a vision tower does not go with a model."""
    if model.folder is not None:
        raise ModelError(f"mmproj={str(tower.path)!r} goes with a .gguf model; that of a folder is in the folder")
    if not model.has_tokenizer:
        raise ModelError(
            f"mmproj={str(tower.path)!r} was asked for, and the model has no tokenizer, which pictures need"
        )
    network = model.network
    tower.check(network.config.hidden_size, len(network.blocks), network.has_axes, model.tokenizer)


def _ranks(parallel: int, timeout: float) -> AbstractContextManager[Callable[[], Ranks] | None]:
    """A function that gives the other processes that compute the model, if there are to be some."""
    if parallel == 1:
        return nullcontext()
    from lmstate.distributed.given import ranks_of

    return ranks_of(parallel, timeout)
