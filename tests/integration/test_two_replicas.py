"""Promotions on two real SGLang servers, in float32: under load, refused by the canary, with a scheduler that stops."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.lakefs.server import LakefsServer
from tests.support.signed import AUTHORITY
from tests.support.two_replicas import ADMIN, POLICY, REPOSITORY, Load, Rig, two_replicas
from tide.domain import CanaryRefusal, Promotion
from tide.engine.sglang import SglangEngine
from tide.lineage import ledger
from tide.serving import rollout
from tide.serving.rollout import read_serving
from tide.store.lakefs import LakefsStore

pytestmark = pytest.mark.timeout(1500)

CONCURRENCY, PROMPTS = 8, range(64)


@pytest.fixture(scope="module")
def rig(target_model: Path, tmp_path_factory: pytest.TempPathFactory, lakefs_server: LakefsServer) -> Iterator[Rig]:
    keys = lakefs_server.credentials
    store = LakefsStore(lakefs_server.endpoint, keys.access_key, keys.secret_key)
    with two_replicas(tmp_path_factory.mktemp("canary"), target_model, store) as running:
        yield running


def unchanged(rig: Rig, load: Load) -> None:
    """Every answer is, token for token, what the replica says without a promotion."""
    assert load.failed == []
    rig.forget()
    quiet = rig.answers(sorted(load.answers), CONCURRENCY)
    assert {number: [quiet[number]] * len(answers) for number, answers in load.answers.items()} == load.answers


def test_a_promotion_under_load_fails_no_request_and_changes_no_answer(rig: Rig) -> None:
    promotion, load = rig.under_load(PROMPTS, CONCURRENCY, lambda: rig.promote("echo"))
    print(promotion)
    assert isinstance(promotion, Promotion)
    assert promotion.canary is not None
    assert (promotion.canary.outcome, promotion.canary.figures["requests"]) == ("passed", POLICY.max_requests)
    assert promotion.canary.figures["candidate_walk"] == pytest.approx(promotion.canary.figures["live"], abs=0.03)
    assert [(s.replica, s.out_of_service) for s in promotion.replicas] == [("r0", ""), ("r1", "")]
    assert rig.active() == ["echo", "echo"]
    assert load.requests > POLICY.max_requests
    unchanged(rig, load)


def test_a_bad_draft_with_a_verdict_is_taken_back_within_a_few_dozen_requests(rig: Rig) -> None:
    rig.forget()
    refusal, load = rig.under_load(PROMPTS, CONCURRENCY, lambda: rig.promote("dim"))
    print(refusal)
    assert isinstance(refusal, CanaryRefusal)
    assert refusal.report.outcome == "regression"
    assert (load.failed, rig.active()) == ([], ["echo", "echo"])
    serving = read_serving(rig.store, REPOSITORY)
    assert (serving.generation, serving.canary) == (2, None)
    assert ledger.newest(rig.store, REPOSITORY, "canary", CanaryRefusal) == refusal


@pytest.mark.drill
def test_a_canary_whose_scheduler_stops_is_out_and_the_incumbent_serves_everywhere(rig: Rig) -> None:
    soon = POLICY.model_copy(update={"answer_s": 20.0, "wait_s": 120.0})
    scheduler, pairs = rig.scheduler(0), zip(rig.servers, rig.engines, strict=True)
    impatient = [SglangEngine(s.url, name=e.name, admin_key=ADMIN, control_timeout_s=10) for s, e in pairs]

    def stop_and_wait(seconds: float) -> None:
        scheduler.suspend()
        time.sleep(seconds)

    watch = replace(rig.watch, policy=soon, wait=stop_and_wait)
    try:
        refusal = rig.promote("shuffled", replicas=impatient, watch=watch)
    finally:
        scheduler.resume()
    assert isinstance(refusal, CanaryRefusal)
    assert (refusal.report.outcome, "r0 has not generated" in refusal.report.reasons[0]) == ("failed", True)
    assert [(s.replica, bool(s.out_of_service)) for s in refusal.replicas] == [("r0", True)]
    assert rig.active() == ["shuffled", "echo"], "the one that was stopped had no way to hear of it"
    assert [(s.replica, s.out_of_service) for s in rollout.reconcile(rig.site, AUTHORITY)] == [("r0", "")]
    assert rig.active() == ["echo", "echo"]
    for engine in impatient:
        engine.close()
