"""The nouns of TIDE: frozen records that the stages hand to one another, and the identity rules that bind them.

Owns names, schema versions and what makes two things the same. Knows nothing of files, clients, tensors or clocks.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""Lower-case hexadecimal sha256."""

ACCEPTANCE_DEFINITION = "pooled/1"
"""Generated tokens over verify steps, bonus token included, summed over requests before dividing."""

GATE_BUCKETS = range(0, 10)
SELECTION_BUCKETS = range(10, 15)


class Value(BaseModel):
    """A frozen value; unknown fields are an error, so that a newer record is never half-read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces; what digests are taken of."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)


class Record(Value):
    """A value that is known by the digest of what it says."""

    def digest(self) -> str:
        """sha256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


class Split(StrEnum):
    """What a conversation may be used for; decided once, by its hash, for ever."""

    GATE = "gate"
    SELECTION = "selection"
    TRAIN = "train"

    @property
    def folder(self) -> str:
        """Folder of its shards: the trainer never lists ``held_out``, the evaluator never reads ``train``."""
        return "train" if self is Split.TRAIN else "held_out"


def split_of(conversation: str) -> Split:
    """Split of a conversation: 10% gate, 5% checkpoint selection, the rest training.

    Args:
        conversation: hexadecimal hash of the conversation (at least 8 digits).
    """
    bucket = int(hashlib.sha256(b"tide-split/1:" + conversation.encode()).hexdigest()[:8], 16) % 100
    if bucket in GATE_BUCKETS:
        return Split.GATE
    return Split.SELECTION if bucket in SELECTION_BUCKETS else Split.TRAIN


def _differences(ours: Record, theirs: Record, skip: frozenset[str] = frozenset()) -> tuple[str, ...]:
    a, b = ours.model_dump(mode="json"), theirs.model_dump(mode="json")
    return tuple(f"{k}: {a[k]} != {b[k]}" for k in a if k not in skip and a[k] != b[k])


class TargetContract(Record):
    """Identity of the target model, part by part, as far as its hidden states depend on it."""

    weights: Digest
    tokenizer: Digest
    dtype: str
    quantization: str | None = None
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    aux_layers: tuple[int, ...]
    """Layers really captured, as indices of layer OUTPUTS (id i = output of layer i, the embedding not counted)."""

    def differences(self, other: TargetContract) -> tuple[str, ...]:
        """One line a differing part; empty when both are the same target."""
        return _differences(self, other)


class DraftContract(Record):
    """The configuration that a draft's forward pass depends on, and the digest of its vocabulary map."""

    architecture: str = "LlamaForCausalLMEagle3"
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: str | None = None
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    vocab_map: Digest
    """sha256 of d2t as little-endian int64."""

    def differences(self, other: DraftContract, *, hot_swap: bool = False) -> tuple[str, ...]:
        """One line a differing part.

        Args:
            hot_swap: leave out ``vocab_map``, which a running engine may exchange; any other part needs a restart.
        """
        return _differences(self, other, frozenset({"vocab_map"}) if hot_swap else frozenset())


class ShardRequest(Record):
    """One request inside a shard, in the order of its rows."""

    request: str
    conversation: str
    slice: str
    draft: str
    """Digest of the draft that served it, ``none`` or ``mixed``: provenance, never compared."""
    sampling: Literal["greedy", "sampled", "unknown"] = "unknown"


class Shard(Record):
    """Manifest of one shard. It is written last: a file without a manifest does not exist."""

    schema_version: Literal[1] = 1
    name: Digest
    """sha256 of the safetensors file; the file is ``<name>.safetensors``."""
    split: Literal["train", "held_out"]
    target: TargetContract
    rows: int = Field(ge=0)
    size: int = Field(ge=0)
    requests: tuple[ShardRequest, ...]
    opened_at: float
    closed_at: float
    chat_template: str = ""
    engine: str = ""

    @property
    def file(self) -> str:
        """Name of the safetensors file."""
        return f"{self.name}.safetensors"


