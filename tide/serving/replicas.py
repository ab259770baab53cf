"""Replicas brought to a draft: its files in DRAFT_DIR, the marks beside them, swaps seen to work, and the way back.

Owns DRAFT_DIR on this host. Works over the ports. Knows nothing of ``serving.json`` or of why a draft is to serve.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tide.domain import ReplicaSwap, Signed
from tide.engine.base import Engine
from tide.errors import EngineError, EngineUnavailable, SwapRefused, TideError
from tide.files import whole_folder, write_durably
from tide.names import require_digest
from tide.serving.serving_file import draft_prefix
from tide.signatures.attestation import attestation_file
from tide.store.base import Store

NO_DRAFT, UNKNOWN = "none", "unknown"
ANSWER_POLL_S = 0.5
DRAFT_FILES = ("config.json", "draft.json", "model.safetensors")
"""What stands under a draft's folder in the drafts repository and in DRAFT_DIR."""

Restart = Callable[[Engine, str], float]
"""Restarts a replica with a draft when a hot swap cannot do (no draft yet, another shape); returns seconds."""


def install_draft(store: Store, repository: str, ref: str, digest: str, draft_dir: Path) -> Path:
    """Bring a draft to ``DRAFT_DIR/<digest>/``: temporary folder, rename. What is there is left alone.

    Raises:
        BadInputError: no digest, but a path perhaps: branches and their lineage can be written by others.
    """
    folder = draft_dir / require_digest(digest, "draft digest")
    if folder.exists():
        return folder
    with whole_folder(folder, replace=False) as temporary:
        for name in DRAFT_FILES:
            store.download(repository, ref, f"{draft_prefix(digest)}{name}", temporary / name)
    return folder


def allow(draft_dir: Path, digest: str, signed: Signed) -> None:
    """Write beside a draft in DRAFT_DIR what lets it serve; which one serves is left as it is."""
    write_durably(draft_dir / attestation_file(digest), signed.to_json().encode())


def mark_serving(draft_dir: Path, digest: str | None, signed: Signed | None = None) -> None:
    """Write ``DRAFT_DIR/serving``, which a replica loads at its start, and before it what lets the draft serve.

    Args:
        digest: None: nothing is in serving.
    """
    if digest is None:
        (draft_dir / "serving").unlink(missing_ok=True)
        return
    if signed is not None:
        allow(draft_dir, digest, signed)
    write_durably(draft_dir / "serving", f"{digest}\n".encode())


