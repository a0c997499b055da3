"""Pictures, sounds and videos as clients send them: in a data URL, or at an address that the server allows."""

from __future__ import annotations

import base64
import re
import socket
import ssl
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from ipaddress import ip_address
from time import monotonic
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from lmstate.serve.wire.errors import ApiError
from lmstate.vision.pictures import MOST_BYTES
from lmstate.vision.video_files import MOST_BYTES as MOST_VIDEO_BYTES
from lmstate.vision.videos import MOST_FRAMES

SOUND = "data:audio/wav;base64,"  # how a sound's URL begins
DATA = re.compile(rf"data:image/[a-z0-9.+-]+(?:;[a-z0-9=._-]+)*;base64,|{SOUND}", re.IGNORECASE)
VIDEO = re.compile(r"data:video/([a-z0-9.+-]+)((?:;[a-z0-9=._-]+)*)(;base64,)", re.IGNORECASE)
FRAMES = "jpeg"  # the kind of a video that is a list of pictures, parted by commas
FRAMES_FPS = 1.0  # of such a list without its own
MOST_REDIRECTS = 3
SECONDS = 10.0  # that a picture may take to come, redirects included
PIECE = 2**16  # bytes that are read at a time
PORTS = {"http": 80, "https": 443}


def picture_bytes(url: str, hosts: Sequence[str]) -> bytes:
    """The file that a URL has or names. Raises `ApiError`.

    `hosts`: those that pictures may come from: "example.com", "*.example.com", or "*" for all public ones.
    """
    if url[:5].lower() == "data:":
        return _data(url)
    until = monotonic() + SECONDS
    for _ in range(MOST_REDIRECTS + 1):
        content, location = _fetched(url, hosts, until)
        if location is None:
            return content
        url = urljoin(url, location)
    raise _refused(url, f"it was redirected more than {MOST_REDIRECTS} times")


def video_part(url: str) -> dict[str, Any]:
    """The video of a data URL as a part of a message, see `read_video`. Raises `ApiError`.

    `data:video/mp4;base64,...` is a file, and `data:video/jpeg;base64,...,...` a list of frames, as in vLLM. `;fps=4`
    in front of `;base64` says how many frames to take of a file for each second, or how many a list has.
    """
    head = VIDEO.match(url)
    if head is None:
        raise ApiError(f"a video is given as {url[:60]!r}; send it in a data URL: data:video/mp4;base64,...")
    told = dict(each.partition("=")[::2] for each in head[2].lower().split(";"))
    is_list = head[1].lower() == FRAMES
    part: dict[str, Any] = {"type": "video"}
    if is_list or "fps" in told:
        try:
            part["fps"] = float(told.get("fps", FRAMES_FPS))
        except ValueError:
            raise ApiError(f"fps of a video is {told['fps'][:20]!r}; it is a number") from None
    if is_list:
        given = url[head.end() :].split(",", MOST_FRAMES + 1)
        return {**part, "video": [_decoded(each, "a frame of a video", MOST_BYTES) for each in given]}
    return {**part, "video": _decoded(url[head.end() :], "a video", MOST_VIDEO_BYTES)}


def _data(url: str) -> bytes:
    head = DATA.match(url)
    if head is None:
        raise ApiError(f"a picture is given as {url[:60]!r}; a data URL is data:image/png;base64,...")
    return _decoded(url[head.end() :], "a picture", MOST_BYTES)


def _decoded(data: str, what: str, most: int) -> bytes:
    if (size := 3 * len(data) // 4) > most:
        raise ApiError(f"{what} has {size} bytes; it may have {most}", 413)
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:  # also for letters outside of ASCII
        raise ApiError(f"the data of {what} is not base64: {error}") from None


def _fetched(url: str, hosts: Sequence[str], until: float) -> tuple[bytes, str | None]:
    """(what is at an address, where it is instead)."""
    try:
        place = urlsplit(url)
        port = place.port or PORTS.get(place.scheme, 0)
    except ValueError:
        raise _refused(url, "it is not a URL") from None
    if place.scheme not in PORTS or not place.hostname or place.username is not None:
        raise _refused(url, "give a data URL, or one of http or https without a user")
    try:
        with closing(_connected(place, port, hosts, until)) as connection:
            target = (place.path or "/") + (f"?{place.query}" if place.query else "")
            connection.request("GET", target, headers={"accept": "image/*", "accept-encoding": "identity"})
            with closing(connection.getresponse()) as response:
                if response.status in (301, 302, 303, 307, 308):
                    return b"", response.headers.get("location") or ""
                if response.status != 200:
                    raise _refused(url, f"it was answered with status {response.status}")
                return _read(url, response, until), None
    except (OSError, HTTPException, UnicodeError, ValueError) as error:
        raise _refused(url, f"it cannot be read: {type(error).__name__}") from None


def _connected(place: SplitResult, port: int, hosts: Sequence[str], until: float) -> HTTPConnection:
    """A connection to a host that is allowed, by an address that is looked up once and checked."""
    host = (place.hostname or "").rstrip(".")
    if not _is_allowed(host, hosts):
        raise _refused(place.geturl(), "send it in a data URL, or have --allow-image-urls name its host")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    address = str(found[0][4][0])
    # A host that is named by its address is one that the server's owner means, wherever it is.
    if host not in hosts or host != address:
        for one in found:
            if not _is_public(str(one[4][0])):
                raise _refused(place.geturl(), "its host has an address that is not public")
    connected = socket.create_connection((address, port), timeout=max(0.1, until - monotonic()))
    if place.scheme == "http":
        connection = HTTPConnection(host, port)
        connection.sock = connected
        return connection
    context = ssl.create_default_context()
    try:
        secure = HTTPSConnection(host, port, context=context)
        secure.sock = context.wrap_socket(connected, server_hostname=host)
    except BaseException:
        connected.close()
        raise
    return secure


def _is_allowed(host: str, hosts: Sequence[str]) -> bool:
    return any(
        host == one or one == "*" or (one.startswith("*.") and host.endswith(one[1:])) for one in map(str.lower, hosts)
    )


def _is_public(address: str) -> bool:
    known = ip_address(address.partition("%")[0])
    mapped = getattr(known, "ipv4_mapped", None) or known
    return mapped.is_global and not mapped.is_multicast


def _read(url: str, response: HTTPResponse, until: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := response.read1(PIECE):
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise _refused(url, f"it has more than {MOST_BYTES} bytes")
        if monotonic() > until:
            raise _refused(url, f"it took more than {SECONDS:g} seconds")
    return b"".join(parts)


def _refused(url: str, why: str) -> ApiError:
    return ApiError(f"the picture at {url[:100]!r} was not read: {why}")
