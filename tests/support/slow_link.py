"""A bad network between a client and one TCP server: narrow, stalling, cut off. Everything on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Self
from urllib.parse import urlsplit

CHUNK = 1 << 16


class SlowLink:
    """Passes connections on to a server; tests change its attributes while it runs.

    Args:
        server: ``http://host:port`` that it leads to.
    """

    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        self._server = (parts.hostname or "", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.reset()

    def reset(self) -> None:
        """A perfect network again, with nothing counted."""
        self.bytes_per_s: float | None = None
        """Upstream width."""
        self.stall_s = 0.0
        """How long the next request is held up, once."""
        self.cut_uploads_after: int | None = None
        """Bytes of a connection's uploads after which it is closed, once."""
        self.cut_downloads_after: int | None = None
        self.requests: list[str] = []
        """Methods, in the order of their requests."""

    @property
    def url(self) -> str:
        """Address to give to clients."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        for end in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                threading.Thread(target=self._up, args=(client, server), daemon=True).start()
                threading.Thread(target=self._down, args=(server, client), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := client.recv(CHUNK):
                method = data[:8].partition(b" ")[0]
                if method in (b"PUT", b"GET"):
                    self.requests.append(method.decode())
                    stall, self.stall_s = self.stall_s, 0.0
                    time.sleep(stall)
                if self.bytes_per_s is not None:
                    time.sleep(len(data) / self.bytes_per_s)
                server.sendall(data)
                sent += len(data)
                if self.cut_uploads_after is not None and sent >= self.cut_uploads_after:
                    self.cut_uploads_after = None
                    break
        _close(client, server)

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := server.recv(CHUNK):
                client.sendall(data)
                sent += len(data)
                if self.cut_downloads_after is not None and sent >= self.cut_downloads_after:
                    self.cut_downloads_after = None
                    break
        _close(client, server)


def _close(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
