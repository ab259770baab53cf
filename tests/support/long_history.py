"""Years of a service in two repositories: windows, and drafts that were each trained, judged and promoted.

Branches, commits, merges and their metadata are what harvest, candidates and rollout write; only the files are small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.spooled import START, TARGET, WINDOW_S
from tide import repositories
from tide.domain import DraftModel, Promotion, ReplicaSwap, Serving, ServingDraft, Verdict, WindowManifest
from tide.lineage import metadata as lineage
from tide.serving.serving_file import SERVING, draft_prefix
from tide.states.spool import window_of
from tide.store.base import Store

Report = Callable[[str], None]
RECORDS = Path(__file__).parents[1] / "fixtures" / "records" / "v1"
_WRITERS = 4


def digest_of(what: str) -> str:
    """A made-up sha256."""
    return hashlib.sha256(what.encode()).hexdigest()


def write_windows(store: Store, repository: str, count: int, report: Report) -> list[str]:
    """One merge a window, oldest first; returns the commits of main after each."""
    repositories.ensure(store, repository)
    merged = []
    with ThreadPoolExecutor(_WRITERS) as pool:
        for manifest in pool.map(lambda i: _committed(store, repository, i), range(count)):
            branch = f"harvest-{manifest.window}-r0"
            record = lineage.states_record(manifest).to_metadata()
            merged.append(store.merge(repository, branch, "main", f"harvest {manifest.window} of r0", record).id)
            store.delete_branch(repository, branch)
            if len(merged) % 100 == 0:
                report(f"{len(merged)} of {count} windows")
    return merged


def _committed(store: Store, repository: str, number: int) -> WindowManifest:
    window = window_of(START + number * WINDOW_S, WINDOW_S)
    shards = tuple(sorted(digest_of(f"shard {number} {i}") for i in range(5)))
    manifest = WindowManifest(
        window=window,
        replica="r0",
        target=TARGET,
        shards=shards,
        rows=24_000,
        requests=300,
        drafts=(digest_of(f"draft {number // 10}"),),
        engines=("sglang 0.5.23",),
    )
    branch = f"harvest-{window}-r0"
    store.create_branch(repository, branch, "main")
    store.put(repository, branch, f"windows/{window}/r0/manifest.json", manifest.to_json().encode())
    record = lineage.states_record(manifest).to_metadata()
    store.commit(repository, branch, f"harvest {window} of r0", record)
    return manifest


def write_drafts(
    store: Store, repository: str, states: str, commits: Sequence[str], count: int, report: Report
) -> None:
    """Drafts spread evenly over the states commits, each the parent of the next, each promoted."""
    repositories.ensure(store, repository)
    previous: DraftModel | None = None
    for number in range(count):
        commit = commits[(number + 1) * len(commits) // count - 1]
        draft = _draft(number, states, commit, previous)
        branch, verdict = _candidate(store, repository, draft, number)
        _promoted(store, repository, branch, draft, previous, verdict, number + 1)
        previous = draft
        if (number + 1) % 10 == 0:
            report(f"{number + 1} of {count} drafts")


def _draft(number: int, states: str, commit: str, previous: DraftModel | None) -> DraftModel:
    known = DraftModel.model_validate_json((RECORDS / "DraftModel-draft.json").read_bytes())
    return known.model_copy(
        update={
            "digest": digest_of(f"draft {number}"),
            "parent": previous.digest if previous else None,
            "states_repository": states,
            "states_commit": commit,
        }
    )


def _candidate(store: Store, repository: str, draft: DraftModel, number: int) -> tuple[str, Verdict]:
    branch, folder = f"{repositories.CANDIDATE}{number:04d}", draft_prefix(draft.digest)
    known = Verdict.model_validate_json((RECORDS / "Verdict-verdict.json").read_bytes())
    verdict = known.model_copy(update={"candidate": draft.digest, "incumbent": draft.parent or "none"})
    store.create_branch(repository, branch, "main")
    store.put(repository, branch, f"{folder}draft.json", draft.to_json().encode())
    store.commit(repository, branch, f"candidate {number}", lineage.candidate_record(draft, None).to_metadata())
    store.put(repository, branch, f"{folder}verdict.json", verdict.to_json().encode())
    store.commit(repository, branch, f"verdict {number}", lineage.verdict_record(verdict).to_metadata())
    return branch, verdict


def _promoted(
    store: Store,
    repository: str,
    candidate: str,
    draft: DraftModel,
    previous: DraftModel | None,
    verdict: Verdict,
    generation: int,
) -> None:
    before = previous.digest if previous else None
    promotion = Promotion(
        kind="promotion",
        generation=generation,
        draft=draft.digest,
        previous=before,
        verdict=verdict.digest(),
        replicas=(ReplicaSwap(replica="r0", before=before or "none", after=draft.digest, seconds=0.3),),
        at=START,
    )
    serving = Serving(generation=generation, stable=ServingDraft(digest=draft.digest, verdict=verdict.digest()))
    branch, record = f"serving-{generation}", lineage.promotion_record(promotion).to_metadata()
    store.create_branch(repository, branch, "main")
    store.merge(repository, candidate, branch, f"candidate {draft.digest[:12]}", record)
    store.put(repository, branch, SERVING, serving.to_json().encode())
    store.commit(repository, branch, f"serve {draft.digest[:12]} as generation {generation}", record)
    store.merge(repository, branch, "main", f"promotion to {draft.digest[:12]}", record)
    store.tag(repository, f"gen-{generation:06d}-{draft.digest[:12]}", "main")
    store.delete_branch(repository, branch)
