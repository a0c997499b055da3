"""Side by side with peers on the same file: every engine in its own process, one round after another."""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from bench.limits import bandwidth

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Case:
    name: str
    case: str  # prefill or decode
    at: int  # tokens of the prompt
    tokens: int = 32
    rows: int = 1

    @property
    def work(self) -> int:
        """Tokens that one run processes."""
        return self.at if self.case == "prefill" else self.tokens * self.rows


CASES = (
    Case("prefill 512", "prefill", 512),
    Case("prefill 4,096", "prefill", 4096),
    Case("decode near 128", "decode", 128),
    Case("decode near 512", "decode", 512),
    Case("decode near 3,500", "decode", 3500),
    Case("decode, 8 ragged rows near 512", "decode", 512, tokens=16, rows=8),
)
QUICK = tuple(case for case in CASES if case.at <= 512)


class Crashed(RuntimeError):
    """An engine's process ended, or answered what is no answer."""


class Process:
    """A worker that has its model loaded. `failure`: why it answers no more; None while it does."""

    def __init__(self, engine: str, python: str, path: str, threads: int) -> None:
        self.engine = engine
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [python, str(WORKER), engine, path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self.failure: str | None = None
        self.version = "not loaded"
        try:
            self.version = self._answer()["version"]
        except Crashed as crashed:
            self.failure = str(crashed)

    def time(self, case: Case) -> dict[str, float] | None:
        """Seconds and bytes of one run, as `worker` answers; None if the engine cannot do the case, or has crashed."""
        if self.failure is not None:
            return None
        assert self.process.stdin is not None
        asked = {"case": case.case, "at": case.at, "tokens": case.tokens, "rows": case.rows}
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            answer = self._answer()
        except (Crashed, OSError) as error:
            self.failure = f"{case.name}: {error}"
            return None
        return None if "refused" in answer else answer

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Crashed(f"ended with exit code {self.process.wait()}")
        try:
            return json.loads(line)
        except ValueError as error:
            raise Crashed(f"answered {line[:80]!r}") from error


@dataclass(frozen=True)
class Peer:
    """An engine of `worker.py`: the python that has it, and the file or folder that it opens."""

    python: str
    path: str


@contextmanager
def process(engine: str, peer: Peer, threads: int) -> Iterator[Process]:
    worker = Process(engine, peer.python, peer.path, threads)
    try:
        yield worker
    finally:
        with suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)  # with the processes that it started, as vLLM does
        worker.process.wait()


