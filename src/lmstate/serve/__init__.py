"""The server: the protocols that clients speak, over an exact engine.

    app = lmstate.serve.create_app(engine, lmstate.serve.Settings("smollm2"))

Needs the extra `lmstate[serve]`.
"""

from __future__ import annotations

from lmstate.serve.answer.pool import ModelPool, ModelSource
from lmstate.serve.app import create_app
from lmstate.serve.run import make_server
from lmstate.serve.settings import Settings, read_keys

__all__ = ["ModelPool", "ModelSource", "Settings", "create_app", "make_server", "read_keys"]
