"""The promote flow as it is, on a real store, with two stages stood in for: judging, and the rollout on replicas.

Both are tested elsewhere, and take minutes and an engine. Here a verdict is signed against what serves, and a
promotion is the merge of ``serving.json`` past the real guard, which is where a race is lost. The test's worker
installs them in its own process; ``cycle`` ends as adapt does, ``tidy`` does what the scheduled reconcile flow does.
"""

from __future__ import annotations

import time
from typing import Any

from prefect import Flow, flow

from flows import promote as promoting
from tasks.approvals import expire_approvals, start_promotion
from tests.support.signed import put_verdict, verdict_on
from tide import wiring
from tide.domain import Attestation, Promotion, Proposal, Serving, ServingDraft, Verdict
from tide.errors import Conflict
from tide.lineage import ledger
from tide.serving.serving_file import candidate_on, change_serving, read_serving, read_signed_verdict

JUDGED = "test_judged"
"""Kind in the ledger: a candidate was judged."""


def judge(branch: str, states_ref: str) -> Proposal:
    """A signed verdict that says promote, against what serves now."""
    config = wiring.settings()
    store, drafts = wiring.store(config), config.drafts_repository
    serving = read_serving(store, drafts)
    incumbent = serving.stable.digest if serving.stable else "none"
    verdict = verdict_on(candidate_on(store, drafts, branch), incumbent)
    verdict = verdict.model_copy(update={"policy": config.policy().digest()})
    put_verdict(store, drafts, branch, verdict, key=wiring.signing_key(config))
    ledger.append(store, drafts, JUDGED, verdict)
    return Proposal(branch=branch, verdict=verdict, generation=serving.generation)


def roll_out(branch: str, digest: str, expected_generation: int) -> Promotion | None:
    """Change ``serving.json`` as a rollout does; None when another generation serves by now."""
    config = wiring.settings()
    store, drafts = wiring.store(config), config.drafts_repository
    before = read_serving(store, drafts)
    if before.generation != expected_generation:
        return None
    signed = read_signed_verdict(store, drafts, branch, digest)
    verdict = Verdict.model_validate_json(signed.payload).digest()
    stable = ServingDraft(digest=digest, verdict=verdict)
    after = Serving(generation=before.generation + 1, stable=stable, previous=before.stable)
    previous = before.stable.digest if before.stable else None
    statement = Attestation(
        kind="promotion", generation=after.generation, draft=digest, previous=previous, verdict=signed, at=time.time()
    )
    promotion = Promotion(
        kind="promotion",
        generation=after.generation,
        draft=digest,
        previous=previous,
        verdict=verdict,
        replicas=(),
        at=time.time(),
    )
    try:
        change_serving(store, drafts, branch, before, after, promotion, wiring.authority(config).attest(statement))
    except Conflict:
        return None
    ledger.append(store, drafts, "promotion", promotion)
    return promotion


def install() -> Flow[..., Any]:
    """Put the stand-ins in place, in a process of its own, and return the promote flow."""
    promoting.judge, promoting.roll_out = judge, roll_out  # type: ignore[assignment]
    return promoting.promote


@flow(name="cycle")
def cycle(branch: str) -> tuple[str, str]:
    """What adapt does at its end, twice, as a retried task would."""
    proposal = judge(branch, "main")
    return start_promotion(proposal, "main"), start_promotion(proposal, "main")


@flow(name="tidy")
def tidy() -> None:
    """What waits too long is refused."""
    expire_approvals()
