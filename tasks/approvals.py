"""Approvals: a promotion that policy wants a person for waits suspended, and goes on or ends by what they answer.

What waits is in the ledger, not in Prefect's results: a resumed run starts from the top and finds its place there. A
form takes anything, so that what a person types never fails a run; what is wrong with it is recorded, and it is asked
again.
"""

from __future__ import annotations

import time

from prefect import get_run_logger
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment

from tasks.evaluate import publish_verdict
from tasks.stage import stage
from tasks.suspension import (
    api_on_loopback,
    form_for,
    require_suspendable,
    resume_suspended,
    state_of,
    this_run,
)
from tide import wiring
from tide.approvals import answers as approval_answers
from tide.approvals import rules as approval_rules
from tide.approvals import steps as approvals
from tide.approvals import text as approval_text
from tide.approvals.answers import Form
from tide.canary import trial
from tide.domain import (
    ApprovalAnswer,
    ApprovalRequest,
    ApprovalSettlement,
    CanaryRefusal,
    Proposal,
    Value,
    Verdict,
)
from tide.errors import SignatureRefused
from tide.lineage import ledger
from tide.serving import rollout
from tide.serving.serving_file import candidate_on, read_signed_verdict
from tide.signatures.attestation import check_verdict
from tide.store.base import Store

LATELY = 20
"""Settled requests whose runs are looked after: a process that died may have settled one and not resumed its run."""


class Standing(Value):
    """Where a request stands: how it ended, or which form is asked for next."""

    ended: ApprovalSettlement | None = None
    round: int = 0


@stage("start promotion")
def start_promotion(proposal: Proposal, states_ref: str) -> str:
    """Start the ``promote`` deployment on a proposal and do not wait: it may wait for a person, for days.

    Returns:
        Id of the run; the same again for the same verdict.
    """
    run = run_deployment(
        "promote/promote",
        parameters={"branch": proposal.branch, "states_ref": states_ref},
        as_subflow=False,  # a run with a parent cannot be suspended
        timeout=0,
        idempotency_key=proposal.verdict.digest(),
    )
    assert isinstance(run, FlowRun)  # Prefect types the call for async callers as well
    get_run_logger().info("the promotion of %s goes on in run %s (%s)", proposal.branch, run.name, run.id)
    return str(run.id)


@stage("find proposal")
def find_proposal(branch: str) -> Proposal | None:
    """The candidate on a branch with a verdict that holds; None when it must be judged.

    What this run asked approval of comes first. Otherwise the verdict must be signed, say ``promote``, and be made
    against what serves now under the policy of now; one that was refused, by people or by the canary, is spent.
    """
    config = wiring.settings()
    store, drafts = wiring.store(config), config.drafts_repository
    book, verdict = approvals.read(store, drafts), _verdict_on(store, branch)
    if request := book.of_run(this_run()):
        if verdict is not None and verdict.digest() == request.verdict:
            return Proposal(branch=branch, verdict=verdict, generation=request.generation)
        approvals.void(store, drafts, request, f"{branch} has another verdict now", time.time())
        return None
    if verdict is None:
        return None
    serving, policy = rollout.read_serving(store, drafts), config.policy().digest()
    taken_back = {refusal.lease.verdict for refusal in ledger.every(store, drafts, trial.LEDGER, CanaryRefusal)}
    generation = approval_rules.generation_for(verdict, serving, policy, book.spent() | taken_back)
    if generation is None:
        return None
    get_run_logger().info("verdict %s on %s holds: not judged again", verdict.digest()[:12], branch)
    return Proposal(branch=branch, verdict=verdict, generation=generation)


def await_approval(proposal: Proposal) -> ApprovalSettlement | None:
    """Wait, suspended, until people have decided; None when policy wants nobody's word on this promotion.

    A part of the flow and no stage: a stage cannot suspend.
    """
    request = request_approval(proposal)
    if request is None:
        return None
    standing = settle_approval(request, proposal.verdict)
    while standing.ended is None:
        key = f"approval-{request.digest()[:12]}-{standing.round}"
        form = form_for(key, approval_text.to_markdown(request, proposal.verdict))
        record_answer(request, form)
        standing = settle_approval(request, proposal.verdict)
    return standing.ended


@stage("request approval")
def request_approval(proposal: Proposal) -> ApprovalRequest | None:
    """Find or make this run's request; what waited before it is superseded, and its run resumed so that it ends.

    Raises:
        ConfigError: policy wants a person, and this run cannot wait for one.
    """
    config = wiring.settings()
    store, drafts = wiring.store(config), config.drafts_repository
    book, run = approvals.read(store, drafts), this_run()
    request = book.of_run(run) or _new_request(store, proposal, run)
    if request is None or book.end_of(request) is None:
        _supersede(store, book, request, run, proposal.verdict)
    if request is not None:
        publish_verdict(proposal.verdict)
    return request


