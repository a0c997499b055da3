"""The loop of a fine-tuning: AdamW over batches of documents, with checkpoints that go on to the bit."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lmstate.errors import ModelError
from lmstate.files.atomic import sync_folder
from lmstate.files.json_object import read_object
from lmstate.files.safetensors import TensorFile
from lmstate.files.writing import save_tensors, write_json, write_text
from lmstate.training.documents import Document, batches
from lmstate.training.model import ParameterModel, TrainedAdapter
from lmstate.training.next_token import loss

CHECKPOINT, OLD = "checkpoint", "checkpoint.old"
LOG = "log.jsonl"


@dataclass(frozen=True)
class FinetuneSettings:
    """Training settings. Changed ones are refused when a training is resumed."""

    steps: int
    rate: float = 2e-4
    warmup: int = 0  # steps in which the rate rises from 0; then it falls as a cosine, to 0 after the last
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0  # of the norm of all gradients; 0: none
    batch_tokens: int = 4096
    accumulate: int = 1  # batches of a step
    chunk: int = 512
    checkpoint_layers: bool = False
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, from 0 on."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


@dataclass(frozen=True)
class TrainingReport:
    """A step that was made."""

    step: int  # from 1 on
    loss: float  # the mean over the tokens that it learned
    rate: float
    norm: float  # of the gradients, before they were clipped
    tokens: int  # that it read
    evaluated: float | None = None  # the loss on what is not trained on


class FineTuning:
    """A training of `model` on `documents`, whose checkpoints, log and result are in `folder`.

    `run` makes the steps that are still to make. Where `resume` is set and the folder has a checkpoint, these begin
    after it, and give the same bits as if there had been no interruption. Raises `ModelError` for a folder with a
    checkpoint that is not to be resumed, or that is of other settings, documents or parameters.
    """

    def __init__(
        self,
        model: ParameterModel,
        documents: Sequence[Document],
        settings: FinetuneSettings,
        folder: Path,
        evaluated: Sequence[Document] = (),
        resume: bool = False,
    ) -> None:
        self.model, self.documents, self.settings = model, documents, settings
        self.folder, self.evaluated = folder, evaluated
        self.parameters = dict(model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()), lr=settings.rate, betas=settings.betas, weight_decay=settings.weight_decay
        )
        self.step = 0
        adapter = asdict(model.adapter.config) if isinstance(model, TrainedAdapter) else None
        self._origin = json.loads(
            json.dumps({"settings": asdict(settings), "adapter": adapter, "documents": _digest(documents)})
        )
        limit = None if model.max_positions is None else model.max_positions - model.opening_length
        longest = max((len(document.tokens) for document in (*documents, *evaluated)), default=0)
        if limit is not None and longest > limit:
            raise ModelError(
                f"a document has {longest} tokens; the model has learned {limit} positions and knows no others: cut it"
            )
        folder.mkdir(parents=True, exist_ok=True)
        refuse_begun(folder, resume)
        if (folder / OLD).is_dir() and not (folder / CHECKPOINT).is_dir():
            (folder / OLD).rename(folder / CHECKPOINT)  # it was ended between the two moves of `save`
        if (folder / CHECKPOINT).is_dir():
            self._restore(folder / CHECKPOINT)
            self._cut_log()
        elif (folder / LOG).exists():
            (folder / LOG).unlink()

    def run(
        self,
        report: Callable[[TrainingReport], None] = lambda report: None,
        save_every: int = 0,
        evaluate_every: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Make all steps, with a checkpoint after every `save_every` of them, and save the model.

        Where `stop()` says so after a step, it ends with a checkpoint there. Returns whether all steps were made. With
        each checkpoint comes the adapter as it is then, if one is trained.
        """
        settings, step = self.settings, self.step
        for group in itertools.islice(self._groups(), step, settings.steps):
            made = self._step(group)
            last = self.step == settings.steps
            if self.evaluated and (last or (evaluate_every and self.step % evaluate_every == 0)):
                made = replace(made, evaluated=self.evaluate())
            with open(self.folder / LOG, "a", encoding="utf-8") as log:
                log.write(json.dumps(asdict(made)) + "\n")
            report(made)
            stopped = not last and stop()
            if last or stopped or (save_every and self.step % save_every == 0):
                self.save()
                if isinstance(self.model, TrainedAdapter) and not last:
                    self.model.save_pretrained(self.folder)
            if stopped:
                return False
        self.model.save_pretrained(self.folder)
        return True

    def evaluate(self) -> float:
        """The mean loss on the documents that are not trained on."""
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in batches(self.evaluated, self.settings.batch_tokens, None):
                total += float(self._loss(batch))
                count += sum(document.learned for document in batch)
        return total / count

    def _loss(self, batch: Sequence[Document]) -> Tensor:
        return loss(
            self.model,
            [document.tokens for document in batch],
            chunk=self.settings.chunk,
            reduction="sum",
            labels=[document.labels for document in batch],
            checkpoint=self.settings.checkpoint_layers,
        )

    def _step(self, group: Sequence[Sequence[Document]]) -> TrainingReport:
        settings = self.settings
        count = sum(document.learned for batch in group for document in batch)
        total = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for batch in group:
            part = self._loss(batch) / count
            part.backward()
            total += float(part.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), settings.clip or math.inf)
        if not bool(norm.isfinite()):
            raise ModelError(f"the gradients of step {self.step + 1} are not finite: train with a smaller rate")
        rate = settings.rate_at(self.step)
        for own in self.optimizer.param_groups:
            own["lr"] = rate
        self.optimizer.step()
        self.step += 1
        return TrainingReport(self.step, total, rate, float(norm), sum(len(d.tokens) for batch in group for d in batch))

    def _groups(self) -> Iterator[list[list[Document]]]:
        """The batches of each step, the same ones whenever it is asked."""
        endless = (
            batch
            for epoch in itertools.count()
            for batch in batches(
                self.documents, self.settings.batch_tokens, random.Random(f"{self.settings.seed} {epoch}")
            )
        )
        while True:
            yield list(itertools.islice(endless, self.settings.accumulate))

    # ---- checkpoints

    def save(self) -> None:
        """Put a checkpoint in the place of the one before, whole or not at all. Raises `OSError`."""
        beside = self.folder / f"{CHECKPOINT}.part"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        tensors: dict[str, Tensor] = {f"parameter.{name}": leaf for name, leaf in self.parameters.items()}
        for name, leaf in self.parameters.items():
            for part, value in self.optimizer.state.get(leaf, {}).items():
                tensors[f"{part}.{name}"] = value
        save_tensors(beside / "tensors.safetensors", tensors)
        write_json(beside / "training.json", {"step": self.step, **self._origin})
        target, old = self.folder / CHECKPOINT, self.folder / OLD
        shutil.rmtree(old, ignore_errors=True)
        if target.is_dir():
            target.rename(old)
        beside.rename(target)
        sync_folder(self.folder)  # before the only other one goes
        shutil.rmtree(old, ignore_errors=True)

    def _restore(self, path: Path) -> None:
        held = read_object(path / "training.json")
        for name, own in self._origin.items():
            if (was := held.get(name)) == own:
                continue
            changed = ""
            if isinstance(was, dict) and isinstance(own, dict):
                changed = ", ".join(f"{key} was {was.get(key)!r:.80}" for key in own if was.get(key) != own[key])
            raise ModelError(
                f"{path} is of a training with other {name}{changed and f' ({changed})'}: resume it with those, or "
                "choose another folder"
            )
        step = held.get("step")
        if not isinstance(step, int) or not 0 <= step <= self.settings.steps:
            raise ModelError(f"{path} is damaged: it says that step {step!r:.40} was made")
        file = TensorFile(path / "tensors.safetensors")
        with torch.no_grad():
            for name, leaf in self.parameters.items():
                leaf.copy_(_read(file, f"parameter.{name}", leaf.shape))
                if f"exp_avg.{name}" in file.entries:
                    self.optimizer.state[leaf] = {
                        "step": _read(file, f"step.{name}", torch.Size()).clone(),
                        "exp_avg": _read(file, f"exp_avg.{name}", leaf.shape).clone(),
                        "exp_avg_sq": _read(file, f"exp_avg_sq.{name}", leaf.shape).clone(),
                    }
        self.step = step

    def _cut_log(self) -> None:
        """Forget the reports of steps after the checkpoint, which are made again."""
        log = self.folder / LOG
        if log.exists():
            lines = log.read_text("utf-8", errors="replace").splitlines(True)
            whole = [line for line in lines if line.endswith("\n")]  # the last may have been cut by a kill
            kept = [line for line in whole if json.loads(line)["step"] <= self.step]
            write_text(log, "".join(kept))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a folder to one training while entered. Raises `ModelError` if another one, of any process, is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(
                f"another training writes to {folder}: wait for its end, or choose another folder"
            ) from None
        yield
    finally:
        os.close(handle)


