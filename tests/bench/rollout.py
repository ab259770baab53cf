"""A promotion under load on two real SGLang servers: ``python -m tests.bench.rollout`` writes ``results/operate.json``.

Eight requests are kept running while a draft is tried on one replica, watched, and given to the other; then one that is
worse is tried and taken back. Requests that failed, and answers that are not token for token what they are without a
promotion (float32, greedy), are counted.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from infra import models, ports
from infra.lakefs.server import LakefsServer
from tests.bench import operate_results
from tests.support.two_replicas import Load, Rig, two_replicas
from tide.store.lakefs import LakefsStore

CONCURRENCY, PROMPTS = 8, range(64)


def main() -> None:
    """Measure, write, print."""
    home = Path(os.environ.get("TIDE_HOME", ".tide"))
    target = Path(os.environ.get("TIDE_TARGET_MODEL") or models.ensure_target_model(home)).absolute()
    with (
        tempfile.TemporaryDirectory() as scratch,
        LakefsServer(Path(scratch) / "lakefs", port=ports.free_port()) as lakefs,
    ):
        keys = lakefs.credentials
        store = LakefsStore(lakefs.endpoint, keys.access_key, keys.secret_key)
        with two_replicas(Path(scratch), target, store) as rig:
            figures = measure(rig)
    operate_results.merge(figures)
    print(json.dumps(figures, indent=1))


def measure(rig: Rig) -> dict[str, Any]:
    """A promotion and a refusal, both under load."""
    began = time.monotonic()
    promotion, load = rig.under_load(PROMPTS, CONCURRENCY, lambda: rig.promote("echo"))
    seconds = time.monotonic() - began
    changed = answers_changed(rig, load)
    rig.forget()
    refusal, later = rig.under_load(PROMPTS, CONCURRENCY, lambda: rig.promote("dim"))
    return {
        "promotion_under_load": {
            "concurrency": CONCURRENCY,
            "replicas": len(rig.engines),
            "requests": load.requests,
            "failed_requests": len(load.failed) + len(later.failed),
            "answers_changed": changed,
            "kind": promotion.kind,
            "seconds": round(seconds, 1),
            "swap_s": [round(swap.seconds, 4) for swap in promotion.replicas],
            "canary": promotion.canary.figures,
        },
        "bad_draft_under_load": {"outcome": refusal.report.outcome, **refusal.report.figures},
    }


def answers_changed(rig: Rig, load: Load) -> int:
    """Answers that differ from the same request's without a promotion."""
    rig.forget()
    quiet = rig.answers(sorted(load.answers), CONCURRENCY)
    return sum(ids != quiet[number] for number, answers in load.answers.items() for ids in answers)


if __name__ == "__main__":
    main()
