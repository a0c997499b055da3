"""Speed of the recurrent and windowed families beside transformers: random weights of real shapes, in bfloat16.

Both sides are timed in the same process, a few steps of one and then of the other, round after round; a ratio is that
of a round's two times, and a row gives the median ratio and the range. `python -m bench.hybrids [--threads N] [name]`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.limits import bandwidth, step_bytes

PROMPT = 1024
ROUNDS, STEPS = 5, 4
PREFILLS = 3


@dataclass(frozen=True)
class Result:
    """Medians over the rounds. `ratio`: of the baseline's seconds over ours, or what `what` says; `bar`: its goal."""

    model: str
    what: str
    ours: float  # seconds
    peer: float
    ratio: float
    low: float
    high: float
    bar: float
    threads: int
    clock: str
    share: float | None = None  # of the bandwidth, that our decode reached

    @property
    def holds(self) -> bool:
        return self.ratio <= self.bar if "over" in self.what else self.ratio >= self.bar


def qwen3_5() -> Any:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def granite4_h() -> Any:
    from transformers import GraniteMoeHybridConfig

    kinds = ["attention" if index in (10, 13, 17, 27) else "mamba" for index in range(32)]
    return GraniteMoeHybridConfig(
        vocab_size=100352, hidden_size=768, num_hidden_layers=32, layer_types=kinds, num_attention_heads=12,
        num_key_value_heads=4, mamba_n_heads=48, mamba_d_head=32, mamba_d_state=128, mamba_n_groups=1, mamba_expand=2,
        mamba_d_conv=4, mamba_chunk_size=256, intermediate_size=2048, shared_intermediate_size=2048,
        num_local_experts=0, num_experts_per_tok=0, attention_multiplier=0.015625, embedding_multiplier=12.0,
        logits_scaling=3.0, residual_multiplier=0.246, tie_word_embeddings=True, position_embedding_type="nope",
        max_position_embeddings=32768,
    )  # fmt: skip


def mamba2() -> Any:
    from transformers import Mamba2Config

    return Mamba2Config(
        vocab_size=50288, hidden_size=768, num_hidden_layers=24, num_heads=24, head_dim=64, state_size=128, n_groups=1,
        expand=2, chunk_size=256, tie_word_embeddings=True,
    )  # fmt: skip


def gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, intermediate_size=2048, sliding_window=512, query_pre_attn_scalar=256,
        max_position_embeddings=32768,
    )  # fmt: skip


def deepseek_v2() -> Any:
    """The attention of DeepSeek-V2-Lite as it is, in fewer and narrower layers of fewer experts."""
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        vocab_size=102400, hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=16,
        kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, head_dim=64,
        intermediate_size=4096, moe_intermediate_size=704, n_routed_experts=16, num_experts_per_tok=6,
        n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=False, max_position_embeddings=32768,
    )  # fmt: skip


def qwen3_moe() -> Any:
    """Layers of Qwen3-30B-A3B as they are, but for half of their experts, of which a token visits 8; and 4 layers."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=32768, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=32768,
    )  # fmt: skip


def lfm2() -> Any:
    from transformers import Lfm2Config

    kinds = ["full_attention" if index in (2, 5, 8, 10, 12, 14) else "conv" for index in range(16)]
    return Lfm2Config(
        vocab_size=65536, hidden_size=1024, intermediate_size=6656, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=8, layer_types=kinds, block_multiple_of=256, max_position_embeddings=32768,
    )  # fmt: skip


def gemma4() -> Any:
    """Layers of about Gemma 4 E2B's size, 15 of its 35, of which the last 9 share keys and values; a smaller table."""
    from transformers import Gemma4TextConfig

    kinds = ["full_attention" if index % 5 == 4 else "sliding_attention" for index in range(15)]
    return Gemma4TextConfig(
        vocab_size=262144, hidden_size=1536, intermediate_size=6144, num_hidden_layers=15, num_attention_heads=8,
        num_key_value_heads=1, head_dim=256, global_head_dim=512, sliding_window=512, layer_types=kinds,
        num_kv_shared_layers=9, use_double_wide_mlp=True, vocab_size_per_layer_input=32768,
        final_logit_softcapping=30.0, max_position_embeddings=32768,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], Any]] = {
    "qwen3.5-0.8b": qwen3_5,
    "granite-4.0-h-350m": granite4_h,
    "mamba2-130m": mamba2,
    "gemma-3-270m": gemma3,
    "deepseek-v2-small": deepseek_v2,
    "lfm2-350m": lfm2,
    "moe-of-qwen3-small": qwen3_moe,
    "gemma-4-small": gemma4,
}


