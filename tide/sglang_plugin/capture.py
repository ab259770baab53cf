"""Puts the tap together for one scheduler process: settings, tap, inbox, store, writer and spool.

Owns their life: made when the scheduler is built, closed when its loop ends. The one module of the capture side that
reads the scheduler's attributes.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tide.domain import TargetContract
from tide.sglang_plugin import swap
from tide.sglang_plugin.admission import Admitter
from tide.sglang_plugin.counters import CaptureCounters, PrometheusMirror
from tide.sglang_plugin.inbox import Inbox
from tide.sglang_plugin.settings import PluginSettings
from tide.sglang_plugin.spool import Spool
from tide.sglang_plugin.staging import Staging
from tide.sglang_plugin.store import RowStore
from tide.sglang_plugin.tap import Tap
from tide.sglang_plugin.target import captured_layers, running_contract
from tide.sglang_plugin.turns import FirstTurn
from tide.sglang_plugin.writer import SpoolWriter

logger = logging.getLogger("tide.capture")

CLOSE_TIMEOUT_S = 10.0
"""SGLang kills a scheduler 15 s after it asked it to end."""


class Capture:
    """Everything of the capture side in one scheduler process.

    Args:
        settings: with a spool folder.
        scheduler: SGLang's scheduler, built.
        staging: where the tap puts rows on the device.
    """

    def __init__(self, settings: PluginSettings, scheduler: Any, staging: Staging) -> None:
        assert settings.spool_dir is not None
        self._settings, self._root, self._scheduler = settings, settings.spool_dir, scheduler
        self.counters = CaptureCounters()
        self.target: TargetContract | None = None
        self._aux_layers = captured_layers(scheduler.tp_worker.model_runner.model)
        self._mirror: PrometheusMirror | None = None
        self._closing = threading.Lock()
        inbox = Inbox(settings.queue_bytes)
        self.tap = Tap(
            admitter=_admitter(settings, scheduler.tokenizer),
            inbox=inbox,
            counters=self.counters,
            prompt_rows=settings.prompt_rows,
            draft=lambda: (swap.active_digest(), swap.swap_count()),
            draft_tokens=_draft_tokens(),
            decode=_decoder(scheduler.tokenizer),
            staging=staging,
        )
        self.writer = SpoolWriter(
            inbox=inbox,
            store=RowStore(settings.host_bytes),
            counters=self.counters,
            open_spool=self._open_spool,
            bounds=(settings.min_tokens, settings.max_tokens),
            idle_evict_s=settings.idle_evict_s,
            on_tick=self._publish,
            on_failure=lambda error: self.tap.switch_off("writer", error),
        )

    def start(self) -> None:
        """Start the writer; it is closed at the end of the scheduler's loop, or at exit at the latest."""
        swap.on_target_update(self.tap.target_changed)
        self.writer.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Write what finished, within CLOSE_TIMEOUT_S."""
        with self._closing:
            if not self.writer.close(CLOSE_TIMEOUT_S):
                logger.error(
                    "tide: the spool writer did not end within %.0f s; its last rows are lost", CLOSE_TIMEOUT_S
                )

    def state(self) -> dict[str, Any]:
        """Plain values for ``internal_states[0].tide``: ``capture`` and ``target``."""
        capture = {
            **self.counters.snapshot(),
            "enabled": self.tap.enabled,
            "off_reason": self.tap.off_reason,
            "sample_rate": self.tap.admitter.sample_rate,
            "cpu_s": {"hooks": self.tap.cpu_s, "writer": self.writer.cpu_s, "scheduler": time.process_time()},
        }
        return {"capture": capture, "target": None if self.target is None else self.target.model_dump(mode="json")}

    def _open_spool(self) -> Spool:
        self.target = self._contract()
        swap.set_target(self.target)
        return Spool(
            self._root,
            target=self.target,
            engine=_engine(),
            counters=self.counters,
            shard_bytes=self._settings.shard_bytes,
            shard_age_s=self._settings.shard_age_s,
            quota_bytes=self._settings.spool_quota_bytes,
        )

    def _contract(self) -> TargetContract:
        config = self._scheduler.tp_worker.model_runner.model_config
        return running_contract(
            _local(config.model_path),
            self._aux_layers,
            str(config.dtype),
            config.quantization,
            self._root / "target.json",
        )

    def _publish(self) -> None:
        if self._mirror is None and "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            self._mirror = PrometheusMirror()
        if self._mirror is not None:
            self._mirror.sync(self.counters.snapshot())


def _admitter(settings: PluginSettings, tokenizer: Any) -> Admitter:
    return Admitter(
        settings.key(),
        sample_rate=settings.sample_rate,
        min_tokens=settings.min_tokens,
        max_tokens=settings.max_tokens,
        turn=None if tokenizer is None else FirstTurn.of(tokenizer),
    )


def _draft_tokens() -> int | None:
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    return None if spec.speculative_adaptive else int(spec.speculative_num_draft_tokens)


def _decoder(tokenizer: Any) -> Callable[[list[int]], str] | None:
    if tokenizer is None:
        return None
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


def _local(path: str) -> Path:
    """Folder of a model: as given, or where the hub's cache has it."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))


def _engine() -> str:
    from sglang.version import __version__

    return f"sglang {__version__}"
