"""The order of a judgement, as both flows make it: what is walked over what, and the verdict on it."""

from __future__ import annotations

from tasks.evaluate import decide_promotion, fetch_candidate, fetch_gate, fetch_incumbent, walk_draft
from tasks.version import pin_snapshot
from tide.domain import Proposal


def judge(branch: str, states_ref: str) -> Proposal:
    """Judge the candidate on ``branch`` against what serves now; whatever the verdict says, it is signed and recorded.

    Args:
        branch: branch of the drafts repository that holds the candidate.
        states_ref: states commit whose gate requests it is judged on.
    """
    snapshot = pin_snapshot(states_ref)
    candidate, serving = fetch_candidate(branch), fetch_incumbent()
    generation, gate = fetch_gate(snapshot, candidate.digest, serving)
    ours = walk_draft(candidate.digest, gate, snapshot)
    theirs = walk_draft(serving.stable.digest, gate, snapshot) if serving.stable else None
    verdict = decide_promotion(branch, ours, theirs, snapshot, generation)
    return Proposal(branch=branch, verdict=verdict, generation=serving.generation)
