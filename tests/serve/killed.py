"""`lmstate` as a process that kills itself: `python -m tests.serve.killed PHASE CALL serve ...`.

PHASE is one of `PHASES`; the process ends at the CALL-th time that it comes to it, as by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from lmstate.engine import Engine, reuse
from lmstate.engine.conversations import Conversations
from lmstate.engine.scheduler import Scheduler
from lmstate.engine.session import Session
from lmstate.engine.tiers import fetch, records
from lmstate.engine.tiers.folder import FolderTier
from lmstate.engine.tiers.sqlite_records import SqliteRecords

# Where a turn is: before (False) or after (True) a call.
PHASES: dict[str, tuple[type, str, bool]] = {
    "queued": (Engine, "submit", True),
    "computed": (Scheduler, "_compute", True),
    "ended": (Conversations, "ended", False),
    "record next": (SqliteRecords, "commit", False),
    "record in its transaction": (SqliteRecords, "_note_uses", False),
    "record stored": (SqliteRecords, "commit", True),
    "told": (Session, "adopt", True),
    "items next": (SqliteRecords, "put_values", False),
    "items stored": (SqliteRecords, "put_values", True),
    "entry next": (FolderTier, "write", False),
    "entry stored": (FolderTier, "write", True),
}


def kill_at(phase: str, call: int) -> None:
    owner, name, after = PHASES[phase]
    real, left = getattr(owner, name), [call]

    def run(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if not left[0] and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **named)
        if left[0] <= 0 and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, run)


if __name__ == "__main__":
    reuse.LEAST_PATIENCE = fetch.ASKING_SECONDS = records.COMMIT_SECONDS = 600.0  # however slow the machine is
    kill_at(sys.argv[1], int(sys.argv[2]))
    sys.argv[1:] = sys.argv[3:]
    from lmstate.cli import main

    main()
