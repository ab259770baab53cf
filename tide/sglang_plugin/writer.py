"""The writer thread: takes rows and ends of requests from the scheduler, assembles requests, fills the spool.

Owns everything that is slow: copying rows into the store, cutting runs, sketches, files. The scheduler only offers
items to the inbox; what does not fit is dropped and counted. Knows nothing of SGLang.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from tide.domain import ShardRequest, Split
from tide.sglang_plugin.admission import length_bucket
from tide.sglang_plugin.counters import CaptureCounters
from tide.sglang_plugin.inbox import Inbox
from tide.sglang_plugin.records import DropAll, Evict, FinishedRequest, StepRows
from tide.sglang_plugin.sketch import pooled_state, script_of, token_sketch
from tide.sglang_plugin.spool import Spool
from tide.sglang_plugin.store import RowStore, Run
from tide.states.requests import request_row
from tide.states.shards import RequestStates

logger = logging.getLogger("tide.capture")

_TICK_S = 1.0
_SCRIPT_TOKENS = 128


class SpoolWriter:
    """One daemon thread between the tap and the spool.

    Args:
        inbox: where the scheduler offers ``StepRows``, ``FinishedRequest``, ``DropAll`` and ``Evict``.
        store: rows of unfinished requests; used by this thread only.
        open_spool: makes the spool; called in the thread, because the target's digest may take a while.
        bounds: shortest and longest request kept, in tokens.
        on_tick: called about once a second (metrics).
        on_failure: called once when the thread must end; it must not raise.
    """

    def __init__(
        self,
        *,
        inbox: Inbox,
        store: RowStore,
        counters: CaptureCounters,
        open_spool: Callable[[], Spool],
        bounds: tuple[int, int],
        idle_evict_s: float,
        on_tick: Callable[[], None] = lambda: None,
        on_failure: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        self._inbox, self._store, self._counters = inbox, store, counters
        self._open_spool, self._bounds, self._idle = open_spool, bounds, idle_evict_s
        self._on_tick, self._on_failure = on_tick, on_failure
        self._full: set[int] = set()
        self._stopping = threading.Event()
        self._last_tick = 0.0
        self.cpu_s = 0.0
        self._thread = threading.Thread(target=self._run, name="tide-spool", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Write what is queued and open, then end. Rows of unfinished requests are dropped and counted.

        Returns:
            False when the thread did not end within ``timeout`` seconds.
        """
        self._stopping.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            spool = self._open_spool()
            while not self._stopping.is_set():
                self._handle(spool, self._inbox.take(_TICK_S))
                self._tick(spool)
            while (item := self._inbox.take(0.0)) is not None:
                self._handle(spool, item)
            self._lose("shutdown", self._store.clear())
            spool.close()
            self._on_tick()
        except Exception as error:  # process edge: a thread that dies in silence would fill the inbox for ever
            logger.exception("tide: the spool writer failed; capture is off until the engine restarts")
            self._on_failure(error)

    def _tick(self, spool: Spool) -> None:
        now = time.monotonic()
        self._inbox.held = spool.held
        if now - self._last_tick < _TICK_S:
            return
        self._last_tick, self.cpu_s = now, time.thread_time()
        for serial, rows in self._store.evict_idle(now - self._idle).items():
            self._full.add(serial)
            self._lose("idle", rows)
        spool.close_aged()
        self._inbox.held = spool.held
        self._counters.gauge("store_bytes", self._store.size)
        self._counters.gauge("queue_bytes", self._inbox.size)
        self._on_tick()

    def _handle(self, spool: Spool, item: Any) -> None:
        match item:
            case StepRows():
                try:
                    self._keep(item)
                finally:
                    item.release()
            case FinishedRequest():
                self._finish(spool, item)
            case Evict():
                self._full.discard(item.serial)
                self._lose(item.reason, self._store.discard(item.serial))
            case DropAll():
                self._full.clear()
                self._lose(item.reason, self._store.clear())

    def _keep(self, step: StepRows) -> None:
        now = time.monotonic()
        for part in step.parts:
            rows = slice(part.row, part.row + part.count)
            if part.serial in self._full:
                self._counters.drop("store_full", part.count)
            elif not self._store.add(part.serial, part.position, step.aux[rows], step.last[rows], now):
                # Later rows would leave a gap right here: give the whole request's room to others.
                self._full.add(part.serial)
                self._lose("store_full", part.count + self._store.discard(part.serial))

    def _finish(self, spool: Spool, request: FinishedRequest) -> None:
        self._full.discard(request.serial)
        run = self._store.finish(request.serial, len(request.ids) - 1)
        kept = run if run is not None and self._worth_keeping(request, run) else None
        script = None if request.admission.opted_out else _script(request)
        if kept is not None and not spool.put(_states(request, kept, script), request.admission.split or Split.TRAIN):
            kept = None
        self._counters.add("requests")
        spool.note(_table_row(request, kept, script))

    def _worth_keeping(self, request: FinishedRequest, run: Run) -> bool:
        total, end = len(request.ids), run.first + run.aux.shape[0]
        shortest, longest = self._bounds
        if not request.admission.admitted:
            return False
        if total == request.prompt_tokens:
            self._counters.exclude("no_output")
            return False
        if not shortest <= total <= longest:
            self._counters.exclude("too_short" if total < shortest else "too_long")
            return False
        if end < request.prompt_tokens:
            self._lose("gap", run.aux.shape[0] + run.lost)
            return False
        self._lose("gap", total - 1 - end)
        self._counters.add("missing_prompt_rows", min(run.first, request.prompt_tokens))
        return True

    def _lose(self, reason: str, rows: int) -> None:
        if rows > 0:
            self._counters.drop(reason, rows)