class RequestSegment(Record):
    """Manifest of one piece of the request table: every request that finished between two closings."""

    schema_version: Literal[1] = 1
    name: Digest
    """sha256 of the parquet file; the file is ``<name>.parquet``."""
    target: TargetContract
    rows: int = Field(ge=0)
    opened_at: float
    closed_at: float
    dropped: dict[str, int]
    """Rows lost by a fault or for want of room, by reason."""
    excluded: dict[str, int]
    """Requests not captured because policy said so, by reason."""

    @property
    def file(self) -> str:
        """Name of the parquet file."""
        return f"{self.name}.parquet"


class WindowManifest(Record):
    """What one replica captured in one window: ``windows/<window>/<replica>/manifest.json``."""

    schema_version: Literal[1] = 1
    window: str
    replica: str
    target: TargetContract | None = None
    """None when nothing of the window could be used."""
    shards: tuple[str, ...] = ()
    """sha256 of each, sorted."""
    segments: tuple[str, ...] = ()
    """sha256 of the pieces that ``requests.parquet`` was merged from, sorted."""
    rows: int = 0
    requests: int = 0
    """Rows of the request table."""
    drafts: tuple[str, ...] = ()
    """Digests of the drafts that served."""
    engines: tuple[str, ...] = ()
    dropped: dict[str, int] = Field(default_factory=dict)
    excluded: dict[str, int] = Field(default_factory=dict)
    quarantined: dict[str, str] = Field(default_factory=dict)
    """Rule by file name."""


class HarvestResult(Record):
    """What one harvest brought in."""

    repository: str
    commit: str | None
    """Head of ``main`` after it; None when no window was closed."""
    windows: tuple[str, ...] = ()
    shards: int = 0
    rows: int = 0
    requests: int = 0
    size: int = 0
    """Bytes of new shards."""
    duplicates: int = 0
    """Shards that ``main`` had already, not stored again."""
    quarantined: dict[str, int] = Field(default_factory=dict)
    """Files refused, by rule."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """Rows lost while capturing, by reason, as the manifests say."""
    excluded: dict[str, int] = Field(default_factory=dict)


class Snapshot(Record):
    """An immutable commit of states, and what it holds."""

    schema_version: Literal[1] = 1
    repository: str
    commit: str
    target: TargetContract
    windows: tuple[str, ...]
    shards: int
    requests: int
    rows: int
    drafts: tuple[str, ...]


class TrainingConfig(Record):
    """Knobs of one training run, as given to SpecForge."""

    epochs: int = Field(default=2, ge=1)
    batch_size: int = Field(default=4, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0, lt=1)
    ttt_length: int = Field(default=3, ge=1, le=16)
    max_length: int = Field(default=512, ge=16)
    prompt_rows: int = Field(default=64, ge=1)
    """Prompt rows kept before the generated ones."""
    max_steps: int | None = Field(default=None, ge=1)
    checkpoints: int = Field(default=3, ge=1)
    draft_vocab_size: int = Field(default=8192, ge=1)
    min_vocab_coverage: float = Field(default=0.95, ge=0, le=1)
    """Below this share of generated tokens inside the parent's draft vocabulary, the vocabulary is chosen anew."""
    seed: int = 0


class TrainingProgress(Record):
    """A moment of a training run."""

    step: int
    total_steps: int
    loss: float | None
    eta_s: float | None


class DraftModel(Value):
    """A draft and where it comes from."""

    schema_version: Literal[1] = 1
    digest: Digest
    """sha256 of ``model.safetensors``."""
    contract: DraftContract
    target: TargetContract
    parent: str | None = None
    states_repository: str | None = None
    states_commit: str | None = None
    """None for an imported draft: one that we did not train."""
    trained_tokens: int = 0
    trained_requests: int = 0
    steps: int = 0
    max_length: int = 0
    selection_acceptance_length: float | None = None
    policy: str | None = None
    seed: int | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    created_at: float = 0.0

    @property
    def imported(self) -> bool:
        """True when TIDE did not train it."""
        return self.states_commit is None


class RequestScore(Record):
    """One request walked with one draft: what serving would have done."""

    request: str
    conversation: str
    slice: str
    tokens: int = Field(ge=0)
    """Generated tokens covered by the verify steps."""
    verify_steps: int = Field(ge=0)
    proposed: int = Field(ge=0)
    accepted: int = Field(ge=0)


