"""The promotion gate and the rollout: judge a candidate on held-out requests, and serve it only when it is better."""

from __future__ import annotations

from prefect import flow

from tasks.evaluate import decide_promotion, fetch_candidate, fetch_gate, fetch_incumbent, walk_draft
from tasks.promote import roll_out
from tasks.version import pin_snapshot
from tide.domain import CanaryRefusal, Promotion, Verdict
from tide.errors import Conflict

MAX_RACES = 3


@flow(name="promote", log_prints=True)
def promote(branch: str, states_ref: str = "main", dry_run: bool = False) -> tuple[Verdict, Promotion | None]:
    """Judge the candidate on ``branch``; promote it when the verdict says so. Refusal is a normal result.

    A promotion that lost the race for serving.json has a stale verdict: the candidate is judged again, against the
    draft that was faster.

    Args:
        branch: branch of the drafts repository that holds the candidate.
        states_ref: states commit whose gate requests it is judged on.
        dry_run: stop after the verdict.

    Raises:
        Conflict: the race was lost again and again.
    """
    snapshot = pin_snapshot(states_ref)
    candidate, serving = fetch_candidate(branch), fetch_incumbent()
    generation, gate = fetch_gate(snapshot, candidate.digest, serving)
    ours = walk_draft(candidate.digest, gate, snapshot)
    for _ in range(MAX_RACES):
        theirs = walk_draft(serving.stable.digest, gate, snapshot) if serving.stable else None
        verdict = decide_promotion(branch, ours, theirs, snapshot, generation)
        if verdict.outcome != "promote" or dry_run:
            return verdict, None
        outcome = roll_out(branch, candidate.digest, serving.generation)
        if isinstance(outcome, CanaryRefusal):
            return verdict, None
        if outcome is not None:
            return verdict, outcome
        serving = fetch_incumbent()
    raise Conflict(f"{branch}: another promotion was faster {MAX_RACES} times; run the flow again when they are done")
