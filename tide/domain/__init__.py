"""The nouns of TIDE: frozen records that the stages hand to one another, and the identity rules that bind them.

Owns names, schema versions and what makes two things the same. Knows nothing of files, clients, tensors or clocks.
"""

from tide.domain.approval import Approval, ApprovalAnswer, ApprovalRequest, ApprovalSettlement, Proposal
from tide.domain.canary import CanaryLease, CanaryRefusal, CanaryReport
from tide.domain.choices import CheckpointChoice, CheckpointScore, CostDecision, PoolChoice
from tide.domain.decisions import (
    ACCEPTANCE_DEFINITION,
    DriftReport,
    EvalReport,
    GateGeneration,
    Interval,
    PredictedThroughput,
    RequestScore,
    SliceVerdict,
    Verdict,
)
from tide.domain.drafts import DraftModel, PreflightConfig, TrainingConfig, TrainingProgress
from tide.domain.erasure import ErasedObject, Erasure, ErasureDone
from tide.domain.identity import (
    GATE_BUCKETS,
    SELECTION_BUCKETS,
    Digest,
    DraftContract,
    GrownRecord,
    Record,
    Split,
    TargetContract,
    Value,
    split_of,
)
from tide.domain.profile import EngineProfile, ProfilePoint
from tide.domain.replicas import ReplicaSwap
from tide.domain.serving import LineageRecord, Promotion, Serving, ServingDraft
from tide.domain.signed import Attestation, KeyId, Signed, SignedKind
from tide.domain.states import PROBE_SLICE, HarvestResult, RequestSegment, Shard, ShardRequest, Snapshot, WindowManifest

__all__ = [
    "ACCEPTANCE_DEFINITION",
    "GATE_BUCKETS",
    "PROBE_SLICE",
    "SELECTION_BUCKETS",
    "Approval",
    "ApprovalAnswer",
    "ApprovalRequest",
    "ApprovalSettlement",
    "Attestation",
    "CanaryLease",
    "CanaryRefusal",
    "CanaryReport",
    "CheckpointChoice",
    "CheckpointScore",
    "CostDecision",
    "Digest",
    "DraftContract",
    "DraftModel",
    "DriftReport",
    "EngineProfile",
    "ErasedObject",
    "Erasure",
    "ErasureDone",
    "EvalReport",
    "GateGeneration",
    "GrownRecord",
    "HarvestResult",
    "Interval",
    "KeyId",
    "LineageRecord",
    "PoolChoice",
    "PredictedThroughput",
    "PreflightConfig",
    "ProfilePoint",
    "Promotion",
    "Proposal",
    "Record",
    "ReplicaSwap",
    "RequestScore",
    "RequestSegment",
    "Serving",
    "ServingDraft",
    "Shard",
    "ShardRequest",
    "Signed",
    "SignedKind",
    "SliceVerdict",
    "Snapshot",
    "Split",
    "TargetContract",
    "TrainingConfig",
    "TrainingProgress",
    "Value",
    "Verdict",
    "WindowManifest",
    "split_of",
]
