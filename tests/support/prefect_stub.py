"""The few answers of Prefect's API that a command asks for, over real HTTP; the real server is in tests/integration."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class PrefectStub:
    """Runs by id with their state type, and the forms that were handed to them."""

    def __init__(self) -> None:
        self.runs: dict[str, str] = {}
        self.forms: list[tuple[str, dict[str, str]]] = []
        self.locked = 0
        """Requests that get a 503 first."""
        self.auth = ""
        self.rejects = ""
        """Reason for which a resume is rejected."""
        self.on_resume: Callable[[str, dict[str, str]], None] = lambda _run, _form: None
        self.url = ""

    def answer(self, method: str, path: str, body: Any, auth: str) -> tuple[int, Any]:
        """Status and content of one request."""
        if self.locked:
            self.locked -= 1
            return 503, {"detail": "database is locked"}
        if self.auth and auth != "Basic " + base64.b64encode(self.auth.encode()).decode():
            return 401, {"detail": "Unauthorized"}
        parts = path.removeprefix("/api/").split("/")
        if parts == ["flow_runs", "filter"]:
            return 200, [self._run(run) for run in self.runs]
        if parts[1] not in self.runs:
            return 404, {"detail": "Flow run not found"}
        return (200, self._run(parts[1])) if method == "GET" else self._resume(parts[1], body["run_input"])

    def _run(self, run: str) -> dict[str, Any]:
        return {"id": run, "state": {"type": self.runs[run], "name": self.runs[run].title(), "message": "why"}}

    def _resume(self, run: str, form: dict[str, str]) -> tuple[int, Any]:
        if self.runs[run] != "PAUSED":
            return 200, {"status": "ABORT", "details": {"reason": "Cannot resume a flow run that is not paused."}}
        if self.rejects:
            return 200, {"status": "REJECT", "details": {"reason": self.rejects}}
        self.forms.append((run, form))
        self.on_resume(run, form)
        return 201, {"status": "ACCEPT", "details": {}}


@contextmanager
def prefect_stub() -> Iterator[PrefectStub]:
    """One that listens on loopback for as long as the block lasts."""
    stub = PrefectStub()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            status, content = stub.answer(self.command, self.path, body, self.headers.get("Authorization", ""))
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_port}/api"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
