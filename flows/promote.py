"""The promotion gate and the rollout: judge a candidate on held-out requests, and serve it only when it is better."""

from __future__ import annotations

from prefect import flow

from tasks.evaluate import decide_promotion, fetch_candidate, fetch_incumbent, walk_draft
from tasks.promote import roll_out
from tasks.version import fetch_held_out_shards, pin_snapshot
from tide import wiring
from tide.domain import Promotion, Split, Verdict


@flow(name="promote", log_prints=True)
def promote(branch: str, states_ref: str = "main", dry_run: bool = False) -> tuple[Verdict, Promotion | None]:
    """Judge the candidate on ``branch``; promote it when the verdict says so. Refusal is a normal result.

    Args:
        branch: branch of the drafts repository that holds the candidate.
        states_ref: states commit whose gate requests it is judged on.
        dry_run: stop after the verdict.
    """
    snapshot = pin_snapshot(states_ref)
    candidate, serving = fetch_candidate(branch), fetch_incumbent()
    gate = fetch_held_out_shards(snapshot, Split.GATE, wiring.settings().policy().gate_requests)
    ours = walk_draft(candidate.digest, gate, snapshot)
    theirs = walk_draft(serving.stable.digest, gate, snapshot) if serving.stable else None
    verdict = decide_promotion(branch, ours, theirs, snapshot)
    if verdict.outcome != "promote" or dry_run:
        return verdict, None
    return verdict, roll_out(branch, candidate.digest, verdict.digest(), serving.generation)