class EvalReport(Record):
    """Acceptance of one draft on a set of held-out requests, request by request."""

    schema_version: Literal[1] = 1
    definition: str = ACCEPTANCE_DEFINITION
    draft: str
    contract: DraftContract | None
    target: TargetContract
    states_commit: str
    steps: int = Field(ge=1)
    topk: int = Field(default=1, ge=1)
    sampling: str = "greedy"
    scores: tuple[RequestScore, ...]

    @property
    def acceptance_length(self) -> float:
        """Pooled: tokens over verify steps, bonus included. 1.0 when nothing was verified."""
        steps = sum(s.verify_steps for s in self.scores)
        return sum(s.tokens for s in self.scores) / steps if steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed draft tokens."""
        proposed = sum(s.proposed for s in self.scores)
        return sum(s.accepted for s in self.scores) / proposed if proposed else 0.0


class DriftReport(Record):
    """Whether retraining pays now, and why."""

    schema_version: Literal[1] = 1
    decision: Literal["none", "watch", "retrain"]
    cause: Literal["drift", "bootstrap", "headroom"] | None = None
    reasons: tuple[str, ...]
    figures: dict[str, float | None]
    incumbent: str
    states_commit: str


class Interval(Record):
    """An estimate with its one-sided bounds."""

    estimate: float
    low: float
    high: float


class SliceVerdict(Record):
    """How the candidate compares on one slice, in acceptance length."""

    slice: str
    requests: int
    candidate: float
    incumbent: float
    difference: Interval


class Verdict(Record):
    """The promotion gate's decision; refusal is a normal value."""

    schema_version: Literal[1] = 1
    outcome: Literal["promote", "reject", "inconclusive"]
    candidate: str
    incumbent: str
    reasons: tuple[str, ...]
    overall: SliceVerdict
    slices: tuple[SliceVerdict, ...]
    alpha: float
    attempt: int = 1
    detectable_effect: float | None = None
    more_requests: int = 0
    """Further requests needed, when inconclusive."""
    states_commit: str
    policy: str
    target: TargetContract
    definition: str = ACCEPTANCE_DEFINITION
    sampling: str = "greedy"


class ServingDraft(Value):
    """A draft in serving, and the verdict that put it there."""

    digest: Digest
    verdict: str | None = None


class Serving(Record):
    """``serving.json``: the one truth about what serves."""

    schema_version: Literal[1] = 1
    generation: int = Field(default=0, ge=0)
    stable: ServingDraft | None = None
    previous: ServingDraft | None = None
    canary: None = None


class ReplicaSwap(Record):
    """What one replica did during a rollout."""

    replica: str
    before: str
    after: str
    seconds: float
    restarted: bool = False


class Promotion(Record):
    """A change of ``serving.json`` carried out on every replica."""

    schema_version: Literal[1] = 1
    kind: Literal["promotion", "rollback"]
    generation: int
    draft: str
    previous: str | None
    verdict: str | None
    replicas: tuple[ReplicaSwap, ...]
    at: float


class LineageRecord(Record):
    """What stands in a commit's metadata: kind, the thing made, and what it was made from."""

    schema_version: Literal[1] = 1
    kind: Literal["states", "candidate", "verdict", "promotion", "rollback"]
    subject: str
    parents: dict[str, str] = Field(default_factory=dict)
    facts: dict[str, str] = Field(default_factory=dict)

    def to_metadata(self) -> dict[str, str]:
        """Flat strings, as a commit takes them."""
        flat = {"tide.schema_version": str(self.schema_version), "tide.kind": self.kind, "tide.subject": self.subject}
        flat |= {f"tide.parent.{k}": v for k, v in sorted(self.parents.items())}
        return flat | {f"tide.{k}": v for k, v in sorted(self.facts.items())}

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> Self | None:
        """The record in a commit's metadata, or None when the commit is not TIDE's."""
        if "tide.kind" not in metadata:
            return None
        own = {k.removeprefix("tide."): str(v) for k, v in metadata.items() if k.startswith("tide.")}
        parents = {k.removeprefix("parent."): own.pop(k) for k in list(own) if k.startswith("parent.")}
        version, kind, subject = int(own.pop("schema_version", "1")), own.pop("kind"), own.pop("subject", "")
        return cls.model_validate(
            {"schema_version": version, "kind": kind, "subject": subject, "parents": parents, "facts": own}
        )