def compare(engines: dict[str, Peer], cases: tuple[Case, ...] = CASES, rounds: int = 5, threads: int = 2) -> dict:
    """Time every case on every engine, round by round, alternating.

    Returns the machine, the versions, and for each case and engine the median and the extremes of tokens a second, the
    process's peak bytes so far, and where a step's bytes are known which share of the bandwidth between the rounds it
    reached. An engine that crashes is left out from there on: its rows are `crashed`, and `failures` says why.
    """
    rows = []
    with ExitStack() as stack:
        workers = [stack.enter_context(process(name, peer, threads)) for name, peer in engines.items()]
        for case in cases:
            times: dict[str, list[float]] = {worker.engine: [] for worker in workers}
            crashed = {worker.engine for worker in workers if worker.failure is not None}
            peaks: dict[str, float] = {}
            reads: dict[str, float] = {}
            speeds = []
            for number in range(rounds + 1):
                for worker in workers:
                    answer = worker.time(case)
                    if answer is not None and number:  # the first round warms up
                        times[worker.engine].append(case.work / answer["seconds"])
                        peaks[worker.engine], reads[worker.engine] = answer["peak"], answer["reads"]
                if case.case == "decode":
                    speeds.append(bandwidth(threads))
                print(f"\r{case.name}: round {number} of {rounds}", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            crashed |= {worker.engine for worker in workers if worker.failure is not None}
            for engine in crashed:  # rates of a part of the rounds are not comparable
                times[engine] = []
                rows.append({"case": case.name, "engine": engine, "crashed": True})
            for engine, rates in times.items():
                if rates:
                    rows.append(
                        {
                            "case": case.name,
                            "engine": engine,
                            "median": statistics.median(rates),
                            "least": min(rates),
                            "most": max(rates),
                            "peak": peaks[engine],
                            "reads": reads[engine],
                            "share": share(case, reads[engine], statistics.median(rates), speeds),
                        }
                    )
        versions = {worker.engine: worker.version for worker in workers}
        failures = {worker.engine: worker.failure for worker in workers if worker.failure is not None}
    return {"machine": machine(threads), "versions": versions, "rounds": rounds, "rows": rows, "failures": failures}


def share(case: Case, reads: float, rate: float, speeds: list[float]) -> float | None:
    """Which part of the bandwidth (bytes a second, some measurements) so many tokens a second use; None: not known."""
    return reads * rate / case.rows / statistics.median(speeds) if reads else None


def start(rounds: int = 3) -> list[float]:
    """Seconds from a command to its first token, once the model is in the cache: of each round, the least first."""
    command = [str(Path(sys.executable).with_name("lmstate")), "generate", "smollm2", "Hello", "--max-tokens", "1"]
    times = []
    for _ in range(rounds + 1):
        begin = perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as shown:
            assert shown.stdout is not None
            if not shown.stdout.read(1):
                raise RuntimeError(f"{' '.join(command)} said nothing")
            times.append(perf_counter() - begin)
    return sorted(times[1:])


def machine(threads: int) -> str:
    """The processor and the threads used, in words."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), name)
        flags = next((line for line in lines if line.startswith("flags")), "").split()
        name += "".join(f", {flag}" for flag in ("avx2", "avx512_vnni", "avx512_bf16", "amx_bf16") if flag in flags)
    return f"{name}; {threads} threads"


def markdown(result: dict) -> str:
    """Tokens a second: a row a case, a column an engine, each the median of the rounds with the extremes.

    Then what it took: the peak of each engine's process over all cases, and how near to the bandwidth decoding came.
    """
    engines = list(result["versions"])
    lines = [
        "| tokens/s | " + " | ".join(f"{name} ({result['versions'][name]})" for name in engines) + " |",
        "|---|" + "---|" * len(engines),
    ]
    for case in dict.fromkeys(row["case"] for row in result["rows"]):
        cells = []
        for engine in engines:
            found = [row for row in result["rows"] if (row["case"], row["engine"]) == (case, engine)]
            cells.append(cell(found[0]) if found else "")
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    timed = [row for row in result["rows"] if not row.get("crashed")]
    peaks = {row["engine"]: f"{row['peak'] / 2**20:.0f}" for row in timed}  # of the last case: they only grow
    lines.append("| peak memory, MiB | " + " | ".join(peaks.get(engine, "") for engine in engines) + " |")
    shares = [row for row in timed if row["share"]]
    if shares:
        lines += ["", "| | a step reads, MB | of the bandwidth |", "|---|---|---|"]
        lines += [
            f"| {row['case']}, {row['engine']} | {row['reads'] / 1e6:.0f} | {row['share']:.0%} |" for row in shares
        ]
    lines += [f"\n{engine} crashed: {why}." for engine, why in result["failures"].items()]
    return "\n".join(lines)


def cell(row: dict) -> str:
    """The median and the extremes of a case and engine, or that it crashed."""
    if row.get("crashed"):
        return "crashed"
    return f"{row['median']:.0f} ({row['least']:.0f}-{row['most']:.0f})"


def plot(result: dict, path: Path) -> None:
    """Bars of tokens a second, a group a case, with the extremes as whiskers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    engines = list(result["versions"])
    cases = list(dict.fromkeys(row["case"] for row in result["rows"]))
    figure, axes = pyplot.subplots(1, len(cases), figsize=(2.6 * len(cases), 3.6), constrained_layout=True)
    for axis, case in zip([axes] if len(cases) == 1 else axes, cases):
        for index, engine in enumerate(engines):
            for row in result["rows"]:
                if (row["case"], row["engine"]) == (case, engine) and not row.get("crashed"):
                    spread = [[row["median"] - row["least"]], [row["most"] - row["median"]]]
                    axis.bar(index, row["median"], yerr=spread, color=f"C{index}", label=engine)
        axis.set_title(case, fontsize=9)
        axis.set_xticks([])
        axis.spines[["top", "right"]].set_visible(False)
    handles = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"Tokens a second, SmolLM2-135M Q4_1; {result['machine']}", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
