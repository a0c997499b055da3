"""Arguments and options that several commands share, and what they make: a loaded model, a sampler."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lmstate.cli.output import import_library

if TYPE_CHECKING:
    from lmstate.generation import Sampler
    from lmstate.kv import Quantized
    from lmstate.models.model import Model

DEFAULT_MODEL = "smollm2"
DRAFTERS = ("auto", "text", "heads", "none")


class WeightKind(StrEnum):
    """Storage of the weights in memory."""

    auto = "auto"
    int4 = "int4"
    int8 = "int8"
    bfloat16 = "bfloat16"
    float32 = "float32"


class ActivationBits(StrEnum):
    """Bits of the activations that quantized weights multiply."""

    auto = "auto"
    eight = "8"
    sixteen = "16"

    @property
    def bits(self) -> Literal["auto", 8, 16]:
        """As `lmstate.load` takes it."""
        return "auto" if self is ActivationBits.auto else 8 if self is ActivationBits.eight else 16


class PoolingKind(StrEnum):
    """Pooling of the hidden states of a text."""

    mean = "mean"
    last = "last"
    cls = "cls"


class KVWidth(StrEnum):
    """Bits of stored keys and values."""

    eight = "8"
    four = "4"
    three = "3"
    two = "2"


class CarryWidth(StrEnum):
    """Bits of what recurrences sum over tokens."""

    sixteen = "16"
    eight = "8"


class ParallelModes(StrEnum):
    """As `parallel_mode` of `lmstate.load`."""

    exact = "exact"
    sum = "sum"


ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="Alias, directory, .gguf file or Hub id; `lmstate models` lists some.")
]
Weights = Annotated[WeightKind, typer.Option("--weights", help="How the weights are stored in memory.")]
Activations = Annotated[
    ActivationBits,
    typer.Option("--activations", help="Bits per activation in products with int4 and int8 weights, on the CPU."),
]
Adapter = Annotated[
    Path | None,
    typer.Option(
        "--adapter",
        metavar="FOLDER",
        exists=True,
        file_okay=False,
        help="PEFT adapter to apply to the model.",
    ),
]
Mmproj = Annotated[
    str | None,
    typer.Option(
        "--mmproj",
        metavar="FILE",
        help="Vision tower for a .gguf model: llama.cpp's mmproj file.",
    ),
]
ContextSize = Annotated[
    int | None,
    typer.Option(
        "--ctx-size", "-c", metavar="N", min=1,
        help="Context length in tokens. Beyond the model's own length, positions are scaled by YaRN.",
    ),
]  # fmt: skip
KVBits = Annotated[KVWidth | None, typer.Option("--kv-bits", help="Bits per stored key and value.")]
Carries = Annotated[CarryWidth | None, typer.Option("--carries", help="Bits per number of a recurrent state.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", min=0, help="Maximum number of tokens to generate.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", "--temp", "-t", min=0.0,
        help="0 is greedy. Default, as of top-k, top-p, min-p and the penalty: the checkpoint's own, else greedy.",
    ),
]  # fmt: skip
TopK = Annotated[int | None, typer.Option("--top-k", min=0, help="Sample from the K most likely tokens; 0: from all.")]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", min=0.0, max=1.0, help="Sample from the most likely tokens that together have this probability."
    ),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", min=0.0, max=1.0, help="Drop tokens below this fraction of the best token's probability."),
]
Penalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty", min=0.0, help="Above 1, make tokens that are already in the text less likely."
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed for sampling; the same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop before this text. Repeatable.")]
StopTokens = Annotated[
    list[int] | None, typer.Option("--stop-token-id", metavar="ID", help="Stop at this token id. Repeatable.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at end-of-sequence tokens.")]
MinTokens = Annotated[int, typer.Option("--min-tokens", min=0, help="Minimum number of tokens to generate.")]
Presence = Annotated[
    float,
    typer.Option("--presence-penalty", help="Subtract this from the logits of tokens that the answer already has."),
]
Frequency = Annotated[
    float, typer.Option("--frequency-penalty", help="Subtract this once for each time the answer has the token.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=NUMBER", help="Add a number to a token's logit. Repeatable."),
]
NumBeams = Annotated[
    int,
    typer.Option("--num-beams", min=1, help="Number of beams for beam search; 1: no beam search."),
]
LengthPenalty = Annotated[
    float,
    typer.Option("--length-penalty", help="In a beam search, above 0 favors longer answers and below 0 shorter ones."),
]
EarlyStopping = Annotated[
    bool, typer.Option("--early-stopping", help="End a beam search when there are as many finished answers as beams.")
]
ThinkingBudget = Annotated[
    int | None, typer.Option("--thinking-budget", min=0, help="Maximum number of tokens in the thinking section.")
]
AnswerSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema", metavar="SCHEMA|@FILE", help="Constrain the answer to JSON that matches this schema."
    ),
]
AnswerRegex = Annotated[
    str | None,
    typer.Option("--regex", metavar="PATTERN|@FILE", help="Constrain the whole answer to this regular expression."),
]
AnswerGrammar = Annotated[
    str | None,
    typer.Option("--grammar", metavar="GRAMMAR|@FILE", help="Constrain the answer to this grammar, in GBNF or Lark."),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs", min=0, max=1024, help="With --json, add log probabilities and those of the K most likely tokens."
    ),
]
Threads = Annotated[
    str | None,
    typer.Option(
        "--threads", metavar="N|auto",
        help="Number of threads; auto measures which is fastest. Default: OMP_NUM_THREADS if it is set, else auto.",
    ),
]  # fmt: skip
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="cpu|cuda|auto|DEVICE=BLOCKS,...",
        help="Device in torch's names; default: cpu. Several devices share the blocks: cuda:0,cuda:1 splits them by "
        "bytes, cuda:0=20,cpu=12 by number, auto fills the GPUs first. cuda:0=20,offload=12 keeps the weights of 12 "
        "blocks in host memory.",
    ),
]  # fmt: skip


def _join_ranks(parallel: int) -> int:
    """In a process that torchrun started beside the first: compute for that one, and end with it.

    The first one tells the others if it ends before it loads the model.
    """
    if parallel > 1 and "RANK" in os.environ:
        from lmstate.distributed.given import join

        join(parallel)
    return parallel


Parallel = Annotated[
    int,
    typer.Option(
        "--parallel", metavar="N", min=1, callback=_join_ranks,
        help="Split weights and state over N processes on the CPU, started here or by torchrun.",
    ),
]  # fmt: skip
ParallelMode = Annotated[
    ParallelModes,
    typer.Option(
        "--parallel-mode",
        help="exact gives the same bits as one process. sum exchanges half as much, and its bits differ.",
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft", metavar="MODEL|text|heads|none",
        help="Source of draft tokens for speculative decoding: text already written, the model's own prediction heads, "
        "or a folder or file with an EAGLE-3 head, an assistant or a smaller model. The answer does not change.",
    ),
]  # fmt: skip
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message at the beginning.")]


def load_model(
    name: str,
    weights: WeightKind = WeightKind.auto,
    threads: str | None = None,
    adapter: Path | Mapping[str, Path] | None = None,
    draft: str = "auto",
    device: str | None = None,
    activations: ActivationBits = ActivationBits.auto,
    context_size: int | None = None,
    parallel: int = 1,
    parallel_mode: ParallelModes = ParallelModes.exact,
    mmproj: str | None = None,
) -> Model:
    """The model by its name; what takes long (download, conversion, a long prompt) reports its own progress."""
    import lmstate
    from lmstate.cli.progress import PromptProgress

    import_library()
    set_threads(threads)
    model = lmstate.load(
        name, weights=weights.value, adapter=adapter, device=device, heads=draft == "heads" or published_head(draft),
        activations=activations.bits, context_size=context_size, parallel=parallel,
        parallel_mode=parallel_mode.value, mmproj=mmproj,
    )  # fmt: skip
    model.on_part = PromptProgress()
    return model


def refuse_unknown(name: str, threads: str | None = None, draft: str = "auto") -> None:
    """Refuse unknown models, and threads that are not a number, before torch is imported for nothing."""
    from lmstate.checkpoints.hub import check_name

    check_name(name)
    _thread_count(threads)
    if draft not in DRAFTERS:
        try:
            check_name(draft)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"--draft is {', '.join(DRAFTERS)} or a model: {error}") from None


def set_threads(asked: str | None) -> None:
    """Set torch's threads. Raises `typer.BadParameter` for what is neither a number nor "auto"."""
    count = _thread_count(asked)
    if asked is None and os.environ.get("OMP_NUM_THREADS"):
        return
    import lmstate

    with usage():
        lmstate.set_threads(count)


