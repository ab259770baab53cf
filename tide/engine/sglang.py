"""The engine port over HTTP, for an SGLang server with the tide plugin inside.

Owns routes, bodies, timeouts and the translation of failures; what an answer means is in ``sglang_answers``. Knows
nothing of verdicts, rollouts or draft files.

Answers come by ``/v1/chat/completions``: it takes messages, so that the chat template is the server's business and its
version, and with ``return_meta_info`` it returns the same counters as ``/generate``, which would need a tokenizer here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from tide.domain import PROBE_SLICE
from tide.engine.base import Engine, EngineFacts, Generation, Speculation, SwapResult
from tide.engine.sglang_answers import read_facts, read_generation, read_reason, read_speculation
from tide.errors import EngineError, EngineUnavailable, SwapRefused

CONTINUE_ATTEMPTS = 5
PROBE, PROBE_TOKENS = {"role": "user", "content": "Count from one to ten."}, 8
_UNAVAILABLE = (429, 502, 503, 504)


class _KeyRefused(SwapRefused):
    """The server does not take our key; whatever was asked has not happened."""


class SglangEngine(Engine):
    """One SGLang server.

    Args:
        url: for example ``http://127.0.0.1:30000``.
        name: name of the replica; host and port when not given.
        admin_key: the server's ``--admin-api-key``; swapping, pausing and flushing need it.
        generate_timeout_s: for one answer.
        control_timeout_s: for every other call.
        health_timeout_s: a healthy server generates a token within this time. The server's own limit is 20 s, and a
            burst of long prefills must not look like a dead scheduler.
        transport: stands in for the network in tests.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        admin_key: str = "",
        generate_timeout_s: float = 600.0,
        control_timeout_s: float = 30.0,
        health_timeout_s: float = 25.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = httpx.URL(url)
        self._name = name or f"{self._url.host}:{self._url.port}"
        self._generate_timeout, self._health_timeout = generate_timeout_s, health_timeout_s
        headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        # The answers of our own server never go by a proxy that the environment names.
        self._client = httpx.Client(
            base_url=self._url, headers=headers, timeout=control_timeout_s, transport=transport, trust_env=False
        )

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()

    @property
    def name(self) -> str:
        """Name of the replica, unique in the service."""
        return self._name

    def check_health(self) -> None:
        """Raises EngineUnavailable unless the scheduler generates: a web server may answer for an hour without one."""
        self._call("GET", "/health_generate", timeout=self._health_timeout)

    def facts(self) -> EngineFacts:
        """Identity, speculation settings, active draft and capture counters.

        Raises:
            EngineError: no plugin in this server, or one of another version.
        """
        info, tide = self._server_info()
        return read_facts(self.name, info, tide)

    def speculation(self) -> Speculation:
        """How it decodes; an engine without the plugin says so too."""
        return read_speculation(self._call("GET", "/server_info").json())

    def generate(
        self,
        messages: Sequence[dict[str, str]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        conversation: str | None = None,
        slice: str | None = None,
        no_logs: bool = False,
        ignore_eos: bool = False,
        request: str | None = None,
    ) -> Generation:
        """Answer one chat. ``conversation``, ``slice`` and ``no_logs`` reach the tap as ``custom_params.tide``."""
        params = {"conversation": conversation, "slice": slice, "no_logs": no_logs}
        return self._chat(messages, params, max_new_tokens, temperature, ignore_eos, request, self._generate_timeout)

    def probe(self, *, timeout_s: float) -> Generation:
        """A short answer that TIDE itself asks for, to see that the replica generates, and with verify steps."""
        params = {"slice": PROBE_SLICE, "no_logs": True}
        return self._chat([PROBE], params, PROBE_TOKENS, 0.0, True, None, timeout_s)

    def _chat(
        self,
        messages: Sequence[dict[str, str]],
        params: Mapping[str, Any],
        max_new_tokens: int,
        temperature: float,
        ignore_eos: bool,
        request: str | None,
        timeout_s: float,
    ) -> Generation:
        tide = {name: value for name, value in params.items() if value is not None}
        body = {
            "model": "default",
            "messages": list(messages),
            "max_completion_tokens": max_new_tokens,
            "temperature": temperature,
            "ignore_eos": ignore_eos,
            "custom_params": {"tide": tide},
            "return_meta_info": True,
            "return_output_ids_in_sglext": True,
        }
        if request is not None:
            body["rid"] = request
        started = time.perf_counter()
        answer = self._call("POST", "/v1/chat/completions", body, timeout=timeout_s).json()
        return read_generation(answer, time.perf_counter() - started)

    def active_draft(self) -> str:
        """Digest of the draft in serving, or ``none``."""
        return str(self._server_info()[1]["draft"])

    def swap_draft(self, digest: str) -> SwapResult:
        """Replace the draft while serving: pause in place, swap, continue. Continue always happens.

        Raises:
            SwapRefused: the draft in serving is unchanged; the message has the engine's reason.
            EngineUnavailable: no answer; the swap may have happened: ask ``active_draft``.
        """
        started, paused = time.perf_counter(), True
        try:
            # A pause whose answer was lost may have happened all the same; only a refused key has surely not paused.
            try:
                self._call("POST", "/pause_generation", {"mode": "in_place"}, refused=SwapRefused)
            except _KeyRefused:
                paused = False
                raise
            body = {"model_path": digest, "manifest": {"selector": "draft"}, "flush_cache": False}
            message = self._call("POST", "/update_weights_from_disk", body, refused=SwapRefused).json()["message"]
        finally:
            if paused:
                self._continue()
        seconds = time.perf_counter() - started
        try:
            outcome = json.loads(message)
            return SwapResult(before=outcome["before"], after=outcome["after"], seconds=seconds)
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"{self.name}: weights were updated, but not by the tide plugin (answer: {message[:200]!r}); "
                "install tide beside the engine, set TIDE_DRAFT_DIR, and restart it"
            ) from error

    def set_capture_rate(self, rate: float) -> None:
        """Capture the states of this share of the requests that arrive from now on, 0 to 1. Needs the admin key."""
        taken = self._call("POST", "/set_internal_state", {"server_args": {"tide_sample_rate": rate}}).json()
        if not (isinstance(taken, list) and taken and all(taken)):
            raise EngineError(
                f"{self.name}: a capture rate of {rate} was refused (answer: {str(taken)[:80]}): it takes 0 to 1, and "
                "only where the tide plugin captures (TIDE_SPOOL_DIR); the server's log says more"
            )

    def flush_cache(self) -> None:
        """Drop the prefix cache; only an idle replica can, others raise EngineError."""
        self._call("POST", "/flush_cache")

    def _server_info(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The server's answer, and the plugin's part of it; ranks that differ in the draft are an error."""
        info = self._call("GET", "/server_info").json()
        states = [state.get("tide") for state in info.get("internal_states") or []]
        if not states or not all(isinstance(state, dict) and "draft" in state for state in states):
            raise EngineError(
                f"{self.name}: no tide plugin in this engine: install tide beside it, and set TIDE_SPOOL_DIR "
                "or TIDE_DRAFT_DIR"
            )
        drafts = sorted({str(state["draft"]) for state in states})
        if len(drafts) > 1:
            raise EngineError(f"{self.name}: its ranks serve different drafts ({', '.join(drafts)}): restart it")
        return info, states[0]

    def _continue(self) -> None:
        """Tried several times: a replica that stays paused answers nobody."""
        failure: EngineError | None = None
        for attempt in range(CONTINUE_ATTEMPTS):
            try:
                self._call("POST", "/continue_generation", {})
            except EngineError as error:
                failure = error
                time.sleep(0.1 * 2**attempt)
            else:
                return
        raise EngineUnavailable(
            f"{self.name}: may still be paused after a swap: POST /continue_generation ({failure})"
        ) from failure

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        refused: Callable[[str], EngineError] = EngineError,
    ) -> httpx.Response:
        limit = httpx.USE_CLIENT_DEFAULT if timeout is None else timeout
        try:
            response = self._client.request(method, path, json=body, timeout=limit)
        except httpx.TransportError as error:
            raise EngineUnavailable(f"{self.name}: {method} {path}: {type(error).__name__}: {error}") from error
        if response.status_code in _UNAVAILABLE:
            raise EngineUnavailable(f"{self.name}: {method} {path}: {response.status_code} {read_reason(response)}")
        if response.status_code in (401, 403):
            raise _KeyRefused(
                f"{self.name}: {path}: the admin key was refused; it must be the engine's --admin-api-key"
            )
        if not response.is_success:
            raise refused(f"{self.name}: {path}: {response.status_code} {read_reason(response)}")
        return response
