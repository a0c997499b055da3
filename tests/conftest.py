"""What every test shares: one thread, since the models are small and the suite runs in several processes."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--interleavings", type=int, default=200, help="random interleavings of each layer kind")