def _thread_count(asked: str | None) -> int | Literal["auto"]:
    if asked is None or asked == "auto":
        return "auto"
    try:
        return int(asked)
    except ValueError:
        raise typer.BadParameter(f'--threads {asked} was asked for; give a number, or "auto"') from None


def load_drafter(name: str, device: str | None = None) -> str | Model:
    """Drafter that `--draft` names: "auto", "text", "heads" or "none" as they are, "heads" for a head that is published
    apart, else the model of that name, on the first of the devices."""
    import lmstate

    if published_head(name):
        return "heads"
    if name in DRAFTERS:
        return name
    from lmstate.checkpoints.placement import DevicePlacement

    return lmstate.load(name, weights=WeightKind.auto.value, device=DevicePlacement.of(device).devices[0])


def published_head(draft: str) -> Literal[False] | Path:
    """The folder or file of the head that `--draft` names; False where it names none."""
    from lmstate.checkpoints.hub import resolve
    from lmstate.models.heads.published import is_published_head

    if draft in DRAFTERS:
        return False
    path = resolve(draft)
    return path if is_published_head(path) else False


def kv_storage(bits: KVWidth | None) -> Quantized | None:
    """Storage of keys and values that `--kv-bits` names."""
    from lmstate.kv import Quantized

    return None if bits is None else Quantized(int(bits))


