"""`lmstate serve`: the protocols that clients speak, over one model or several."""

from __future__ import annotations

import errno
import gc
import logging
import os
import socket
from contextlib import ExitStack, closing, suppress
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from lmstate.checkpoints.hub import served_name
from lmstate.cli import options
from lmstate.cli.output import note
from lmstate.cli.replicas import check_replicas, leaves_on_sigterm, replicated
from lmstate.cli.served import EngineOptions, adapted_sources, models_in, read_adapters, sources


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Alias, directory, .gguf file or Hub id; `lmstate models` lists some. A single model is loaded "
            "at start, several models at their first request.",
            show_default=options.DEFAULT_MODEL,
        ),
    ] = None,
    models_dir: Annotated[
        Path | None,
        typer.Option(
            "--models-dir",
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="Serve all models in a folder: .gguf files, and folders with a config.json.",
        ),
    ] = None,
    max_loaded: Annotated[
        int | None,
        typer.Option("--max-loaded", min=1, help="Maximum number of models in memory. Default: all."),
    ] = None,
    unload_after: Annotated[
        float | None,
        typer.Option(
            "--unload-after", min=1.0, metavar="SECONDS", help="Unload a model after this time without requests."
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora", metavar="NAME=FOLDER", help="Also serve the model with an adapter, under this name. Repeatable."
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; any but loopback needs an API key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8080,
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows",
            min=1,
            help="Maximum number of answers at the same time. Default: 8 to 64, by the number of processors.",
        ),
    ] = None,
    queue: Annotated[
        int, typer.Option("--queue", min=1, help="Maximum number of waiting requests; further ones get 429.")
    ] = 256,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory of each model for answers and stored prefixes.")
    ] = ("4GiB"),
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="FOLDER|URL",
            help="Keep prefixes, sessions and responses in this folder, Redis or object store. Several servers can "
            "share it.",
        ),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas",
            min=1,
            help="Number of engines, each in a process of its own on Ray Serve. They share --store.",
        ),
    ] = 1,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="ADDRESS", help="Run the replicas on this Ray cluster instead of this machine."
        ),
    ] = None,
    max_itl: Annotated[
        float | None,
        typer.Option(
            "--max-itl",
            metavar="MS",
            help="Longest time between two tokens of an answer while other prompts are read, in milliseconds. A larger "
            "bound reads prompts faster. Default without --stall: 80.",
        ),
    ] = None,
    stall: Annotated[
        float | None,
        typer.Option(
            "--stall",
            help="The same bound as a multiple of the usual time; of both, the larger counts. Default without "
            "--max-itl: 3.",
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME", help="Another name for the model; `*`: any name. Repeatable."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="File with API keys, one per line. Or set LMSTATE_API_KEY.",
        ),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="Let all API keys share sessions, responses, conversations and prefixes."),
    ] = False,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Serve the network without an API key.")
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin", metavar="ORIGIN", help="Allow browser pages of this origin; `*`: of all. Repeatable."
        ),
    ] = None,
    allow_image_urls: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-image-urls",
            metavar="HOST",
            help="Fetch images from this host; `*.example.com`, or `*` for all. Repeatable.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Maximum number of tokens if a request sets none.")
    ] = 4096,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Longest time for an answer.")
    ] = None,
    max_priority: Annotated[
        int, typer.Option("--max-priority", min=0, help="Highest priority that a request can have.")
    ] = 0,
    weights: options.Weights = options.WeightKind.auto,
    activations: options.Activations = options.ActivationBits.auto,
    adapter: options.Adapter = None,
    mmproj: options.Mmproj = None,
    kv_bits: options.KVBits = None,
    carries: options.Carries = None,
    ctx_size: options.ContextSize = None,
    threads: options.Threads = None,
    device: options.Device = None,
    parallel: options.Parallel = 1,
    parallel_mode: options.ParallelMode = options.ParallelModes.exact,
    draft: Annotated[
        str,
        typer.Option(
            "--draft", metavar="MODEL|text|heads|none", help="Source of draft tokens; see `lmstate generate --help`."
        ),
    ] = "auto",
    log_level: Annotated[
        LogLevel, typer.Option("--log-level", help="Level of the log; info has one line per request.")
    ] = LogLevel.info,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Also write prompts to the log.")] = False,
) -> None:
    """Serve models to OpenAI, Anthropic and other clients over HTTP.

    \b
    Examples:
      lmstate serve
      lmstate serve smollm2 --port 9000 --store ~/lmstate-store
      lmstate serve --models-dir ~/models --max-loaded 2
      LMSTATE_API_KEY=secret lmstate serve smollm2 --host 0.0.0.0
    """
    adapters = read_adapters(lora or ())
    names = [*(models or ()), *(models_in(models_dir) if models_dir is not None else ())] or [options.DEFAULT_MODEL]
    one = len(names) == 1 and models_dir is None
    if not one and (adapter is not None or adapters or mmproj is not None):
        raise typer.BadParameter("--adapter, --lora and --mmproj go with one model")
    for name in names:
        options.refuse_unknown(name, threads, draft)
    check_address(host, port)
    try:
        from lmstate.serve import Settings, make_server, read_keys
    except ModuleNotFoundError as error:
        raise ImportError(f"the server needs {error.name}: pip install 'lmstate[serve]'") from None
    from lmstate.engine.options import as_bytes, refuse_sources
    from lmstate.engine.pace import Pace
    from lmstate.engine.tiers import check_store, open_records
    from lmstate.engine.tiers.fetch import PatientRecords
    from lmstate.serve.answer.pool import ModelPool

    with options.usage():
        memory_bytes = as_bytes(memory)  # before a model is loaded for nothing
        Pace.bounded(max_itl, stall)
    kv = options.kv_storage(kv_bits)
    level = logging.getLevelNamesMapping()[log_level.upper()]
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=max(level, logging.INFO))
    logging.getLogger("lmstate").setLevel(level)
    logging.getLogger("uvicorn.error").setLevel(max(level, logging.WARNING))
    if clustered := replicas > 1 or cluster is not None:
        check_replicas(replicas, store, one and not adapters)
    elif store is not None:
        check_store(store)
    lasts = store is not None
    with ExitStack() as ending:
        if store is None and not one:  # what a model keeps for its sessions is to be there when it is loaded again
            store = ending.enter_context(TemporaryDirectory(prefix="lmstate-store-"))
        settings = Settings(
            served_name(names[0]),
            host,
            port,
            read_keys(api_key_file),
            tuple(alias or ()),
            tuple(cors_origin or ()),
            None if store is None or clustered or "://" in store else Path(store),
            log_prompts,
            shared,
            max_new_tokens=max_tokens,
            request_timeout=timeout,
            max_priority=max_priority,
            given_name=names[0],
            picture_hosts=tuple(allow_image_urls or ()),
            folder_lasts=lasts,
        )
        settings.check(allow_anonymous)
        how = EngineOptions(
            weights,
            activations,
            adapter,
            ctx_size,
            threads,
            device,
            parallel,
            parallel_mode,
            draft,
            rows,
            memory_bytes,
            store,
            kv,
            options.carry_bits(carries),
            queue,
            max_itl,
            stall,
            mmproj,
        )
        if clustered:
            ending.enter_context(leaves_on_sigterm())  # Ray and the server have handlers of their own later
            front = ending.enter_context(replicated(names[0], replicas, cluster, how)).front
            refuse_sources(front.model)
            server = make_server(front, settings)
            about = f"{replicas} replicas, {front.rows} rows, context {front.model.context_size or 'any'}"
        elif one and not adapters:
            engine = ending.enter_context(how.engine(how.load(names[0])))
            server = make_server(engine, settings)
            about = f"{engine.rows} rows, context {engine.model.context_size or 'any'}"
        else:
            made = adapted_sources(names[0], adapters, how) if adapters else sources(names, how)
            records = None
            if store is not None and lasts:
                records = PatientRecords(ending.enter_context(closing(open_records(store))))
            server = make_server(ModelPool(made, settings, max_loaded, unload_after, records), settings)
            about = f"{len(made)} models, each by its name in /v1/models"
        server.ready = lambda port: note(banner(settings, port, about))
        # Loaded objects stay: a full collection that looks at them all holds up every stream for a fifth of a second.
        gc.collect()
        gc.freeze()
        with suppress(SystemExit):  # uvicorn's, where it could not start and has said why
            server.run()
    if (lost := server.failure) is not None:
        raise lost
    if not server.started:
        raise OSError(f"cannot serve on {host}:{port}")


