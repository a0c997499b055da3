"""Exceptions of lmstate. Each message says what was asked, what is wrong, what to do."""

from __future__ import annotations


class StateError(ValueError):
    """An operation on a state that cannot be done. The state is as it was before the call."""


class CapacityError(StateError):
    """The tokens do not fit: a fixed capacity, or the model's own limit, would be passed."""


class PendingError(StateError):
    """Tokens await a verdict (`commit` or `discard`), or a verdict was given where none was awaited."""


class RewindError(StateError):
    """A position that does not exist in the row."""


class SnapshotError(StateError):
    """A snapshot that is damaged, of another model, or does not fit the state."""


class EmbeddingsGone(StateError):
    """A picture has to be read again, and its embeddings were let go."""


class UnsupportedError(StateError):
    """An operation that some layer of this model has no exact way to do."""


class ModelError(ValueError):
    """A checkpoint or config that lmstate cannot run: damaged, incomplete, or of an unsupported family."""


class GrammarError(ValueError):
    """A JSON schema, pattern or grammar that is wrong, unsupported or too large. `param`: the name it was given by,
    if it is known."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[type[GrammarError], tuple[str, str | None]]:
        return GrammarError, (str(self), self.param)


class RanksError(RuntimeError):
    """A process of a model over several processes ended, failed, or did not answer in time. The model is lost."""
