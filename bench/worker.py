"""One engine in a process of its own: it loads SmolLM2 once, then times what it is asked for, a line of JSON each.

`python worker.py ENGINE PATH` with ENGINE one of lmstate:int4, lmstate:int4/16, lmstate:int8, lmstate:bfloat16,
lmstate:float32, transformers:bfloat16, transformers:float32, llama.cpp, whose PATH is the GGUF file, and openvino and
vllm:bfloat16, whose PATH is a folder. Reads a line of {"case": ..., "at": ..., "tokens": ..., "rows": ...} and answers
{"seconds": ..., "peak": bytes}. It imports nothing of lmstate unless that is the engine, so that a peer may live in
another environment.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

LONGEST = 4352


class Engine(Protocol):
    version: str
    reads: int  # bytes that a step of what was decoded last reads at least; 0: not known

    def prefill(self, ids: list[int]) -> Callable[[], float | None]:
        """What feeds `ids` to an empty state when called. It returns the seconds, or None: the call is what counts."""
        ...

    def decode(self, ids: list[int], tokens: int, rows: int) -> Callable[[], float | None]:
        """What decodes `tokens` one by one after `ids` when called, again and again from the same place. As above."""
        ...


class Ours:
    def __init__(self, weights: str, path: str) -> None:
        import lmstate

        kind, _, bits = weights.partition("/")  # "int4/16": of its activations
        self.model = lmstate.load(
            path, weights="auto" if kind == "int4" else kind, activations=int(bits) if bits else "auto"
        )
        self.version = lmstate.__version__
        self.reads = 0

    def prefill(self, ids: list[int]) -> Callable[[], None]:
        def run() -> None:
            self.model([ids], self.model.new_state())

        return run

    def decode(self, ids: list[int], tokens: int, rows: int) -> Callable[[], None]:
        from limits import step_bytes  # it lies beside this file
        from lmstate.generation.sampling import Sampler, TokenPicker

        # Ragged: every row is a little shorter than the one before.
        prompts = [ids[row * 3 :] for row in range(rows)]
        state = self.model.new_state(rows, rewind=tokens)
        self.model(prompts, state)
        self.reads = step_bytes(self.model, state)
        picker = TokenPicker(Sampler(), rows)

        def run() -> None:
            step = [[7]] * rows
            for _ in range(tokens):
                logits = self.model(step, state)
                step = [[token] for token in picker.pick(logits, range(rows))]
            for row, prompt in enumerate(prompts):
                state.rewind(row, len(prompt))

        return run


class Transformers:
    reads = 0

    def __init__(self, dtype: str, path: str) -> None:
        import torch
        import transformers

        folder, name = os.path.split(path)
        self.torch = torch
        # The file's shapes with random numbers: what they are changes no speed, and reading them takes long.
        config = transformers.AutoConfig.from_pretrained(folder, gguf_file=name)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        self.cache = transformers.DynamicCache
        self.version = transformers.__version__

    def _run(self, ids: list[list[int]], cache: Any) -> Any:
        with self.torch.inference_mode():
            return self.model(self.torch.tensor(ids), past_key_values=cache, logits_to_keep=1).logits[:, -1]

    def prefill(self, ids: list[int]) -> Callable[[], None]:
        def run() -> None:
            self._run([ids], self.cache())

        return run

    def decode(self, ids: list[int], tokens: int, rows: int) -> Callable[[], None]:
        cache = self.cache()
        self._run([ids] * rows, cache)

        def run() -> None:
            step = [[7]] * rows
            for _ in range(tokens):
                step = self._run(step, cache).argmax(-1, keepdim=True).tolist()
            cache.crop(-tokens)

        return run


class LlamaCpp:
    reads = 0

    def __init__(self, path: str) -> None:
        import llama_cpp
        import numpy

        self.model = llama_cpp.Llama(path, n_ctx=LONGEST, n_batch=512, n_threads=2, n_threads_batch=2, verbose=False)
        self.version = llama_cpp.__version__
        self.argmax = numpy.argmax

    def prefill(self, ids: list[int]) -> Callable[[], None]:
        def run() -> None:
            self.model.reset()
            self.model.eval(ids)

        return run

    def decode(self, ids: list[int], tokens: int, rows: int) -> Callable[[], None]:
        if rows != 1:
            raise ValueError("llama-cpp-python decodes one row at a time")
        self.model.reset()
        self.model.eval(ids)
        scores = self.model._ctx.get_logits

        def run() -> None:
            self.model.n_tokens = len(ids)  # eval removes what lies after it
            step = 7
            for _ in range(tokens):
                self.model.eval([step])
                step = int(self.argmax(scores()[: self.model.n_vocab()]))

        return run


class OpenVino:
    """A folder that `optimum-cli export openvino` wrote; prefixes are not kept, so that a prompt is read each time."""

    reads = 0

    def __init__(self, path: str) -> None:
        import numpy
        import openvino
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 8 * LONGEST
        scheduler.cache_size = 1  # GiB
        self.model = openvino_genai.LLMPipeline(path, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=2)
        self.version = openvino_genai.__version__
        self.numpy, self.tensor, self.genai = numpy, openvino.Tensor, openvino_genai

    def _run(self, ids: list[int], tokens: int, rows: int) -> Any:
        array = self.numpy.array([ids] * rows)
        prompt = self.genai.TokenizedInputs(self.tensor(array), self.tensor(self.numpy.ones_like(array)))
        options = self.genai.GenerationConfig()
        options.max_new_tokens, options.ignore_eos = tokens, True
        return self.model.generate(prompt, options).perf_metrics

    def prefill(self, ids: list[int]) -> Callable[[], float]:
        return lambda: self._run(ids, 1, 1).get_ttft().mean / 1e3

    def decode(self, ids: list[int], tokens: int, rows: int) -> Callable[[], float]:
        # The pipeline reads the prompt in every call; what counts is the time from its first token to its last.
        def run() -> float:
            times = self._run(ids, tokens + 1, rows).raw_metrics.m_new_token_times
            return (times[-1] - times[0]) / 1e3

        return run


class Vllm:
    """A folder of safetensors; prefixes are not kept, so that a prompt is read each time.

    It computes in a process of its own, whose memory is not in the peak.
    """

    reads = 0

    def __init__(self, dtype: str, path: str) -> None:
        import vllm

        self.model = vllm.LLM(
            path, dtype=dtype, max_model_len=LONGEST, enable_prefix_caching=False, disable_log_stats=False,
            gpu_memory_utilization=0.4,  # of the machine's memory, which others use too: the default asks for 0.92
        )  # fmt: skip
        self.version = vllm.__version__
        self.sampling = vllm.SamplingParams

    def _run(self, ids: list[int], tokens: int, rows: int) -> Any:
        options = self.sampling(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return self.model.generate([{"prompt_token_ids": ids}] * rows, options, use_tqdm=False)

    def prefill(self, ids: list[int]) -> Callable[[], float | None]:
        def run() -> None:
            self._run(ids, 1, 1)

        return run

    def decode(self, ids: list[int], tokens: int, rows: int) -> Callable[[], float]:
        # As with OpenVINO; from when the last row has its first token.
        def run() -> float:
            metrics = [output.metrics for output in self._run(ids, tokens + 1, rows)]
            return max(one.last_token_ts for one in metrics) - max(one.first_token_ts for one in metrics)

        return run


def open_engine(name: str, path: str) -> Engine:
    kind, _, option = name.partition(":")
    if kind == "lmstate":
        return Ours(option, path)
    if kind == "transformers":
        return Transformers(option, path)
    if kind == "llama.cpp":
        return LlamaCpp(path)
    if kind == "openvino":
        return OpenVino(path)
    if kind == "vllm":
        return Vllm(option, path)
    raise ValueError(f"no engine is called {name}")


def main() -> None:
    # The answers alone go to stdout: vLLM and its processes log there.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = open_engine(sys.argv[1], sys.argv[2])
    print(json.dumps({"version": engine.version}), file=answers)
    ready: dict[str, Callable[[], float | None]] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if line not in ready:
            ids = [3 + (7919 * i) % 40000 for i in range(asked["at"])]
            ready.clear()
            try:
                if asked["case"] == "prefill":
                    ready[line] = engine.prefill(ids)
                else:
                    ready[line] = engine.decode(ids, asked["tokens"], asked["rows"])
                    ready[line]()  # warm
            except ValueError as error:
                print(json.dumps({"refused": str(error)}), file=answers)
                continue
        begin = perf_counter()
        told = ready[line]()
        seconds = perf_counter() - begin if told is None else told
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        reads = engine.reads if asked["case"] == "decode" else 0
        print(json.dumps({"seconds": seconds, "peak": peak, "reads": reads}), file=answers)


if __name__ == "__main__":
    main()
