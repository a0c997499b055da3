"""A process that compiles grammars before the server does, within limits: run as a script, it imports no more than it
needs. Lines of JSON come in, the tokenizer first; each grammar gets a line for an answer, or the end of the process.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any


def main() -> None:
    memory, seconds = int(sys.argv[1]), int(sys.argv[2])
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    given = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(given["tokenizer"], n_vocab=given["vocab"], eos_token=given["ends"] or None)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (used_memory() + memory,) * 2)
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        until = int(used.ru_utime + used.ru_stime) + 1 + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        limits = LLParserLimits(**given["limits"])
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(json.loads(line)), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        answer: dict[str, Any] = {"error": matcher.get_error() if matcher.is_error() else None}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def used_memory() -> int:
    """Bytes of address space that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
