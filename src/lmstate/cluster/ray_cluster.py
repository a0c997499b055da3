"""A Ray that runs our replicas: one of our own on this machine, or one that is there.

Ray runs the code that it is sent, so that a cluster without a token is refused.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from time import monotonic, sleep

from lmstate.files.private import private_file

OBJECT_STORE = 100 * 2**20  # bytes; what we send is small, and Ray would take 30 % of the memory
LONGEST_FOLDER = 42  # bytes of its name: those of sockets have up to 65 more
REMOVE = 10.0  # seconds that ending processes may go on writing to their folder
AUTH_MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
# Read by processes that send or receive calls: Ray would refuse messages of 4 MiB, as long prompts are.
MESSAGES = {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**28)}
# Read by every process of the cluster: no usage statistics are sent, and handles use gRPC.
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1", **MESSAGES}


def check_ray() -> None:
    """Raises ImportError, which says what to install, where Ray is missing."""
    if find_spec("ray") is None:
        raise ImportError("several replicas need Ray: pip install 'lmstate[ray,serve]'")


def check_address(address: str, environment: Mapping[str, str]) -> None:
    """Refuse a cluster beyond this machine that takes code from all who reach it. Raises ValueError."""
    host = address.rpartition("://")[2].rpartition(":")[0].strip("[]")
    try:
        loopback = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        loopback = False
    secret = environment.get(TOKEN) or environment.get(TOKEN_PATH)
    if not loopback and not (environment.get(AUTH_MODE) == "token" and secret):
        raise ValueError(
            f"the cluster at {address} is not on this machine, and no token is set: Ray runs the code that it is sent. "
            f"Start it with {AUTH_MODE}=token, and set {AUTH_MODE}=token and {TOKEN_PATH} here"
        )


def give_token() -> None:
    """Have this process, and the cluster that it starts, use a token: of the environment, or one of its own.

    Raises RuntimeError where Ray was imported without one, which it reads only then.
    """
    if os.environ.get(AUTH_MODE) == "token" and (os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH)):
        return
    if "ray" in sys.modules:
        raise RuntimeError(f"Ray was imported without a token: set {AUTH_MODE}=token and {TOKEN_PATH} before that")
    folder = Path(tempfile.mkdtemp(prefix="lmstate-token-"))  # only its owner can enter
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    token = private_file(folder / "token")
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    os.environ.update({AUTH_MODE: "token", TOKEN_PATH: str(token)})


def refuse_ranks() -> None:
    """Raise ValueError in one of several processes that torchrun started: each would start replicas."""
    from lmstate.distributed.given import given_ranks

    if (ranks := given_ranks()) > 1:
        raise ValueError(
            f"replicas were asked for in each of {ranks} processes that torchrun started (WORLD_SIZE={ranks}): run the "
            "command without torchrun. Ray starts the replicas, and each replica starts its --parallel processes"
        )


def make_folder() -> Path:
    """Make a folder for a Ray, that only its owner can enter.

    Ray has sockets below it, whose names may have 107 bytes: where TMPDIR is long, as on a Mac, the folder is in /tmp.
    """
    prefix, place = "lmstate-ray-", Path(tempfile.gettempdir())
    if len(os.fsencode(place / f"{prefix}12345678")) > LONGEST_FOLDER:
        place = Path("/tmp")
    return Path(tempfile.mkdtemp(prefix=prefix, dir=place))


class RayCluster:
    """A connection to Ray, the only one of a process."""

    def __init__(self, address: str | None = None, *, cpus: int | None = None) -> None:
        """`address`: of a running cluster; None starts one here, that has `cpus` processors and ends with this one."""
        check_ray()
        refuse_ranks()
        self._folder: Path | None = None
        os.environ.update(SETTINGS)
        if address is None:
            give_token()
            self._folder = make_folder()
            # Ray registers the end of its processes after this, so that it runs before.
            atexit.register(remove_folder, self._folder)
        else:
            check_address(address, os.environ)
        try:
            self._connect(address, cpus)
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None, cpus: int | None) -> None:
        import ray

        if ray.is_initialized():
            raise RuntimeError("this process is connected to a Ray cluster already: end that with ray.shutdown() first")
        if self._folder is None:
            ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
            return
        ray.init(
            "local",
            num_cpus=cpus,
            object_store_memory=OBJECT_STORE,
            include_dashboard=False,
            dashboard_host="127.0.0.1",
            log_to_driver=False,
            logging_level=logging.WARNING,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self._folder),
        )

    def close(self) -> None:
        """Leave the cluster; one of our own ends. Harmless if it was closed."""
        if "ray" in sys.modules:
            import ray

            ray.shutdown()
        if self._folder is not None:
            remove_folder(self._folder)


def remove_folder(folder: Path, seconds: float = REMOVE) -> None:
    """Remove the folder of a Ray and end its remaining processes, within `seconds`.

    A Ray that was interrupted while it started ends some of them later, or never, and they make the folder again.
    """
    until = monotonic() + seconds
    while monotonic() < until:
        left = processes_of(folder)
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        if not left and not folder.exists():
            return
        sleep(0.05)


def processes_of(folder: Path) -> list[int]:
    """The processes that have a folder's name in their command lines; none where the system has no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if os.fsencode(folder) in path.read_bytes():
                found.append(int(path.parent.name))
    return found