class Peer:
    """transformers, fed as its own generation loop feeds it: one cache, logits of the last token."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig

        from lmstate.integrations.transformers.cache.hooks import cache_name

        kind = auto_class(AutoConfig.from_pretrained(folder))
        self.model = kind.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.argument = cache_name(self.model)

    def prefill(self, ids: list[int]) -> None:
        self.cache = None
        self.step(ids)

    def step(self, ids: list[int]) -> Tensor:
        given = {} if self.cache is None else {self.argument: self.cache}
        out = self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1, **given)
        self.cache = out[self.argument]
        return out.logits[:, -1]


class Ours:
    def __init__(self, folder: Path) -> None:
        import lmstate

        self.model = lmstate.load(folder, weights="bfloat16")

    @classmethod
    def of(cls, model: Any) -> Ours:
        """Another state of a model."""
        made = cls.__new__(cls)
        made.model = model
        return made

    def step_bytes(self) -> int:
        return step_bytes(self.model, self.state)

    def prefill(self, ids: list[int]) -> None:
        self.state = self.model.new_state()
        self.step(ids)

    def step(self, ids: list[int]) -> Tensor:
        logits = self.model([ids], self.state)
        assert logits is not None
        return logits

    def lengthen(self, length: int) -> None:
        """Make the row longer by repeating what its attention layers hold; recurrent layers have no length."""
        short = self.state.snapshot(0)
        repeats = -(-length // short.length)
        layers = tuple(
            {
                name: part.repeat_interleave(repeats, -2)[..., :length, :] if part.shape[-2] == short.length else part
                for name, part in layer.items()
            }
            for layer in short.layers
        )
        tokens = (short.tokens * repeats)[:length]
        self.state = self.model.new_state()
        self.state.restore(0, replace(short, tokens=tokens, cached=length, layers=layers))


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a model for a config: of a text, or of pictures too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText


@contextmanager
def checkpoint(name: str, shapes: dict[str, Callable[[], Any]] = SHAPES) -> Iterator[Path]:
    """A checkpoint of random weights; `LMSTATE_BENCH_MODELS` names a folder to keep them in."""
    kept = os.environ.get("LMSTATE_BENCH_MODELS")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(kept or scratch) / name
        if not folder.exists():
            torch.manual_seed(0)
            config = shapes[name]()
            auto_class(config).from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        yield folder


def text(length: int) -> list[int]:
    return torch.randint(3, 30000, (length,), generator=torch.Generator().manual_seed(length)).tolist()


clock = time.perf_counter
"""Or `time.process_time`, with one thread on a machine that others use: waiting for a core does not count then."""


def seconds(run: Callable[[], object]) -> float:
    start = clock()
    run()
    return clock() - start


def alternate(first: Callable[[], object], second: Callable[[], object], rounds: int) -> list[tuple[float, float]]:
    """Seconds of both, a round at a time, after one round that does not count; who comes first alternates."""
    first(), second()
    times = []
    for index in range(rounds):
        if index % 2:
            b, a = seconds(second), seconds(first)
        else:
            a, b = seconds(first), seconds(second)
        times.append((a, b))
    return times


def result(model: str, what: str, times: list[tuple[float, float]], per: int, bar: float) -> Result:
    """`times`: (ours, the baseline) a round, of `per` tokens each."""
    ours, peer = (statistics.median(side) / per for side in zip(*times))
    ratios = sorted((a / b if "over" in what else b / a) for a, b in times)
    low, middle, high = ratios[0], statistics.median(ratios), ratios[-1]
    return Result(model, what, ours, peer, middle, low, high, bar, torch.get_num_threads(), clock.__name__)


def decode(side: Ours | Peer, steps: int = STEPS) -> Callable[[], None]:
    def run() -> None:
        for token in range(steps):
            side.step([1000 + token])

    return run


def measure(name: str, prefills: bool) -> Iterator[Result]:
    with checkpoint(name) as folder:
        ours, peer = Ours(folder), Peer(folder)
        prompt = text(4000 if name.startswith(("gemma", "deepseek")) else PROMPT)
        ours.prefill(prompt), peer.prefill(prompt)
        times = alternate(decode(ours), decode(peer), ROUNDS)
        row = result(name, f"decode at {len(prompt)}", times, STEPS, 4.0)
        yield replace(row, share=ours.step_bytes() / row.ours / bandwidth(row.threads))
        if name.startswith("qwen"):
            short, long = Ours.of(ours.model), Ours.of(ours.model)
            short.prefill(text(1000))
            long.state = short.state
            long.lengthen(16000)
            times = alternate(decode(long), decode(short), ROUNDS)
            yield result(name, "decode at 16000 over 1000", times, STEPS, 1.5)
        if prefills and len(prompt) == PROMPT:
            times = alternate(lambda: ours.prefill(prompt), lambda: peer.prefill(prompt), PREFILLS)
            yield result(name, f"prefill of {PROMPT}", times, 1, 1.8 if name.startswith("qwen") else 1.3)


def run(names: list[str] | None = None, prefills: bool = True) -> list[dict[str, Any]]:
    """The rows of the table, those of the shapes named."""
    rows = []
    with torch.inference_mode():
        for name in names or SHAPES:
            for row in measure(name, prefills):
                rows.append({**asdict(row), "holds": row.holds})
                print(line(row), flush=True)
    return rows


def line(row: Result) -> str:
    """A result for people."""
    return (
        f"{row.model:20} {row.what:26} ours {row.ours * 1e3:9.2f} ms  other {row.peer * 1e3:9.2f} ms  "
        f"{row.ratio:5.2f}x [{row.low:.2f}-{row.high:.2f}]  goal {row.bar}  "
        f"{'holds' if row.holds else 'MISSED'}  ({row.threads} threads, {row.clock})"
        + (f"  {row.share:.0%} of the bandwidth" if row.share else "")
    )


def markdown(rows: list[dict[str, Any]]) -> str:
    """A row a measurement: milliseconds of both sides, the median ratio with its range and its goal, and how near our
    decode came to the bandwidth."""
    head = "| random weights | what | lmstate, ms | other, ms | ratio | goal | of the bandwidth |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for row in rows:
        ratio = f"{row['ratio']:.2f} ({row['low']:.2f}-{row['high']:.2f})"
        goal = f"{'at most' if 'over' in row['what'] else 'at least'} {row['bar']}"
        times = f"{row['ours'] * 1e3:.1f} | {row['peer'] * 1e3:.1f}"
        share = f"{row['share']:.0%}" if row["share"] else ""
        lines.append(f"| {row['model']} | {row['what']} | {times} | {ratio} | {goal} | {share} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *SHAPES])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="count the process's own seconds; see `clock`")
    parser.add_argument("--decode", action="store_true", help="no prefills")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.cpu_time:
        clock = time.process_time
    run(given.names or None, prefills=not given.decode)