def check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before a model is loaded for nothing. Raises `OSError`."""
    try:
        for family, kind, number, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, number) as probe:
                if os.name == "posix":  # as servers do: one that has just ended there does not count
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:  # a host may have addresses of other families
            return
        hint = "; --port 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}{hint}") from None


def banner(settings: object, port: int, about: str) -> str:
    """Summary of the model served, its address, and the settings of a client."""
    from lmstate.serve import Settings

    assert isinstance(settings, Settings)
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    base = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    key = "YOUR_KEY" if settings.api_keys else "none"
    auth = f" -H 'Authorization: Bearer {key}'" if settings.api_keys else ""
    alias = "" if "*" in settings.aliases else "  (Claude Code asks for models of other names: --alias '*')"
    return "\n".join(
        (
            f"{settings.model_name} at {base} ({about}, {'with an API key' if settings.api_keys else 'no API key'})",
            f"  In a browser       {base}/",
            f"  OpenAI clients     OPENAI_BASE_URL={base}/v1 OPENAI_API_KEY={key}",
            f"  Anthropic clients  ANTHROPIC_BASE_URL={base} ANTHROPIC_API_KEY={key}{alias}",
            f'  curl {base}/v1/chat/completions{auth} -d \'{{"messages": [{{"role": "user", "content": "Hello"}}]}}\'',
        )
    )
