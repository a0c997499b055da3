"""Check a commit subject: `area: imperative`, at most 72 characters. Usage: commit_subject.py FILE."""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72


def wrong(subject: str) -> str:
    """What is wrong with a subject; empty if nothing is."""
    if len(subject) > LONGEST:
        return f"the subject has {len(subject)} characters; at most {LONGEST} fit"
    if not re.match(r"[a-z0-9_./-]+: [a-z]", subject):
        return "the subject must be `area: imperative`, such as `engine: bound inter-token latency`"
    return ""


if __name__ == "__main__":
    if found := wrong(Path(sys.argv[1]).read_text(encoding="utf-8").partition("\n")[0]):
        sys.exit(found)
