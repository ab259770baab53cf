"""The draft in serving: which one it is, and its exchange for another, all or nothing and on every rank.

Owns the order of a swap: find and check everything, agree, wait for the forward pass, load in place, prove that the
target is as it was, agree again. Knows nothing of SGLang's hooks and requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from tide.domain import TargetContract
from tide.errors import DraftError, TideError
from tide.models.draft_files import DraftFiles
from tide.sglang_plugin.drafts import DraftShelf, check_swappable
from tide.sglang_plugin.weights import LiveDraft, changed, check_loadable, fingerprint, load_in_place

log = logging.getLogger(__name__)

NO_DRAFT = "none"


def alone(reason: str | None) -> str | None:
    """Agreement of a single rank: its own reason, or None."""
    return reason


class ServedDraft:
    """The draft in serving in this process, and the only way to change it.

    Args:
        shelf: where drafts are looked up.
        untrained: the draft the engine starts with counts as none (TIDE_DRAFT_UNTRAINED=1).
    """

    def __init__(self, shelf: DraftShelf, *, untrained: bool = False) -> None:
        self.shelf = shelf
        self.untrained = untrained
        self.count = 0
        self.stale: str | None = None
        self.active: DraftFiles | None = None
        self.target: TargetContract | None = None
        self.on_target_update: Callable[[str], Any] = _ignore
        self._first = ""
        self._live: LiveDraft | None = None
        self._agree: Callable[[str | None], str | None] = alone
        self._quiesce: Callable[[], None] = _nothing_runs

    def adopt(
        self,
        start: DraftFiles,
        live: LiveDraft,
        *,
        agree: Callable[[str | None], str | None],
        quiesce: Callable[[], None],
    ) -> None:
        """Take over the draft that the engine was started with.

        Args:
            start: its files.
            live: its parameters.
            agree: given this rank's reason to refuse (or None), returns the first reason of any rank.
            quiesce: waits until no forward pass is running.

        Raises:
            DraftError: engine and files differ: the engine serves something else than these files.
        """
        check_loadable(live, start)
        self.shelf.hold(start)
        self.active, self._first, self._live = start, start.digest, live
        self._agree, self._quiesce = agree, quiesce

    @property
    def digest(self) -> str:
        """Digest of the draft in serving; ``none`` without one, with an untrained one, or after a foreign update."""
        if self.active is None or self.stale is not None or (self.untrained and self.active.digest == self._first):
            return NO_DRAFT
        return self.active.digest

    def swap(self, digest: str) -> dict[str, Any]:
        """Exchange the draft.

        Returns:
            ``before`` and ``after`` as digests (or ``none``), and ``seconds``.

        Raises:
            TideError: refused, with the reason; what was in serving still is.
        """
        started, before = time.perf_counter(), self.digest
        candidate, reason = self._prepare(digest)
        reason = self._agree(reason)
        if reason is not None or candidate is None:
            raise DraftError(reason or "another rank refused")
        self._exchange(candidate)
        self.shelf.hold(candidate)
        self.active, self.stale = candidate, None
        self.count += 1
        return {"before": before, "after": self.digest, "seconds": round(time.perf_counter() - started, 4)}

    def mark_foreign(self, selector: str, how: str) -> None:
        """Somebody else changed weights: a draft changed so is no draft we know; a target changed so is another target.

        Args:
            selector: ``draft``, ``target`` or ``all``.
            how: the route it came by.
        """
        if selector != "target" and self.active is not None:
            self.stale = f"changed by {how}; swap to a draft to make it known again"
            self.count += 1
            log.warning("tide: the draft in serving was %s", self.stale)
        if selector != "draft":
            self.on_target_update("target_update")

    def state(self) -> dict[str, Any]:
        """What ``/server_info`` shows: digest, digest of the file, contract, stale reason, number of changes."""
        return {
            "draft": self.digest,
            "draft_file": None if self.active is None else self.active.digest,
            "draft_contract": None if self.active is None else self.active.contract.model_dump(mode="json"),
            "draft_stale": self.stale,
            "draft_swaps": self.count,
            "attestations": "required"
            if self.shelf.trusted is not None
            else "not asked for: TIDE_PUBLIC_KEYS is unset",
        }

    def weights_fingerprint(self) -> tuple[dict[str, int], dict[str, int]]:
        """Fingerprints of target and draft; empty without a draft."""
        if self._live is None:
            return {}, {}
        return fingerprint(self._live.target), fingerprint(self._live.model)

    def _prepare(self, digest: str) -> tuple[DraftFiles | None, str | None]:
        try:
            live, active = self._require()
            candidate = self.shelf.find(digest)
            check_swappable(active, candidate, self.target)
            check_loadable(live, candidate)
        except TideError as error:
            return None, str(error)
        # Whatever it is, the other ranks are waiting to hear of it.
        except Exception as error:
            log.exception("tide: draft %s could not be checked", digest[:12])
            return None, repr(error)
        return candidate, None

    def _exchange(self, candidate: DraftFiles) -> None:
        live, active = self._require()
        self._quiesce()
        before = fingerprint(live.target)
        reason = self._agree(_load(live, candidate))
        if reason is not None and (failure := _load(live, active)) is not None:
            self.mark_foreign("draft", f"a failed swap that could not be undone ({failure})")
        touched = changed(before, fingerprint(live.target))
        if touched:
            self.mark_foreign("all", f"swap to {candidate.digest[:12]}")
            raise DraftError(f"the TARGET changed during the swap ({', '.join(touched[:3])}): restart this engine")
        if reason is not None:
            raise DraftError(reason)

    def _require(self) -> tuple[LiveDraft, DraftFiles]:
        if self._live is None or self.active is None:
            raise DraftError("this engine serves without an EAGLE3 draft: start it with one to swap")
        return self._live, self.active


def _load(live: LiveDraft, draft: DraftFiles) -> str | None:
    try:
        load_in_place(live, draft)
    # Whatever it is, the other ranks are waiting to hear of it, and the former draft must go back.
    except Exception as error:
        log.exception("tide: draft %s could not be loaded", draft.digest[:12])
        return f"loading draft {draft.digest[:12]} failed: {error}"
    return None


def _nothing_runs() -> None:
    return None


def _ignore(_reason: str) -> None:
    return None