@dataclass(frozen=True)
class Bringer:
    """How a replica is brought to a draft, and seen to serve it.

    Args:
        draft_dir: DRAFT_DIR of the replicas on this host.
        restart: for a replica without a draft.
        answer_s: seconds in which a replica must answer, whatever is queued before us.
        wait: sleeps.
    """

    draft_dir: Path
    restart: Restart | None = None
    answer_s: float = 120.0
    wait: Callable[[float], None] = time.sleep

    def bring(self, replica: Engine, digest: str) -> ReplicaSwap:
        """Swap, or restart, and see a token generated with it.

        Raises:
            SwapRefused: it serves what it served before.
            EngineError: it reports another draft afterwards, or generates without verify steps.
            EngineUnavailable: it did not answer in time; the swap may have happened all the same.
        """
        before, started = replica.active_draft(), time.perf_counter()
        if before == NO_DRAFT and self.restart is not None:
            seconds, restarted = self._restarted(replica, digest), True
        elif before == digest:
            seconds, restarted = 0.0, False
        else:
            seconds, restarted = self._swapped(replica, digest, started), False
        self.verify(replica, digest)
        return ReplicaSwap(replica=replica.name, before=before, after=digest, seconds=seconds, restarted=restarted)

    def verify(self, replica: Engine, digest: str) -> None:
        """See that it serves this draft, and generates with verify steps. Raises EngineError, EngineUnavailable."""
        deadline = time.monotonic() + self.answer_s
        while True:
            try:
                after = replica.active_draft()
                if after != digest:
                    raise EngineError(
                        f"replica {replica.name} reports draft {after[:12]} after a swap to {digest[:12]}"
                    )
                answer = replica.probe(timeout_s=self.answer_s)
                break
            except EngineUnavailable:
                if time.monotonic() >= deadline:
                    raise
                self.wait(ANSWER_POLL_S)
        if not answer.verify_steps:
            raise EngineError(
                f"replica {replica.name} generates without verify steps although it reports draft {digest[:12]}: its "
                "log says why; is it started with --speculative-algorithm EAGLE3?"
            )

    def _swapped(self, replica: Engine, digest: str, started: float) -> float:
        """Seconds. An answer that was lost is asked after; a swap that did not happen is tried again for a while."""
        deadline = time.monotonic() + self.answer_s
        while True:
            try:
                return replica.swap_draft(digest).seconds
            except SwapRefused as error:
                if "is not in" not in str(error):
                    raise
                raise SwapRefused(
                    f"{error}; the draft was installed in {self.draft_dir} of this host: a replica on another host, or "
                    "with another TIDE_DRAFT_DIR, needs the folder there too"
                ) from error
            except EngineUnavailable as error:
                if self._serves(replica, digest):
                    return time.perf_counter() - started
                if time.monotonic() >= deadline:
                    raise EngineUnavailable(f"{error}; it does not serve draft {digest[:12]}") from error
                self.wait(ANSWER_POLL_S)

    def _serves(self, replica: Engine, digest: str) -> bool:
        deadline = time.monotonic() + self.answer_s
        while True:
            try:
                return replica.active_draft() == digest
            except EngineUnavailable:
                if time.monotonic() >= deadline:
                    return False
                self.wait(ANSWER_POLL_S)

    def _restarted(self, replica: Engine, digest: str) -> float:
        """Seconds. While it starts, DRAFT_DIR/serving names the draft, or it would load the one that served before."""
        assert self.restart is not None
        mark = self.draft_dir / "serving"
        old = mark.read_text().strip() if mark.exists() else None
        mark_serving(self.draft_dir, digest)
        try:
            return self.restart(replica, digest)
        finally:
            mark_serving(self.draft_dir, old)


def bring_back(
    bringer: Bringer, replicas: Sequence[Engine], before: Mapping[str, str], incumbent: str | None
) -> list[ReplicaSwap]:
    """Give every replica touched its draft back, a failing one too: it may have failed after applying.

    A replica that does not answer loads the incumbent when it starts again, and ``reconcile`` sees to the rest.

    Args:
        before: what each replica touched served before.
        incumbent: what ``serving.json`` says; None before the first promotion.
    """
    mark_serving(bringer.draft_dir, incumbent)
    back = replace(bringer, restart=None)
    done = []
    for replica in (r for r in replicas if r.name in before):
        wanted = incumbent or before[replica.name]
        swap = _left_with(replica) if wanted == NO_DRAFT else bring_or_name(back, replica, wanted)
        done += [swap] if swap else []
    return done


def _left_with(replica: Engine) -> ReplicaSwap | None:
    """A replica that had no draft and cannot lose one while it runs; None when it still has none."""
    try:
        active = replica.active_draft()
    except EngineError as error:
        return out_of_service(replica, error)
    if active == NO_DRAFT:
        return None
    return out_of_service(
        replica,
        EngineError(f"keeps draft {active[:12]}: it served without one before; restart it so when it should again"),
    )


def bring_or_name(bringer: Bringer, replica: Engine, digest: str) -> ReplicaSwap:
    """As ``Bringer.bring``; a replica that fails is named as out of service, with the reason, and stops nothing."""
    try:
        return bringer.bring(replica, digest)
    except TideError as error:
        return out_of_service(replica, error)


def out_of_service(replica: Engine, error: TideError) -> ReplicaSwap:
    """A replica that does not serve what it should, and why."""
    return ReplicaSwap(replica=replica.name, before=UNKNOWN, after=UNKNOWN, seconds=0.0, out_of_service=str(error))


def describe(swap: ReplicaSwap) -> str:
    """A line for people."""
    if swap.out_of_service:
        return f"{swap.replica}: OUT OF SERVICE: {swap.out_of_service}"
    how = "restarted" if swap.restarted else "swapped"
    return f"{swap.replica}: {swap.before[:12]} -> {swap.after[:12]}, {how} in {swap.seconds:.3f} s"
