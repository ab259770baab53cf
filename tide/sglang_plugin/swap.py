"""The draft swap inside SGLang: hooks on its weight updates, and the check of the draft at the start.

Owns what of SGLang is hooked and read. A swap is the stock route ``POST /update_weights_from_disk`` with the admin key,
best between pause (in_place) and continue, and the body

    {"model_path": DIGEST, "manifest": {"selector": "draft"}, "flush_cache": false}

Knows nothing of verdicts, of who promotes, or of what is captured; how a swap is carried out is in ``served``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tide.domain import DraftContract, TargetContract
from tide.errors import ConfigError, DraftError, TideError
from tide.models.draft_files import ARCHITECTURE, load_draft, read_config
from tide.names import is_digest
from tide.sglang_plugin.drafts import DraftShelf
from tide.sglang_plugin.served import ServedDraft, alone
from tide.sglang_plugin.settings import PluginSettings
from tide.sglang_plugin.weights import LiveDraft
from tide.signatures.signing import TrustedKeys

log = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKED = (
    f"{_SCHEDULER}.init_model_worker",
    f"{_SCHEDULER}.init_weight_updater",
    f"{_UPDATER}.update_weights_from_disk",
    f"{_UPDATER}.update_weights_from_tensor",
    f"{_UPDATER}.update_weights_from_distributed",
    f"{_UPDATER}.update_weights_from_ipc",
    f"{_UPDATER}.end_weight_update",
    f"{_TOKENIZER}._update_model_path_info",
)
"""What install() hooks; the start-up self-check asks for each whether the hook was applied."""


_served = ServedDraft(DraftShelf(None))


def active_digest() -> str:
    """Digest of the draft in serving in this process, or ``none``."""
    return _served.digest


def swap_count() -> int:
    """How often the draft changed since the start: a request that saw two values was served by two drafts."""
    return _served.count


def draft_contract() -> DraftContract | None:
    """Contract of the draft in serving; None without one."""
    return None if _served.active is None else _served.active.contract


def state() -> dict[str, Any]:
    """The draft part of the plugin's internal state: see ServedDraft.state."""
    return _served.state()


def set_target(contract: TargetContract) -> None:
    """Tell which target is served, so that a draft made for another one is refused."""
    _served.target = contract


def on_target_update(callback: Callable[[str], Any]) -> None:
    """Have ``callback("target_update")`` called whenever somebody changed the target's weights."""
    _served.on_target_update = callback


def install(registry: Any, settings: PluginSettings) -> None:
    """Register the hooks; called once in each SGLang process, before anything is loaded.

    Args:
        registry: SGLang's HookRegistry.
    """
    global _served  # noqa: PLW0603  one engine a process: its plugin has exactly one served draft
    from sglang.srt.plugins.hook_registry import HookType

    trusted = TrustedKeys.parse(settings.public_keys) if settings.public_keys else None
    _served = ServedDraft(DraftShelf(settings.draft_dir, trusted), untrained=settings.draft_untrained)
    check, adopt, disk, *foreign, path = HOOKED
    registry.register(check, check_start, HookType.BEFORE)
    registry.register(adopt, adopt_start, HookType.AFTER)
    registry.register(disk, around_update_from_disk, HookType.AROUND)
    for method in foreign:
        registry.register(method, around_foreign_update, HookType.AROUND)
    registry.register(path, around_update_model_path, HookType.AROUND)


def check_start(*_args: Any) -> None:
    """Refuse, before any weight is loaded, a draft that would serve at an acceptance length of 1.00 without an error.

    Raises:
        ConfigError: an EAGLE3 draft under another algorithm, or no local folder, or TIDE_DRAFT_DIR without a draft.
    """
    algorithm, path = _speculation()
    if path is None or not (Path(path) / "config.json").is_file():
        if algorithm == "EAGLE3" or _served.shelf.folder is not None:
            raise ConfigError(
                f"tide: the draft model path is {path!r} (algorithm {algorithm}); give --speculative-algorithm EAGLE3 "
                "and a local folder as --speculative-draft-model-path, or unset TIDE_DRAFT_DIR"
            )
        return
    if read_config(Path(path)).get("architectures") == [ARCHITECTURE] and algorithm != "EAGLE3":
        raise ConfigError(
            f"tide: {path} is an EAGLE3 draft, served with --speculative-algorithm {algorithm}: nothing it proposes "
            "would be accepted; use EAGLE3"
        )


