"""A proxy before a server that now and then throttles, fails or loses an answer after the work was done. Seeded."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = {429: "too many tries", 500: "branch is currently locked", 503: "slow down"}
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class FlakyProxy:
    """Forwards to ``upstream``; each request fails with probability ``rate``, half of these after it was done.

    ``answered`` counts the faults by status.
    """

    def __init__(self, upstream: str, rate: float, seed: int) -> None:
        self.upstream, self.rate = urlsplit(upstream).netloc, rate
        self.answered: Counter[int] = Counter()
        self._rng, self._lock = random.Random(seed), threading.Lock()

    @contextmanager
    def running(self) -> Iterator[str]:
        """Address while it runs."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.handle(self)

            do_POST = do_PUT = do_DELETE = do_HEAD = do_GET  # noqa: N815  # names that http.server looks for

            def log_message(self, format: str, *args: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """One request: refused, done, or done and then denied."""
        body = _body(request)
        with self._lock:
            fault = self._rng.choice(sorted(FAULTS)) if self._rng.random() < self.rate else None
            done = fault is None or self._rng.random() < 0.5
            self.answered.update([fault] if fault else [])
        status, headers, payload = self._forward(request, body) if done else (0, [], b"")
        if fault is not None:
            status, headers = fault, [("Content-Type", "application/json")]
            payload = json.dumps({"message": FAULTS[fault]}).encode()
        request.send_response(status)
        for name, value in _own(headers).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(payload)))
        request.end_headers()
        request.wfile.write(payload)

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        try:
            connection.request(request.command, request.path, body, _own(request.headers.items()))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


def _own(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers that are not about one connection alone."""
    return {name: value for name, value in headers if name.lower() not in _HOP}


def _body(request: BaseHTTPRequestHandler) -> bytes:
    if request.headers.get("Transfer-Encoding") != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length", 0)))
    chunks = []
    while size := int(request.rfile.readline(), 16):
        chunks.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return b"".join(chunks)