def carry_bits(width: CarryWidth | None) -> int:
    """Bits of carries that `--carries` names."""
    return 32 if width is None else int(width)


@contextmanager
def usage() -> Iterator[None]:
    """A ValueError inside is one of wrong usage, with its exit code."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def text_or_file(given: str | None) -> str | None:
    """An option's text, or with an `@` before it that of a file."""
    return Path(given[1:]).read_text(encoding="utf-8").strip() if given is not None and given[:1] == "@" else given


def logit_bias(given: list[str] | None) -> dict[int, float]:
    """Numbers to add to logits by token, from ID=NUMBER. Raises `typer.BadParameter` for anything else."""
    bias: dict[int, float] = {}
    for text in given or ():
        token, _, number = text.partition("=")
        try:
            bias[int(token)] = float(number)
        except ValueError:
            raise typer.BadParameter(f"--logit-bias is ID=NUMBER, as 42=-5; {text!r} was given") from None
    return bias


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling options of the command line; None: the checkpoint's suggestion. A `top_k` of 0 is all tokens.

    Raises `typer.BadParameter` for numbers out of range.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None

    def __post_init__(self) -> None:
        with usage():
            self._over({})  # before a model is loaded for nothing

    def of(self, model: Model) -> Sampler:
        return self._over(model.defaults)

    def _over(self, defaults: dict[str, Any]) -> Sampler:
        from lmstate.generation import Sampler

        asked = {name: value for name, value in asdict(self).items() if value is not None}
        if self.top_k == 0:
            asked["top_k"] = None
        return replace(Sampler.suggested(defaults), **asked)
