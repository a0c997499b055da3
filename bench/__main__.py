"""`python -m bench`: our own numbers, quick. `python -m bench compare`: beside the peers that are installed.

With transformers installed, `compare` also times the hybrids of `bench.hybrids` beside it, on random weights. OpenVINO
and vLLM take folders: `optimum-cli export openvino -m FOLDER --task text-generation-with-past --weight-format int4
--group-size 32 --ratio 1.0 OUT` writes the one, transformers' `save_pretrained` the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bench import hybrids, record
from bench.compare import CASES, QUICK, Peer, compare, markdown, plot, start

KINDS = ("int4", "int4/16", "int8", "bfloat16", "float32")


def has(python: str, module: str) -> bool:
    found = subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False)
    return found.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("own", "compare"), default="own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", action="append", help="only cases whose name has this in it; may be repeated")
    parser.add_argument("--engine", action="append", help="only engines whose name begins with this; may be repeated")
    parser.add_argument(
        "--llama-python", default=sys.executable, help="a python that has llama-cpp-python (its own environment, say)"
    )
    for name in ("openvino", "vllm"):
        parser.add_argument(
            f"--{name}-python", nargs=2, metavar=("PYTHON", "FOLDER"), help=f"a python that has {name}, and its model"
        )
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for the JSON and the chart")
    parser.add_argument(
        "--record", action="store_true", help="store the result in bench/results, for docs/performance.md"
    )
    options = parser.parse_args()

    from lmstate.checkpoints.hub import resolve

    path = str(resolve("smollm2"))
    engines = {f"lmstate:{kind}": Peer(sys.executable, path) for kind in KINDS}
    shapes: list[str] = []
    if options.what == "compare":
        if has(sys.executable, "transformers"):
            shapes = [name for name in hybrids.SHAPES if any(part in name for part in options.case or [""])]
            engines |= {f"transformers:{kind}": Peer(sys.executable, path) for kind in ("bfloat16", "float32")}
        if has(options.llama_python, "llama_cpp"):
            engines["llama.cpp"] = Peer(options.llama_python, path)
        if options.openvino_python:
            engines["openvino"] = Peer(*options.openvino_python)
        if options.vllm_python:
            engines["vllm:bfloat16"] = Peer(*options.vllm_python)
    if options.engine:
        known = ", ".join(engines)
        engines = {name: peer for name, peer in engines.items() if name.startswith(tuple(options.engine))}
        if not engines:
            parser.error(f"--engine {' '.join(options.engine)}: there are {known}")
    cases = CASES if options.what == "compare" else QUICK
    if options.case:
        cases = tuple(case for case in CASES if any(part in case.name for part in options.case))
    result = compare(engines, cases, options.rounds, options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{result['machine']}; medians of {options.rounds} rounds, least and most in brackets\n")
    if cases:
        plot(result, options.out / f"{options.what}.png")
        print(markdown(result))
    if not options.case and not options.engine:
        result["start"] = start(options.rounds)
        print(f"\n`lmstate generate`: first token after {result['start'][0]:.2f} to {result['start'][-1]:.2f} s")
    if shapes:
        import torch

        torch.set_num_threads(options.threads)
        result["hybrids"] = hybrids.run(shapes)
        print("\n" + hybrids.markdown(result["hybrids"]))
    (options.out / f"{options.what}.json").write_text(json.dumps(result, indent=1))
    if options.record:
        print(f"stored in {record.write(result)}; `python -m bench.record` writes the tables of docs/performance.md")


if __name__ == "__main__":
    main()