def _states(request: FinishedRequest, run: Run, script: str | None) -> RequestStates:
    end = run.first + run.aux.shape[0]
    admission = request.admission
    return RequestStates(
        info=ShardRequest(
            request=admission.request,
            conversation=admission.conversation or "",
            slice=_slice(request, script) or "",
            draft=request.draft,
            sampling=request.sampling,
        ),
        input_ids=torch.tensor(request.ids[run.first : end], dtype=torch.int32),
        last_token=int(request.ids[end]),
        first_row=run.first,
        prompt_len=request.prompt_tokens,
        aux_hidden=run.aux,
        last_hidden=run.last,
    )


def _script(request: FinishedRequest) -> str:
    """Script of the answer: a prompt would mostly show the script of its template."""
    ids = list(request.ids[request.prompt_tokens :][:_SCRIPT_TOKENS]) or list(request.ids[-_SCRIPT_TOKENS:])
    return "unknown" if request.decode is None else script_of(request.decode(ids))


def _slice(request: FinishedRequest, script: str | None) -> str | None:
    if request.admission.opted_out:
        return request.admission.slice
    return request.admission.slice or f"{script}-{length_bucket(request.prompt_tokens)}"


def _table_row(request: FinishedRequest, run: Run | None, script: str | None) -> dict[str, Any]:
    admission, answer = request.admission, request.ids[request.prompt_tokens :]
    row = request_row(
        admission.request,
        request.started_at,
        request.finished_at,
        prompt_tokens=request.prompt_tokens,
        response_tokens=len(answer),
        cached_tokens=request.cached_tokens,
        verify_steps=request.verify_steps,
        proposed=request.proposed,
        accepted=request.accepted,
        temperature=request.temperature,
        sampling=request.sampling,
        draft=request.draft,
        finish_reason=request.finish_reason,
        captured_rows=0 if run is None else run.aux.shape[0],
        opted_out=admission.opted_out,
        slice=_slice(request, script),
    )
    if admission.opted_out:
        return row
    row |= {"conversation": admission.conversation, "split": admission.split}
    row |= {"script": script, "token_sketch": token_sketch(answer)}
    if run is not None:
        generated = max(0, request.prompt_tokens - 1 - run.first)
        row["pooled"] = pooled_state(run.last[generated:])
    return row
