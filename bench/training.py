"""Memory and seconds of a training step over lengths and chunks, `python -m bench.training [--lengths ...]`.

The loss of SmolLM2 (float32, every weight) on random tokens, and its backward, each in a process of its own. Beside it
`transformers` on the same weights with gradient checkpointing, if it is installed. `--json PATH` keeps the rows there:
those that it has already are not measured again. `--plot PATH` draws memory and seconds against the length.

Beside the peak stands what of it is not the state: keys and values, hidden states, and the gradients of both, which
are all that grows with the text. `--layers N` takes the first layers alone, for long texts in short time:
`python -m bench.training --lengths 32000 --chunks 512 --layers 6 --peer none`. No process gets more memory than
`--memory`: what would need more ends with an error, which is what the table then says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from lmstate.engine.options import as_bytes

LENGTHS = (1000, 4000, 16000, 32000)
CHUNKS = (256, 512, 1024, 2048)

LIMITED = """
import resource, sys, time
clock = getattr(time, sys.argv[6])
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[5]), int(sys.argv[5])))
"""
OURS = """
import torch, lmstate
from lmstate.training import loss
torch.manual_seed(0)
torch.set_num_threads(int(sys.argv[4]))
model = lmstate.load(sys.argv[1], weights="float32", trainable=True)
ids = [torch.randint(5, 40000, (int(sys.argv[2]),)).tolist()]
loss(model, [ids[0][:64]], chunk=64).backward()
began = clock()
value = loss(model, ids, chunk=int(sys.argv[3]))
value.backward()
seconds = clock() - began
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, float(value.detach()))
"""
THEIRS = """
import torch, transformers
from pathlib import Path
torch.manual_seed(0)
torch.set_num_threads(int(sys.argv[4]))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).train()
model.gradient_checkpointing_enable({"use_reentrant": False})
model.config.use_cache = False
ids = torch.randint(5, 40000, (int(sys.argv[2]),))[None]
model(ids[:, :64], labels=ids[:, :64]).loss.backward()
began = clock()
value = model(ids, labels=ids).loss
value.backward()
seconds = clock() - began
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, float(value.detach()))
"""


def measured(program: str, folder: Path, length: int, chunk: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, peak bytes and the loss of one run; what it died of instead, if it did."""
    numbers = length, chunk, options.threads, as_bytes(options.memory)
    clock = "process_time" if options.processor_time else "perf_counter"
    command = [sys.executable, "-c", LIMITED + program, str(folder), *map(str, numbers), clock]
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=options.timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {options.timeout:.0f} s"}
    if ran.returncode:
        reason = (ran.stderr.strip().splitlines() or [f"signal {-ran.returncode}"])[-1]
        return {"failed": reason[:200]}
    seconds, peak, value = map(float, ran.stdout.split()[-3:])
    return {"seconds": seconds, "peak": peak, "loss": value}


def state_bytes(folder: Path, length: int) -> int:
    """Keys and values, hidden states, and the gradients of both, in float32."""
    config = json.loads((folder / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    cached = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
    return 2 * (cached + config["hidden_size"]) * 4 * length


def saved(folder: Path, layers: int | None) -> Path:
    """SmolLM2 in float32, or its first layers, in a folder of its own: the same numbers for both libraries."""
    if not (folder / "config.json").exists():
        import lmstate
        from lmstate.training import TrainableModel

        model = lmstate.load("smollm2", weights="float32", trainable=True)
        assert isinstance(model, TrainableModel)
        model.save_pretrained(folder)
    if layers is None:
        return folder
    cut = folder.with_name(f"{folder.name}-{layers}-layers")
    if not (cut / "config.json").exists():
        from safetensors.torch import load_file, save_file

        cut.mkdir(exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < layers}
        save_file(kept, cut / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
        (cut / "config.json").write_text(json.dumps(config))
    return cut


def _layer(name: str) -> int:
    """The number of the layer that a tensor belongs to, -1 for those outside of layers."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return -1 if match is None else int(match[1])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for name in dict.fromkeys(row["name"] for row in rows):
        own = sorted((row for row in rows if row["name"] == name and "seconds" in row), key=lambda row: row["length"])
        lengths = [row["length"] for row in own]
        axes[0].plot(lengths, [row["peak"] / 2**30 for row in own], marker="o", label=name)
        axes[1].plot(lengths, [1000 * row["seconds"] / row["length"] for row in own], marker="o", label=name)
    axes[0].set(xlabel="tokens", ylabel="peak memory (GiB)")
    axes[1].set(xlabel="tokens", ylabel="milliseconds a token")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNKS)
    parser.add_argument("--layers", type=int, help="the first layers alone; by default all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--processor-time", action="store_true", help="measure that, of one thread: for a machine that others use too"
    )
    parser.add_argument("--peer", choices=("transformers", "none"), default="transformers")
    parser.add_argument("--memory", default="20GiB", help="the most that a process may allocate")
    parser.add_argument("--timeout", type=float, default=4 * 3600.0, help="seconds after which a run is given up")
    parser.add_argument("--json", type=Path, default=Path("build/bench/training.json"))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.processor_time:
        options.threads = 1
    rows: list[dict[str, Any]] = json.loads(options.json.read_text()) if options.json.exists() else []
    options.json.parent.mkdir(parents=True, exist_ok=True)
    folder = saved(options.json.parent.resolve() / "smollm2-float32", options.layers)
    of = "" if options.layers is None else f" ({options.layers} layers)"
    engines = [(f"lmstate, chunks of {chunk}{of}", OURS, chunk) for chunk in options.chunks]
    if options.peer == "transformers":
        engines.append((f"transformers, gradient checkpointing{of}", THEIRS, 0))
    print("| | tokens | seconds | ms a token | peak GiB | less the state | loss |\n|---|---|---|---|---|---|---|")
    for length in options.lengths:
        for name, program, chunk in engines:  # engines alternate, so that a slow hour is everybody's
            if any(row["name"] == name and row["length"] == length for row in rows):
                continue
            row = {"name": name, "length": length, **measured(program, folder, length, chunk, options)}
            rows.append(row)
            options.json.write_text(json.dumps(rows, indent=1))
            if "failed" in row:
                print(f"| {name} | {length} | {row['failed']} | | | | |", flush=True)
                continue
            each = 1000 * row["seconds"] / length
            rest = f"{(row['peak'] - state_bytes(folder, length)) / 2**30:.2f}" if program is OURS else ""
            print(
                f"| {name} | {length} | {row['seconds']:.1f} | {each:.2f} | {row['peak'] / 2**30:.2f} | {rest} | "
                f"{row['loss']:.4f} |",
                flush=True,
            )
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
