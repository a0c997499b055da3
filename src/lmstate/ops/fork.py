"""One thread in forked children: OpenMP's threads do not survive a fork, and a child that waits for them hangs."""

from __future__ import annotations

import os

import torch

_forked = False


def forked() -> bool:
    """Whether this process is a fork of one that had loaded lmstate."""
    return _forked


def _after_fork() -> None:
    global _forked
    _forked = True
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # where there is a fork
    os.register_at_fork(after_in_child=_after_fork)