def adopt_start(_result: None, scheduler: Any) -> None:
    """Take over the draft just loaded, and put the one in its place that ``TIDE_DRAFT_DIR/serving`` names.

    Raises:
        TideError: the draft's files are refused, or the draft to serve cannot be loaded: the engine must not start.
    """
    algorithm, path = _speculation()
    if algorithm != "EAGLE3" or path is None:
        return
    start = load_draft(Path(path), drop_embedding=True)
    _served.adopt(start, _live_draft(scheduler), agree=_agreement(scheduler), quiesce=lambda: _synchronize(scheduler))
    serving = _served.shelf.serving()
    if serving is not None:
        _served.shelf.require_attested(serving)
        if serving != start.digest:
            _served.swap(serving)
    _served.count = 0
    log.info("tide: draft %s in serving (file %s)", _served.digest, _served.state()["draft_file"])


def around_update_from_disk(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """The swap, on the stock route; any other update passes, and is seen."""
    selector = (request.manifest or {}).get("selector")
    if selector is None:
        return around_foreign_update(original, manager, request)
    started = time.perf_counter()
    try:
        _refuse_request(manager, request, selector)
        message, success = json.dumps(_served.swap(request.model_path)), True
    # The edge of the scheduler: an exception that leaves a hook ends the engine, and the draft in serving is intact.
    except Exception as error:
        message, success = f"draft swap refused: {error}", False
        if not isinstance(error, TideError):
            log.exception("tide: draft swap failed")
    log.info("tide: %s (%.3f s)", message, time.perf_counter() - started)
    return _reply(success, message)


def around_foreign_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Let a weight update pass, and record what it may have changed."""
    session = manager._session
    before = _served.weights_fingerprint()
    result = original(manager, request)
    # A refused update (no session, no such path) has touched nothing; a failed one may have.
    if result.success or before != _served.weights_fingerprint():
        selector = getattr(request, "selector", None) or getattr(session, "selector", None) or "all"
        _served.mark_foreign(selector, type(request).__name__)
    return result


def around_update_model_path(original: Callable[..., Any], manager: Any, model_path: str, load_format: str) -> None:
    """Stock renames the served model after an update; a draft's digest is no name for it."""
    if not is_digest(model_path):
        original(manager, model_path, load_format)


def _refuse_request(manager: Any, request: Any, selector: object) -> None:
    if selector != "draft":
        raise DraftError(f"manifest selector {selector!r}: only 'draft' is known")
    if not manager.scheduler.server_args.admin_api_key:
        raise DraftError("the engine has no --admin-api-key: anybody could exchange the draft; start it with one")
    if manager._session is not None:
        raise DraftError("a weight-update session is open; end it first")
    if request.flush_cache:
        raise DraftError("flush_cache must be false: only an idle engine can flush, see /flush_cache")


def _reply(success: bool, message: str) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    return UpdateWeightFromDiskReqOutput(success=success, message=message, num_paused_requests=0)


def _speculation() -> tuple[str | None, str | None]:
    """Algorithm and draft path that the engine resolved."""
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    return spec.speculative_algorithm, spec.speculative_draft_model_path


def _live_draft(scheduler: Any) -> LiveDraft:
    worker = scheduler.draft_worker.draft_worker
    return LiveDraft(worker.draft_runner.model, worker, scheduler.tp_worker.model_runner.model)


def _agreement(scheduler: Any) -> Callable[[str | None], str | None]:
    group = scheduler.weight_updater.tp_cpu_group
    size = torch.distributed.get_world_size(group=group)

    def agree(reason: str | None) -> str | None:
        reasons: list[str | None] = [None] * size
        torch.distributed.all_gather_object(reasons, reason, group=group)
        return next((r for r in reasons if r is not None), None)

    return agree if size > 1 else alone


def _synchronize(scheduler: Any) -> None:
    """Wait for the forward pass in flight: pausing in place only sets a flag."""
    device = torch.device(scheduler.tp_worker.model_runner.device)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