@stage("settle approval")
def settle_approval(request: ApprovalRequest, verdict: Verdict) -> Standing:
    """How a request ended, by the answers in the ledger; recorded once, an approval beside its candidate as well.

    Raises:
        SignatureRefused: the ledger says approved, and the answers in it do not: somebody wrote into it.
    """
    config = wiring.settings()
    store, drafts, policy = wiring.store(config), config.drafts_repository, config.policy().approval
    book, loopback = approvals.read(store, drafts), api_on_loopback()
    answers, ended = book.answers_to(request), book.end_of(request)
    if ended is None:
        ended = approval_rules.conclude(request, book.requests, answers, policy, loopback=loopback, now=time.time())
        ended = approvals.settle(store, drafts, request, ended) if ended else None
    if ended is None:
        return Standing(round=len(answers))
    if ended.outcome == "approved":
        approval_rules.require_approved(request, answers, policy, loopback=loopback)
        approvals.attach(store, drafts, verdict, ended)
    get_run_logger().info("%s: %s", ended.outcome, "; ".join(ended.reasons))
    return Standing(ended=ended)


@stage("record answer")
def record_answer(request: ApprovalRequest, form: Form) -> ApprovalAnswer:
    """Record what a form said, and what is wrong with it."""
    config = wiring.settings()
    store, drafts, policy = wiring.store(config), config.drafts_repository, config.policy().approval
    earlier = approvals.read(store, drafts).answers_to(request)
    found = approval_answers.examine(form, request, policy, earlier, loopback=api_on_loopback(), now=time.time())
    approvals.answer(store, drafts, found)
    if found.problems:
        get_run_logger().warning("the answer does not count: %s", "; ".join(found.problems))
    return found


@stage("void approval")
def void_approval(settlement: ApprovalSettlement) -> None:
    """Record that an approved promotion came to nothing: what serves is not what it was judged against."""
    config = wiring.settings()
    store, drafts = wiring.store(config), config.drafts_repository
    request = next(r for r in approvals.read(store, drafts).requests if r.digest() == settlement.request)
    reason = f"what serves changed after generation {request.generation}: the candidate is judged again"
    approvals.void(store, drafts, request, reason, time.time())


@stage("expire approvals")
def expire_approvals() -> list[ApprovalSettlement]:
    """Refuse what waited too long, was superseded, or whose run has ended; resume what was settled, so that it ends."""
    config = wiring.settings()
    store, drafts, policy = wiring.store(config), config.drafts_repository, config.policy().approval
    ended = approvals.expire(store, drafts, policy, loopback=api_on_loopback(), now=time.time())
    for item in approvals.waiting(store, drafts):
        state = state_of(item.request.run)
        if state is not None and state.is_final():
            why = [f"abandoned: run {item.request.run} ended {state.name} while it waited"]
            refusal = approval_rules.refusal(item.request, "abandoned", why, time.time())
            ended.append(approvals.settle(store, drafts, item.request, refusal))
    for settlement in ended:
        get_run_logger().info("run %s: %s: %s", settlement.run, settlement.outcome, "; ".join(settlement.reasons))
    book = approvals.read(store, drafts)
    # A run may wait again, with a new verdict, after an approval that came to nothing.
    busy = {this_run(), *(item.request.run for item in book.waiting())}
    resume_suspended([s.run for s in book.settled[-LATELY:] if s.run not in busy])
    return ended


def _new_request(store: Store, proposal: Proposal, run: str) -> ApprovalRequest | None:
    """Record that this run waits, if policy wants a person's word on it."""
    config = wiring.settings()
    drafts, policy = config.drafts_repository, config.policy().approval
    reasons = approvals.reasons_for(store, drafts, proposal.verdict, policy)
    if not reasons:
        return None
    require_suspendable()
    request = approval_rules.request_for(proposal, run, reasons, policy, time.time())
    approvals.ask(store, drafts, request)
    get_run_logger().info("asks for approval: %s", "; ".join(reasons))
    return request


def _supersede(store: Store, book: approvals.Book, request: ApprovalRequest | None, run: str, verdict: Verdict) -> None:
    """Settle what waited when this promotion came, and resume its run."""
    why = approval_rules.superseded_by(run, verdict.digest())
    others = [item.request for item in book.waiting() if item.request.run != run]
    older = [other for other in others if request is None or other.asked_at < request.asked_at]
    for other in older:
        refusal = approval_rules.refusal(other, "superseded", [why], time.time())
        approvals.settle(store, wiring.settings().drafts_repository, other, refusal)
        get_run_logger().info("run %s waits no longer: %s", other.run, why)
    resume_suspended([other.run for other in older])


def _verdict_on(store: Store, branch: str) -> Verdict | None:
    """The verdict on a branch that lets its candidate serve, or None; a forged one is none."""
    config = wiring.settings()
    drafts = config.drafts_repository
    digest = candidate_on(store, drafts, branch)
    try:
        return check_verdict(read_signed_verdict(store, drafts, branch, digest), digest, wiring.trusted(config))
    except SignatureRefused as error:
        get_run_logger().info("the candidate is to be judged: %s", error)
        return None
