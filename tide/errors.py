"""Every failure TIDE raises on purpose. An outside failure is one of these by the time it leaves an adapter.

TideError                     .transient says whether a retry may help; only such errors are retried
├── ConfigError               a setting or a policy value is missing or out of range
├── BadInputError             a file or a record is not what it should be
│   ├── ShardError            names shard, row and rule
│   ├── DraftError            a draft's files or weights are refused
│   └── TrafficError          a file of prompts
├── ContractMismatch          two things that must share an identity do not; names the part
├── ApprovalRefused           an approval could not be given, or does not count; says why
├── SignatureRefused          a record that must be signed by a trusted key is not, or does not allow what is asked
├── StoreError                names repository, ref and path
│   ├── StoreUnavailable      (transient) no answer, throttled, branch locked
│   │   └── AddressRefused    a presigned address had expired, or the block store took none of its kind
│   ├── StoreUnauthorized     keys refused
│   ├── NotFound              no such repository, ref or object
│   ├── Gone                  the object was listed but its bytes were deleted
│   ├── AlreadyExists         a write-once name was taken
│   ├── Conflict              a merge lost a race
│   │   └── CanaryBusy        another candidate is on trial; it ends by its lease at the latest
│   ├── NothingToCommit       the branch has no change
│   ├── ProtectedBranch       direct writes are refused
│   └── HookRefused           a pre-merge hook said no
├── EngineError
│   ├── EngineUnavailable     (transient) no answer, or not healthy
│   └── SwapRefused           the draft was not changed; the reason says why
├── TrainingError
│   ├── TrainingDiverged      loss 0 or not finite
│   ├── TrainingStalled       no step within the deadline
│   └── TrainingCancelled     asked to stop; the process group has ended
├── EvaluationError           nothing to evaluate, or not comparable
└── ServiceError              a part that TIDE runs on did not start, did not answer, or refused
    └── NotThere              it answers, and has no such thing
"""

from __future__ import annotations

from typing import ClassVar


class TideError(Exception):
    """Base of all TIDE failures. The message says what, where and what to do next."""

    transient: ClassVar[bool] = False


class ConfigError(TideError):
    """A setting or a policy value is missing or out of range."""


class BadInputError(TideError):
    """A file or a record is not what it should be."""


class ShardError(BadInputError):
    """A shard breaks a rule of its format.

    Args:
        shard: file name of the shard.
        rule: short name of the broken rule, used as the key of counters (``truncated``, ``non_finite`` ...).
        detail: what was found, and what was expected.
        row: row (or request) at fault, if one can be named.
    """

    def __init__(self, shard: str, rule: str, detail: str, row: int | None = None) -> None:
        self.shard, self.rule, self.detail, self.row = shard, rule, detail, row
        at = "" if row is None else f", row {row}"
        super().__init__(f"shard {shard}{at}: {rule}: {detail}")

    def __reduce__(self) -> tuple[type[ShardError], tuple[str, str, str, int | None]]:
        return type(self), (self.shard, self.rule, self.detail, self.row)


class DraftError(BadInputError):
    """A draft's files or weights are refused."""


class TrafficError(BadInputError):
    """A file of prompts is missing, empty or malformed."""


class ContractMismatch(TideError):
    """Two things that must share an identity do not.

    Args:
        what: the contract compared (``target`` or ``draft``), and between whom.
        differences: one line a differing part, ``part: expected != found``.
    """

    def __init__(self, what: str, differences: tuple[str, ...]) -> None:
        self.what, self.differences = what, differences
        super().__init__(f"{what} contract differs: {'; '.join(differences)}")

    def __reduce__(self) -> tuple[type[ContractMismatch], tuple[str, tuple[str, ...]]]:
        return type(self), (self.what, self.differences)


class SignatureRefused(TideError):
    """A record that must be signed by a trusted key is not, or it does not allow what is asked."""


class ApprovalRefused(TideError):
    """An approval could not be given, or does not count; nothing changed."""


class StoreError(TideError):
    """The store refused or failed."""


class StoreUnavailable(StoreError):
    """No answer, throttled, or a branch was locked for a moment."""

    transient = True


class AddressRefused(StoreUnavailable):
    """The block store refused a presigned address; a new one was asked for as often as anything is tried."""


class StoreUnauthorized(StoreError):
    """The keys were refused."""


class NotFound(StoreError):
    """No such repository, ref or object."""


class Gone(StoreError):
    """The object is listed but its bytes were deleted."""


class AlreadyExists(StoreError):
    """A write-once name was taken."""


class Conflict(StoreError):
    """A merge lost a race; nothing was merged."""


class CanaryBusy(Conflict):
    """Another candidate is on trial; nothing was changed. It ends by itself, or by its lease."""


class NothingToCommit(StoreError):
    """The branch has no change against its head."""


class ProtectedBranch(StoreError):
    """Direct writes to this branch are refused."""


class HookRefused(StoreError):
    """A pre-merge hook refused; nothing was merged."""


class SpoolBusy(TideError):
    """Another harvester holds the spool."""

    transient = True


class EngineError(TideError):
    """The serving engine refused or failed."""


class EngineUnavailable(EngineError):
    """No answer, or the engine is not healthy."""

    transient = True


class SwapRefused(EngineError):
    """The draft was not changed; the message has the engine's reason."""


class TrainingError(TideError):
    """The trainer failed."""


class TrainingDiverged(TrainingError):
    """Loss was 0 or not finite for several steps."""


class TrainingStalled(TrainingError):
    """No step was reported within the deadline; the process group was ended."""


class TrainingCancelled(TrainingError):
    """The run was asked to stop; the process group has ended."""


class EvaluationError(TideError):
    """There is nothing to evaluate, or two reports cannot be compared."""


class ServiceError(TideError):
    """A part that TIDE runs on could not be started, did not become ready, did not answer, or refused."""


class NotThere(ServiceError):
    """A part that TIDE runs on answers, and has no such thing."""
