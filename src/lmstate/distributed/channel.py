"""Messages between rank 0 and a follower: JSON after its length, over a socket pair."""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import Any

MAX_MESSAGE = 1 << 30
_LENGTH = struct.Struct("<I")


class RankChannel:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, *message: Any) -> None:
        """Send a list of JSON values; numbers of numpy and torch count as integers. Raises `OSError`."""
        data = json.dumps(message, default=int, separators=(",", ":")).encode()
        self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> list[Any] | None:
        """The next message; None where the other end is closed. Raises `OSError`, `ValueError`."""
        if (head := self._read(_LENGTH.size)) is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes; at most {MAX_MESSAGE} are expected")
        data = self._read(length)
        if data is None:
            return None
        message = json.loads(data)
        if not isinstance(message, list) or not message:
            raise ValueError("a message is a list that begins with a verb")
        return message

    @property
    def readable(self) -> bool:
        """Whether the other end has said something, or is closed."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def set_timeout(self, seconds: float | None) -> None:
        """Limit how long `send` and `receive` wait from now on; None: not at all."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        self._sock.close()

    def _read(self, count: int) -> bytes | None:
        parts: list[bytes] = []
        while count:
            if not (part := self._sock.recv(min(count, 1 << 20))):
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