def refuse_begun(folder: Path, resume: bool) -> None:
    """Raise `ModelError` for a folder with a checkpoint that is not to be resumed."""
    if not resume and any((folder / name).is_dir() for name in (CHECKPOINT, OLD)):
        raise ModelError(f"{folder} holds a training already: resume it, or choose another folder")


def refuse_used(folder: Path) -> None:
    """Raise `ModelError` for a folder that holds anything."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ModelError(
            f"{folder} is not empty: choose another folder, or --force to write among what it holds, or --resume to go "
            "on with a training in it"
        )


def _read(file: TensorFile, name: str, shape: torch.Size) -> Tensor:
    if name not in file.entries or file.entries[name].shape != tuple(shape):
        raise ModelError(f"{file.path} is of another model: it lacks {name[:80]!r} of the shape {list(shape)}")
    return file.tensor(name)


def _digest(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        for ids in (document.tokens, document.labels):
            digest.update(struct.pack(f"<q{len(ids)}q", len(ids), *ids))
    return digest.hexdigest()


def plot(log: Path, image: Path) -> None:
    """Draw the losses of a log. Raises `ImportError` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reports = [TrainingReport(**json.loads(line)) for line in log.read_text("utf-8").splitlines()]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot([each.step for each in reports], [each.loss for each in reports], label="training")
    seen = [(each.step, each.evaluated) for each in reports if each.evaluated is not None]
    if seen:
        axes.plot(*zip(*seen), marker="o", label="evaluation")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)
