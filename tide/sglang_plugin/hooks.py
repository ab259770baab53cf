"""The hooks: where the capture side touches SGLang, and nothing else.

Owns the names of what is hooked and the translation of SGLang's objects. A hook that serves the tap cannot raise (see
tap.guarded); one that belongs to the start-up raises on purpose, so that the server does not start.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tide.sglang_plugin import swap
from tide.sglang_plugin.admission import RequestFacts
from tide.sglang_plugin.capture import Capture
from tide.sglang_plugin.selfcheck import refuse_configuration, require_applied, require_flagged
from tide.sglang_plugin.settings import PluginSettings
from tide.sglang_plugin.staging import LastStates, OwnStaging, Staging, staging_for

logger = logging.getLogger("tide.capture")

HEALTH_CHECK = "HEALTH_CHECK"
SAMPLE_RATE_KEY = "tide_sample_rate"

_SRT = "sglang.srt."
_SCHEDULER = f"{_SRT}managers.scheduler.Scheduler."
INIT = f"{_SCHEDULER}__init__"
LOOP = f"{_SCHEDULER}run_event_loop"
ARRIVE = f"{_SCHEDULER}handle_generate_request"
ABORT = f"{_SCHEDULER}send_abort_output"
STATE = f"{_SCHEDULER}get_internal_state"
STREAM = f"{_SRT}managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
SETTINGS = f"{_SRT}managers.scheduler_components.internal_state.SchedulerInternalStateController._update_handlers"
LOAD = f"{_SRT}model_executor.model_runner.ModelRunner.load_model"
BACKENDS = f"{_SRT}model_executor.model_runner.ModelRunner.init_attention_backends"
PREFILL = f"{_SRT}managers.tp_worker.TpModelWorker.forward_batch_generation"
VERIFY = f"{_SRT}speculative.eagle_worker_v2.EAGLEWorkerV2.verify"
TOKENIZE = f"{_SRT}managers.tokenizer_manager.TokenizerManager._create_tokenized_object"

ALWAYS = (INIT, STATE)
CAPTURE = (LOOP, ARRIVE, ABORT, STREAM, SETTINGS, LOAD, BACKENDS, PREFILL, VERIFY, TOKENIZE)


def targets(settings: PluginSettings) -> tuple[str, ...]:
    """Everything that is hooked under these settings."""
    return (*ALWAYS, *swap.HOOKED, *(CAPTURE if settings.spool_dir is not None else ()))


@dataclass
class Hooks:
    """The hooks of one process, and what they share."""

    settings: PluginSettings
    registry: Any
    flagged: int = 0
    staging: Staging = field(default_factory=OwnStaging)
    capture: Capture | None = None
    checked: bool = False

    def install(self) -> None:
        """Register everything; called once in each SGLang process, before anything is loaded."""
        from sglang.srt.plugins.hook_registry import HookType as When

        self.registry.register(INIT, self.before_init, When.BEFORE)
        self.registry.register(INIT, self.after_init, When.AFTER)
        self.registry.register(STATE, self.after_state, When.AFTER)
        if self.settings.spool_dir is None:
            return
        self.registry.register(LOOP, self.around_loop, When.AROUND)
        self.registry.register(ARRIVE, self.before_arrive, When.BEFORE)
        self.registry.register(ABORT, self.after_abort, When.AFTER)
        self.registry.register(STREAM, self.after_stream, When.AFTER)
        self.registry.register(SETTINGS, self.after_handlers, When.AFTER)
        self.registry.register(LOAD, self.after_load, When.AFTER)
        self.registry.register(BACKENDS, self.after_backends, When.AFTER)
        self.registry.register(PREFILL, self.after_prefill, When.AFTER)
        self.registry.register(VERIFY, self.after_verify, When.AFTER)
        self.registry.register(TOKENIZE, after_tokenize, When.AFTER)

    def before_init(self, _scheduler: Any, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
        """Refuse what cannot work, before a model is loaded."""
        require_applied(self.registry, targets(self.settings))
        if self.settings.spool_dir is not None:
            refuse_configuration(server_args)

    def after_init(self, _result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        """The scheduler is built: check, and start the tap on the one rank that holds whole rows."""
        self.checked = True
        if self.settings.spool_dir is None or not _first_rank():
            return
        require_flagged(self.flagged)
        self.capture = Capture(self.settings, scheduler, self.staging)
        self.capture.start()
        logger.info("tide: capturing into %s", self.settings.spool_dir)

    def around_loop(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Write what is open when the loop ends, however it ends."""
        _exit_on_sigterm()
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            if self.capture is not None:
                self.capture.close()

    def before_arrive(self, _scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        """A request reached the scheduler."""
        if self.capture is not None and not str(request.rid).startswith(HEALTH_CHECK):
            self.capture.tap.arrived(request, facts_of)

    def after_abort(self, _result: None, _scheduler: Any, _abort: Any, req: Any, *_args: Any) -> None:
        """A request ended outside the output stream."""
        if self.capture is not None:
            self.capture.tap.aborted(req)

    def after_stream(self, _result: None, _streamer: Any, reqs: Any, *_args: Any, **_kwargs: Any) -> None:
        """Outputs went out; some requests may have finished."""
        if self.capture is not None:
            self.capture.tap.streamed(reqs)

    def after_load(self, _result: None, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        """Take the stages' memory before SGLang sizes its KV pool: that pool gets smaller, nothing runs out later."""
        if not runner.is_draft_worker and _first_rank():
            self.staging = staging_for(torch.device(runner.device), self.settings.stage_bytes)

    def after_backends(self, _result: None, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        """Have the target keep its last hidden states; before graphs are captured, or they never do."""
        if runner.is_draft_worker or not _first_rank():
            return
        from sglang.srt.layers.logits_processor import LogitsProcessor

        for module in runner.model.modules():
            if isinstance(module, LogitsProcessor):
                module.keep_last_hidden_states = True
                self.flagged += 1
        runner.capture_tail_hooks.append(LastStates().shrink)

    def after_prefill(self, result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """A forward pass of the target that is no verify step: prompt rows."""
        is_verify = kwargs.get("is_verify", args[2] if len(args) > 2 else False)
        if self.capture is None or batch is None or is_verify or getattr(worker, "is_draft_worker", False):
            return
        self.capture.tap.prefilled(batch, result)

    def after_verify(self, result: Any, worker: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
        """A verify step, sampled; before the draft's own pass."""
        if self.capture is not None:
            self.capture.tap.verified(batch, result, worker)

    def after_handlers(self, handlers: dict[str, Any], _controller: Any) -> dict[str, Any]:
        """Let ``/set_internal_state`` change the sampling rate while running."""
        if self.capture is None:
            return handlers
        handler = type(next(iter(handlers.values())))
        return {**handlers, SAMPLE_RATE_KEY: handler(_check_rate, self._set_rate)}

    def after_state(self, result: Any, _scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        """Add the plugin's own state to what ``/server_info`` shows."""
        try:
            result.internal_state["tide"] = self._state()
        # Process edge: an exception that leaves a hook ends the engine, and this is only a report.
        except Exception as error:
            logger.exception("tide: the plugin's state could not be read")
            result.internal_state["tide"] = {"self_check": f"failed: {error!r}"}

    def _state(self) -> dict[str, Any]:
        contract = swap.draft_contract()
        return {
            "self_check": "passed" if self.checked else "pending",
            "capture": {"enabled": False},
            **swap.state(),
            "draft_contract": None if contract is None else contract.model_dump(mode="json"),
            "active_draft": swap.active_digest(),
            **({} if self.capture is None else self.capture.state()),
        }

    def _set_rate(self, _key: str, value: Any) -> None:
        assert self.capture is not None
        self.capture.tap.admitter.sample_rate = float(value)
        logger.info("tide: sample rate is now %s", value)


def facts_of(request: Any) -> RequestFacts:
    """What admission needs of SGLang's TokenizedGenerateReqInput."""
    params, session = request.sampling_params, request.session_params
    return RequestFacts(
        rid=str(request.rid),
        input_ids=request.input_ids or (),
        custom_params=params.custom_params,
        no_logs=request.no_logs,
        session=None if session is None else str(session.id),
        lora=request.lora_id is not None,
        multimodal=request.mm_inputs is not None or request.positional_embed_overrides is not None,
        input_embeds=request.input_embeds is not None,
        beam=(params.beam_width or 1) > 1,
        max_new_tokens=params.max_new_tokens,
    )


def after_tokenize(tokenized: Any, _manager: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    """Carry the opt-out to the scheduler: the tokenizer manager leaves it behind."""
    if hasattr(tokenized, "no_logs") and getattr(request, "no_logs", False):
        tokenized.no_logs = True


def _check_rate(key: str, value: Any) -> None:
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise UpdateRejected(f"{key} must be a number in [0, 1], got {value!r}")


def _first_rank() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().attn_tp_rank == 0)


def _exit_on_sigterm() -> None:
    """End by unwinding on SIGTERM, so that the loop's ``finally`` runs; a handler of somebody else is kept."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _raise_exit)


def _raise_exit(signum: int, _frame: Any) -> None:
    raise SystemExit(128 + signum)
