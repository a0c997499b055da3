"""`lmstate cluster`: replicas of a model on a Ray cluster, and the replicas of a server that runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from lmstate.cli import options
from lmstate.cli.local import Url, asked
from lmstate.cli.output import note, table

if TYPE_CHECKING:
    from lmstate.cluster.application import AppSpec

SERVER = "http://127.0.0.1:8080"
COLUMNS = ("rank", "process", "takes", "waiting", "reading", "answering", "sessions", "hit rate", "seconds to wait")

cluster = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run and manage replicas of a model on Ray.")

Store = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="Store that all replicas share. Without one there are no sessions."),
]
Replicas = Annotated[int, typer.Option("--replicas", min=1, help="Number of engines, each in a process of its own.")]
Parallel = Annotated[
    int, typer.Option("--parallel", metavar="N", min=1, help="Processes on the CPU that split a replica's weights.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Another engine option: weights, rows, memory, threads, kv_bits, ... Repeatable.",
    ),
]


@cluster.command("status")
def status(
    url: Url = SERVER,
    session: Annotated[
        str | None, typer.Option("--session", help="Show which replica answered this session last.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the replicas of a server: load, sessions, hit rate.

    \b
    Examples:
      lmstate cluster status
      lmstate cluster status --url http://10.0.0.7:8000 --session notes
    """
    where = f"{url.rstrip('/')}/v1/replicas"
    told = asked(where if session is None else f"{where}?session={quote(session, safe='')}")
    if as_json:
        print(json.dumps(told))
        return
    table(f"Replicas of {url}", COLUMNS, [row(replica) for replica in told.get("data", ())])
    if session is not None:
        rank = told["session"]["rank"]
        print(f"session {session}: {'on no replica that this server knows' if rank is None else f'replica {rank}'}")


def row(replica: dict[str, Any]) -> list[str]:
    """The cells of a replica."""
    rate, wait = replica["hit_rate"], replica["first_token"]
    return [
        str(replica["rank"]),
        str(replica["pid"]),
        "yes" if replica["takes"] else "no",
        *(str(replica[name]) for name in ("waiting", "reading", "answering", "sessions")),
        "-" if rate is None else f"{100 * rate:.0f} %",
        "-" if wait is None else f"{wait:.1f}",
    ]


@cluster.command("drain")
def drain(
    rank: Annotated[str, typer.Argument(metavar="RANK|all", help="Rank of the replica in `status`, or all.")],
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, max=600, help="Time for running answers to end; the others move.")
    ] = 0.0,
    url: Url = SERVER,
) -> None:
    """Drain replicas and let Ray replace them.

    Answers end or move to another replica, and sessions are stored first.

    `all` drains one replica after another; each waits until the previous one is replaced.

    \b
    Examples:
      lmstate cluster drain 1 --seconds 30
      lmstate cluster drain all
    """
    from lmstate.cluster.rolling import drain_all, drain_one

    def ask(path: str, body: dict[str, Any] | None = None, wait: float = 0.0) -> dict[str, Any]:
        return asked(f"{url.rstrip('/')}{path}", body, wait)

    if rank != "all" and not rank.isdecimal():
        raise typer.BadParameter(f"{rank!r} is not a rank; give a number that `lmstate cluster status` shows, or all")
    ranks = drain_all(ask, seconds) if rank == "all" else iter([drain_one(ask, int(rank), seconds)])
    unstored = [drained for drained, stored in _told(ranks) if not stored]
    if unstored:
        raise RuntimeError(f"the store did not take all that replicas {unstored} had computed; sessions are complete")


def _told(ranks: Any) -> Any:
    for drained, stored in ranks:
        note(f"replica {drained} was drained")
        yield drained, stored


@cluster.command("deploy")
def deploy(
    model: options.ModelName,
    address: Annotated[
        str, typer.Option("--cluster", metavar="ADDRESS", envvar="RAY_ADDRESS", help="The Ray cluster, HOST:PORT.")
    ],
    store: Store = None,
    replicas: Replicas = 2,
    host: Annotated[
        str, typer.Option("--host", help="Address that its nodes listen on; any but loopback needs an API key there.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    name: Annotated[str, typer.Option("--name", help="Name of the application on Ray Serve.")] = "lmstate",
    parallel: Parallel = 1,
    settings: Set = None,
) -> None:
    """Start replicas and their front on a Ray cluster.

    They keep running when the command ends. `lmstate serve --replicas` needs no cluster.

    \b
    Examples:
      lmstate cluster deploy smollm2 --cluster 127.0.0.1:6379 --store redis://10.0.0.9 --replicas 4
    """
    from lmstate.cluster.ray_cluster import check_ray

    spec = _spec(model, store, settings, replicas=replicas, parallel=parallel, host=host)
    check_ray()
    from lmstate.cluster.application import run_app

    with options.usage():
        spec.settings()
        note(f"{model} is served at {run_app(spec, address, port, name)} by {replicas} replicas")


@cluster.command("yaml")
def yaml(
    model: options.ModelName,
    store: Store = None,
    replicas: Replicas = 2,
    max_replicas: Annotated[
        int | None, typer.Option("--max-replicas", min=1, help="Scale up to this many replicas when prompts wait.")
    ] = None,
    image: Annotated[str, typer.Option("--image", help="Container image with lmstate[ray].")] = "lmstate:latest",
    name: Annotated[str, typer.Option("--name", help="Name of the service.")] = "lmstate",
    pod_memory: Annotated[str, typer.Option("--pod-memory", metavar="SIZE", help="Memory per pod.")] = "16Gi",
    parallel: Parallel = 1,
    settings: Set = None,
) -> None:
    """Print a RayService for KubeRay, with a network policy.

    Each pod has one engine.

    \b
    Examples:
      lmstate cluster yaml smollm2 --store redis://redis:6379 --max-replicas 8 > service.yaml
    """
    from lmstate.cluster.manifest import Pods, manifest

    settings = [f"fronts={min(2, replicas)}", *(settings or ())]
    spec = _spec(model, store, settings, replicas=replicas, max_replicas=max_replicas, parallel=parallel)
    with options.usage():
        print(manifest(spec, Pods(name, image, pod_memory)), end="")


def _spec(model: str, store: str | None, settings: list[str] | None, **more: Any) -> AppSpec:
    """Raises `typer.BadParameter` for wrong options."""
    from lmstate.cluster.application import AppSpec

    given, own = dict[str, Any](), {"model": model, "store": store, **more}
    for text in settings or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"--set is NAME=VALUE, as kv_bits=8; {text!r} was given")
        if name in own:
            raise typer.BadParameter(f"--set {text} was given; {name} is not one of its names: the command asks for it")
        given[name] = value
    with options.usage():
        return AppSpec.of({**given, **own})
