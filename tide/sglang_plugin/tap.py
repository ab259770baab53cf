"""The tap: follows requests through the scheduler and sends the rows of their accepted tokens to the writer.

Owns the positions: which row of which forward pass belongs to which token of which request. It uses SGLang's own
carrier ``auxiliary_device_output``: rows leave the device with the step's other results, and ``consume`` is called once
the step's tokens are committed, so that which drafts were accepted is known without a synchronisation. Everything
runs on the scheduler's thread and is short; an exception switches the tap off and never reaches the scheduler.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from tide.sglang_plugin.admission import Admitter, RequestFacts
from tide.sglang_plugin.carrier import CarriedRows, DeviceRows, attach
from tide.sglang_plugin.counters import CaptureCounters
from tide.sglang_plugin.ending import describe
from tide.sglang_plugin.guard import guarded
from tide.sglang_plugin.inbox import Inbox
from tide.sglang_plugin.records import DropAll, Evict, OpenRequest, Part, Span
from tide.sglang_plugin.staging import OwnStaging, Stage, Staging, fill, fill_at

logger = logging.getLogger("tide.capture")

MAX_OPEN = 65_536
"""Requests followed at once; beyond it the oldest is forgotten (it ended in a way that the tap did not see)."""


class Tap:
    """One tap of one scheduler process.

    Args:
        prompt_rows: prompt rows kept of a training conversation.
        draft: digest in serving and the number of swaps so far.
        draft_tokens: tokens verified in a step, None when that changes while running.
        decode: ids -> text, None without a tokenizer.
        staging: where rows go on the device.
    """

    def __init__(
        self,
        *,
        admitter: Admitter,
        inbox: Inbox,
        counters: CaptureCounters,
        prompt_rows: int,
        draft: Callable[[], tuple[str, int]],
        draft_tokens: int | None,
        decode: Callable[[list[int]], str] | None = None,
        staging: Staging | None = None,
    ) -> None:
        self._staging: Staging = staging or OwnStaging()
        self.admitter, self.counters = admitter, counters
        self._inbox, self._prompt_rows, self._draft = inbox, prompt_rows, draft
        self._draft_tokens, self._decode = draft_tokens, decode
        self._open: dict[str, OpenRequest] = {}
        self._serials = itertools.count(1)
        self.enabled = True
        self.off_reason: str | None = None
        self.cpu_s = 0.0
        counters.gauge("enabled", 1)

    def switch_off(self, where: str, error: BaseException | None) -> None:
        """Stop capturing for good; serving goes on."""
        if not self.enabled:
            return
        self.enabled, self.off_reason = False, f"{where}: {error!r}" if error is not None else where
        self.counters.gauge("enabled", 0)
        self.counters.add("failures")
        self._open.clear()
        self._inbox.offer(DropAll("tap_off"), 0, urgent=True)
        logger.error("tide: capture is off until the engine restarts: %s", self.off_reason, exc_info=error)

    @guarded
    def target_changed(self, reason: str) -> None:
        """The target's weights were updated: rows of two models must not meet, and its identity is unknown now."""
        self._inbox.offer(DropAll("target_update"), 0, urgent=True)
        self.switch_off(f"the target model changed ({reason}); restart the engine to capture the new one", None)

    @guarded
    def arrived(self, request: Any, facts_of: Callable[[Any], RequestFacts]) -> None:
        """A request reached the scheduler: decide, before any row exists."""
        facts = facts_of(request)
        admission = self.admitter.decide(facts)
        if admission.reason is not None:
            self.counters.exclude(admission.reason)
        if len(self._open) >= MAX_OPEN:
            oldest = self._open.pop(next(iter(self._open)))
            self._inbox.offer(Evict(oldest.serial, "forgotten"), 0, urgent=True)
        draft, swaps = self._draft()
        self._open[facts.rid] = OpenRequest(next(self._serials), admission, time.time(), draft, swaps)

    @guarded
    def prefilled(self, batch: Any, result: Any) -> None:
        """A target prefill was launched: take the prompt rows that will be kept, and hang them on the result."""
        if result.logits_output is None or not batch.forward_mode.is_extend():
            return
        spans, ranges, start, total = [], [], 0, 0
        for req, prefix, extend in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            low = max(prefix, self._first_row(req))
            count = prefix + extend - low
            request = self._tapped(req)
            if request is not None and count > 0:
                spans.append(Span(req.rid, request.serial, "prefill", total, count, low, prefix + extend))
                ranges.append((start + low - prefix, count))
                total += count
            start += extend
        if not spans:
            return
        output = result.logits_output
        if self._short(output, start, total) or (stage := self._reserve(output, total)) is None:
            return
        fill(stage.aux, output.hidden_states, ranges)
        fill(stage.last, output.last_hidden_states, ranges)
        attach(output, DeviceRows(self, stage, tuple(spans)))

    @guarded
    def verified(self, batch: Any, result: Any, worker: Any) -> None:
        """A verify step was launched: take the rows of all tapped requests, rejected drafts too (fixed shape)."""
        if not batch.reqs or batch.forward_mode.is_idle():
            return
        tapped = [(i, req, r) for i, req in enumerate(batch.reqs) if (r := self._tapped(req)) is not None]
        if not tapped:
            return
        output, width = result.logits_output, result.speculative_num_draft_tokens
        if self._short(output, len(batch.reqs) * width, len(tapped)):
            return
        kept = width if worker.topk == 1 else int(result.accept_index.shape[1])
        stage = self._reserve(output, len(tapped) * kept)
        if stage is None:
            return
        blocks = [(i * width, kept) for i, _, _ in tapped]
        # A chain's accepted drafts are the first rows of its block. A tree's were compacted to there already, in
        # hidden_states, but not in last_hidden_states.
        fill(stage.aux, output.hidden_states, blocks)
        if worker.topk == 1:
            fill(stage.last, output.last_hidden_states, blocks)
        else:
            paths = result.accept_index.new_empty((len(tapped), kept))
            fill(paths, result.accept_index, [(i, 1) for i, _, _ in tapped])
            fill_at(stage.last, output.last_hidden_states, paths.long().clamp(min=0).reshape(-1))
        spans = tuple(Span(q.rid, r.serial, "verify", j * kept, kept, -1) for j, (_, q, r) in enumerate(tapped))
        attach(output, DeviceRows(self, stage, spans))

    @guarded
    def committed(self, rows: CarriedRows, batch: Any, commits: Sequence[Any]) -> None:
        """The step's tokens are known: send the accepted rows to the writer."""
        by_rid = {req.rid: (req, commit) for req, commit in zip(batch.reqs, commits, strict=True)}
        parts = []
        for span in rows.spans:
            req, commit = by_rid.get(span.rid, (None, None))
            if req is None:
                self.counters.drop("misaligned", span.count)
            elif (part := self._part(span, req, commit)) is not None:
                parts.append(part)
        if not parts:
            return
        step = rows.step(tuple(parts))
        if self._inbox.offer(step, step.size):
            rows.handed_over()
        else:
            self.counters.drop("queue_full", step.rows)

    @guarded
    def streamed(self, reqs: Sequence[Any]) -> None:
        """Outputs were streamed: requests that are finished now have ended."""
        for req in reqs:
            if req.finished():
                self._end(req)

    @guarded
    def aborted(self, req: Any) -> None:
        """A request ended outside a batch (aborted while it waited, rejected)."""
        self._end(req)

    def _tapped(self, req: Any) -> OpenRequest | None:
        request = self._open.get(req.rid)
        return request if request is not None and request.admission.admitted else None

    def _first_row(self, req: Any) -> int:
        request = self._open.get(req.rid)
        if request is None or request.admission.split is None or request.admission.split.folder != "train":
            return 0
        return max(0, len(req.origin_input_ids) - self._prompt_rows)

    def _short(self, output: Any, needed: int, rows: int) -> bool:
        """True, and counted, when the engine gave fewer rows than tokens: whose they are cannot be known then."""
        for states in (output.hidden_states, output.last_hidden_states):
            if states is None or states.shape[0] < needed:
                self.counters.drop("no_states" if states is None else "short_states", rows)
                return True
        return False

    def _reserve(self, output: Any, rows: int) -> Stage | None:
        stage = self._staging.reserve(rows, output.hidden_states, output.last_hidden_states)
        if stage is None:
            self.counters.drop("stage_full", rows)
        return stage

    def _part(self, span: Span, req: Any, commit: Any) -> Part | None:
        prompt = len(req.origin_input_ids)
        if span.kind == "prefill":
            if req.is_retracted:
                self.counters.add("retracted_prefills")
                return None
            if commit is not None and span.end != prompt + commit.output_index:
                self.counters.drop("position_mismatch", span.count)
                return None
            return Part(span.serial, span.position, span.row, span.count)
        if commit is None:  # finished or retracted in the step before; under overlap it comes by once more
            return None
        count = len(commit.token_ids)
        if count > span.count:
            self.counters.drop("too_wide", count)
            return None
        return Part(span.serial, prompt + commit.output_index - 1, span.row, count)

    def _end(self, req: Any) -> None:
        request = self._open.pop(req.rid, None)
        if request is None:
            return
        finished = describe(request, req, draft=self._draft(), draft_tokens=self._draft_tokens, decode=self._decode)
        if not self._inbox.offer(finished, finished.size, urgent=True):
            self.counters.drop("table_rows", 1)
            self._inbox.offer(Evict(request.serial, "queue_full"), 0, urgent=True)
