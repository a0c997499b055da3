"""`lmstate generate`: one answer, streamed to stdout."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lmstate.cli import options
from lmstate.cli.chat.input import as_text
from lmstate.cli.output import collect, describe, note, write_pieces

if TYPE_CHECKING:
    from collections.abc import Generator

    from lmstate.cli.chat.messages import Message
    from lmstate.generation import BeamSearch, Generation, RowPiece
    from lmstate.generation.transcript import TranscriptOptions
    from lmstate.models.model import Model
    from lmstate.state import State


@dataclass(frozen=True)
class GenerateRequest:
    """Prompt: tokens to feed to a state, and the conversation that they end, if it is one."""

    state: State
    ids: list[int]
    messages: list[Message] | None


def generate(
    model: options.ModelName,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt. With `-`, or without it when input is piped, stdin."),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", "-f", metavar="FILE", help="Read the prompt from this file.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="TEXT",
            help="Input of a model with an encoder: a text, for example to translate, or the name of a WAV file.",
        ),
    ] = None,
    language: Annotated[
        str | None, typer.Option("--language", metavar="CODE", help="Language spoken in --source; default: detect it.")
    ] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Translate --source into English.")] = False,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", metavar="FILE", help="Image to put before the prompt, for a vision model. Repeatable."),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option(
            "--audio",
            metavar="FILE",
            help="WAV file to put before the prompt, for a model that takes audio in conversations. Repeatable.",
        ),
    ] = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.Penalty = None,
    seed: options.Seed = None,
    presence_penalty: options.Presence = 0.0,
    frequency_penalty: options.Frequency = 0.0,
    logit_bias: options.LogitBias = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokens = None,
    ignore_eos: options.IgnoreEos = False,
    min_tokens: options.MinTokens = 0,
    num_beams: options.NumBeams = 1,
    length_penalty: options.LengthPenalty = 1.0,
    early_stopping: options.EarlyStopping = False,
    thinking_budget: options.ThinkingBudget = None,
    json_schema: options.AnswerSchema = None,
    regex: options.AnswerRegex = None,
    grammar: options.AnswerGrammar = None,
    system: options.System = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the model's chat template, or continue the text as it is."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="FILE", help="Continue from this saved state without computing it again."),
    ] = None,
    save_state: Annotated[
        Path | None, typer.Option("--save-state", metavar="FILE", help="Write the state after the answer to a file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --save-state replace an existing file.")] = False,
    weights: options.Weights = options.WeightKind.auto,
    activations: options.Activations = options.ActivationBits.auto,
    ctx_size: options.ContextSize = None,
    threads: options.Threads = None,
    device: options.Device = None,
    parallel: options.Parallel = 1,
    parallel_mode: options.ParallelMode = options.ParallelModes.exact,
    draft: options.Draft = "auto",
    adapter: options.Adapter = None,
    mmproj: options.Mmproj = None,
    kv_bits: options.KVBits = None,
    carries: options.Carries = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end: text, ids, finished, usage.")
    ] = False,
    logprobs: options.Logprobs = None,
    stats: Annotated[
        bool | None,
        typer.Option(
            "--stats/--no-stats", help="Print token counts and speed to stderr. Default: if it is a terminal."
        ),
    ] = None,
) -> None:
    """Answer a prompt, or continue a text.

    If the model has a chat template, the prompt is a user message in it, as in llama.cpp and mlx-lm; --raw continues
    the text as it is. Only the answer goes to stdout. One newline at the end of stdin or of a prompt file is dropped.

    --state continues from a file written by --save-state or by /save in a chat. PROMPT is then the next message of a
    conversation, or more text; without a PROMPT the text continues where it ended.

    \b
    Examples:
      lmstate generate smollm2 "Name three rivers."
      lmstate generate smollm2 --raw "Once upon a time" -n 100 -t 0.8 --seed 1
      git diff | lmstate generate smollm2 --system "Summarize this change." > summary.txt
      lmstate generate smollm2 --raw -f book.txt -n 0 --save-state book.lmstate
      lmstate generate smollm2 --state book.lmstate "In one sentence, the book says" --json
      lmstate generate smollm2 "A river, as JSON." --json-schema @river.json
      lmstate generate opus-mt-en-de/ --source "The cat sleeps." --num-beams 4
      lmstate generate openai/whisper-tiny --source speech.wav --language de --translate
      lmstate generate Qwen/Qwen2-VL-2B-Instruct --image screen.png "What does the error say?"
    """
    # Importing torch takes seconds: mistakes are told before, wherever they can be.
    options.refuse_unknown(model, threads, draft)
    bias = options.logit_bias(logit_bias)
    named = [*(image or ()), *(audio or ())]
    text = as_text(
        _prompt(prompt, prompt_file, optional=state is not None or source is not None or bool(named)), "the prompt"
    )
    system = None if system is None else as_text(system, "--system")
    if chat is False and system is not None:
        raise typer.BadParameter("--system needs the chat template; it does not go with --raw")
    if state is not None and system is not None:
        raise typer.BadParameter("--system begins a conversation; it does not go with --state")
    if source is not None and (state is not None or system is not None or chat):
        raise typer.BadParameter("--source begins an answer; it does not go with --state, --system or --chat")
    if (language is not None or translate) and source is None:
        raise typer.BadParameter("--language and --translate are about a --source: give the name of a WAV file")
    if named and (source is not None or chat is False):
        given = "--image goes" if image else "--audio goes"
        raise typer.BadParameter(f"{given} with a question in the chat template, not with --source or --raw")
    for path in named:
        path.stat()  # before torch is imported
    if state is not None:
        state.stat()  # before a model is loaded for nothing
    if save_state is not None and save_state.is_dir():
        raise IsADirectoryError(f"--save-state {save_state} is a directory; name a file in it")
    if save_state is not None and save_state.exists() and not force:
        raise FileExistsError(f"{save_state} exists; --force lets --save-state replace it")
    if save_state is not None and not save_state.absolute().parent.is_dir():
        raise FileNotFoundError(f"--save-state {save_state}: there is no folder {save_state.parent}; make it first")
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs are part of the object of --json: give both")
    from lmstate.audio.wav import sound_file
    from lmstate.cli.chat.messages import with_messages
    from lmstate.cli.progress import warn_of_length
    from lmstate.generation import BeamParams, BeamSearch, Generation, SamplingParams
    from lmstate.generation.params import sampling_params
    from lmstate.generation.prompts import with_source
    from lmstate.generation.transcript import TranscriptOptions
    from lmstate.vision.pictures import picture_file

    limits: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "min_tokens": min_tokens,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": bias,
        "stop": stop or (),
        "stop_token_ids": stop_token_id or (),
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
        "max_thinking_tokens": thinking_budget,
        "json_schema": options.text_or_file(json_schema),
        "regex": options.text_or_file(regex),
        "grammar": options.text_or_file(grammar),
    }
    with options.usage():
        params = SamplingParams(**limits)  # before a model is loaded for nothing
        params.check_together()
        _ = params.constraint
        beams = BeamParams(num_beams=num_beams, length_penalty=length_penalty, early_stopping=early_stopping)
        if num_beams > 1:
            BeamSearch.check_params(replace(params, temperature=temperature or 0.0))
            temperature = 0.0
            if draft not in ("auto", "none"):
                raise ValueError("--draft was given, and a beam search verifies no drafts")
    sampling = options.SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    kv = options.kv_storage(kv_bits)
    files = [*map(picture_file, image or ()), *map(sound_file, audio or ())]
    loaded = options.load_model(
        model, weights, threads, adapter, draft, device, activations, ctx_size, parallel, parallel_mode,
        mmproj,
    )  # fmt: skip
    if source is not None and (loaded.hears or loaded.takes_sounds):
        if params != SamplingParams(max_new_tokens=256) or num_beams > 1 or save_state is not None:
            raise typer.BadParameter(
                "a --source of sound takes --language, --translate, --temperature, --seed and --json, and a PROMPT "
                "that goes before it; leave other options out"
            )
        wishes = TranscriptOptions(
            language=language,
            task="translate" if translate else "transcribe",
            prompt=text or None,
            temperature=temperature or 0.0,
            seed=seed,
        )
        _transcribe(loaded, sound_file(Path(source)), wishes, as_json)
        return
    if language is not None or translate:
        raise ValueError(f"--language and --translate were given, and a {loaded.config.family} model reads no sounds")
    empty = loaded.new_state(rows=1, kv=kv, carries=options.carry_bits(carries))
    if source is not None:
        _, (ids,), _ = with_source(loaded, as_text(source, "--source"), text or None, empty)
        request = GenerateRequest(empty, ids, None)
    elif state is None:
        request = _begin(loaded, empty, text, files, chat, system)
    else:
        request = _go_on(loaded, empty, state, text, files, chat)
    held = request.state.lengths[0]
    warn_of_length(loaded, held, held + len(request.ids))
    params = sampling_params(sampling.of(loaded), limits)
    generation: Generation | BeamSearch
    if num_beams > 1:
        generation = BeamSearch(loaded, [request.ids], request.state, params, beams=beams)
    else:
        params = params.compiled(loaded, None if request.messages is None else request.ids)
        generation = Generation(loaded, [request.ids], request.state, params, draft=options.load_drafter(draft, device))
    with closing(cast("Generator[RowPiece]", iter(generation))) as pieces:
        texts = (piece.text for piece in pieces)
        stopped = collect(texts) if as_json else write_pieces(texts)
    if as_json:
        print(json.dumps(_result(generation, held + len(request.ids)), ensure_ascii=False))
    if save_state is not None:
        snapshot = request.state.snapshot(0)
        if request.messages is not None:
            answer: Message = {"role": "assistant", "content": generation.texts[0]}
            snapshot = with_messages(snapshot, [*request.messages, answer])
        snapshot.save(save_state)
    if sys.stderr.isatty() if stats is None else stats:
        note(describe(generation.report()))
    if stopped:
        raise typer.Exit(130)


def _transcribe(model: Model, sound: bytes, wishes: TranscriptOptions, as_json: bool) -> None:
    """Write the transcript of a sound, segment by segment, or as one object."""
    from lmstate.generation.transcription import segments_of, transcription

    work = transcription(model, sound, wishes)
    texts = (segment.text for segment in segments_of(model, work))
    stopped = collect(texts) if as_json else write_pieces(texts)
    if as_json:
        print(json.dumps(asdict(work.transcript), ensure_ascii=False))
    if stopped:
        raise typer.Exit(130)


def _prompt(given: str | None, file: Path | None, optional: bool) -> str:
    """The prompt. Raises `typer.BadParameter` if there is none, unless it is `optional`: then it may be empty."""
    if given is not None and file is not None:
        raise typer.BadParameter("give a PROMPT or a --prompt-file, not both")
    if file is not None:
        text, where = file.read_text(encoding="utf-8", errors="surrogateescape").removesuffix("\n"), str(file)
    elif given is not None and given != "-":
        text, where = given, "PROMPT"
    elif given is None and sys.stdin.isatty():
        text, where = "", "PROMPT"
    else:
        text, where = sys.stdin.read().removesuffix("\n"), "standard input"
    if not text and not optional:
        raise typer.BadParameter(f"{where} is empty: give a PROMPT, pipe one in, or name a --prompt-file")
    return text


def _begin(
    model: Model, state: State, text: str, files: list[bytes], chat: bool | None, system: str | None
) -> GenerateRequest:
    """A request on an empty state."""
    from lmstate.cli.chat.messages import question_of
    from lmstate.generation.conversation import align

    tokenizer = model.tokenizer
    if chat is None:
        chat = tokenizer.has_chat_template
        if not chat and system is not None:
            raise ValueError("--system was given, but the model has no chat template to put it in")
        if not chat and files:
            raise ValueError(f"{_option(files)} was given, but the model has no chat template to put a file in")
    if not chat:
        return GenerateRequest(state, tokenizer.encode(text), None)
    messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    messages.append(question_of(text, files))
    return GenerateRequest(state, align(state, model.encode(messages, add_generation_prompt=True)), messages)


def _go_on(model: Model, state: State, path: Path, text: str, files: list[bytes], chat: bool | None) -> GenerateRequest:
    """A request on a saved state, restored to an empty one: the next question of a conversation, or more of a text."""
    from lmstate.cli.chat.messages import messages_of, question_of
    from lmstate.generation.conversation import align
    from lmstate.state import Snapshot

    snapshot = Snapshot.load(path)
    messages = messages_of(snapshot)
    if (chat or files) and messages is None:
        given = _option(files) if files else "--chat"
        raise ValueError(f"{path} holds a text, not a conversation; leave out {given} to continue the text")
    state.restore(0, snapshot)
    if messages is None or chat is False or not (text or files):
        return GenerateRequest(state, model.tokenizer.encode(text, add_special_tokens=False) if text else [], None)
    messages.append(question_of(text, files))
    return GenerateRequest(state, align(state, model.encode(messages, add_generation_prompt=True)), messages)


def _option(files: list[bytes]) -> str:
    """The option that gave the first of these files."""
    from lmstate.vision.reader import kind_of_file

    return f"--{kind_of_file(files[0])}"


def _result(generation: Generation | BeamSearch, prompt: int) -> dict[str, object]:
    """Output of --json. ids: those of the answer that the state holds, so none of a stop string."""
    from lmstate.generation import BeamSearch

    report, told = generation.report(), None
    if not isinstance(generation, BeamSearch) and generation.params.logprobs is not None:
        told = [each._asdict() for each in generation.logprobs[0]]
    return {
        "text": generation.texts[0],
        "ids": generation.state.tokens(0)[prompt:],
        "finished": report.finished[0],
        "usage": {"prompt": prompt, "reused": report.reused, "generated": report.generated},
        **({} if told is None else {"logprobs": told}),
    }
