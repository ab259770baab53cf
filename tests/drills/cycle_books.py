"""The books that must balance when nothing is at work: what serves, what is stored, what was trained, what is held.

Knows nothing of how a cycle works or of what was killed: it reads the store, the replicas, the spool and the server.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from tests.support.harvested import ReadBack, read_back
from tests.support.operated import REPLICAS, SERVICE, Pipeline
from tide.domain import LineageRecord
from tide.errors import TideError
from tide.repositories import candidate_branches
from tide.serving.serving_file import read_attestation, read_serving
from tide.signatures import keys
from tide.signatures.signing import TrustedKeys

STATES, DRAFTS = f"{SERVICE}-states", f"{SERVICE}-drafts"


@dataclass(frozen=True)
class Books:
    """Of one pipeline."""

    pipe: Pipeline

    def faults(self) -> dict[str, list[str]]:
        """What is wrong now, by kind; empty when all is well."""
        found = {
            "half_promoted": self._half_promoted(),
            "leaked_slots": [f"{name}: {taken} taken" for name, taken in self.pipe.slots().items() if taken],
            "left_behind": self._left_behind(),
        }
        return {kind: lines for kind, lines in found.items() if lines}

    def read_back(self) -> ReadBack:
        """Every byte and every commit of the states."""
        return read_back(self.pipe.store, STATES, self.pipe.good)

    def trained(self) -> list[dict[str, Any]]:
        """Trainings that came to their end."""
        return [line for line in self.pipe.trainings() if line["what"] == "end"]

    def double_trainings(self) -> list[str]:
        """Trainings that ran beside another of the same inputs, or began when their candidate was published already.

        One that was killed and made again is no double: its result was lost.
        """
        published, found = self._published(), []
        for key, spans in self._spans().items():
            for place, (began, ended, digest) in enumerate(spans):
                if any(began < other_end and other_began < ended for other_began, other_end, _ in spans[:place]):
                    found.append(f"{key[:12]}: trained twice at once")
                elif digest in published and began > published[digest] + 1:
                    found.append(f"{key[:12]}: trained again when its candidate was published")
        return found

    def _spans(self) -> dict[str, list[tuple[float, float, str]]]:
        """Beginning, end and draft of every training that came to its end, by its inputs."""
        began, spans = dict[tuple[str, int], float](), defaultdict[str, list[tuple[float, float, str]]](list)
        for line in self.pipe.trainings():
            who = (line["key"], line["pid"])
            if line["what"] == "start":
                began[who] = line["at"]
            else:
                spans[line["key"]].append((began.pop(who), line["at"], line["digest"]))
        return spans

    def _published(self) -> dict[str, float]:
        """When each candidate was published, by its digest."""
        store, found = self.pipe.store, dict[str, float]()
        for branch in candidate_branches(store, DRAFTS):
            for commit in store.log(DRAFTS, branch):
                record = LineageRecord.from_metadata(commit.metadata)
                if record is not None and record.kind == "candidate":
                    found[record.subject] = commit.created_at
                    break
        return found

    def _half_promoted(self) -> list[str]:
        store = self.pipe.store
        serving = read_serving(store, DRAFTS)
        if serving.stable is None:
            return ["nothing serves"]
        digest, found = serving.stable.digest, []
        _, key = keys.ensure(self.pipe.home)
        try:
            read_attestation(store, DRAFTS, TrustedKeys([key.public]))
        except TideError as error:
            found.append(f"generation {serving.generation} is not attested: {error}")
        for name in REPLICAS:
            file = self.pipe.home / "replicas" / name
            active = file.read_text() if file.exists() else "none"
            if active != digest:
                found.append(f"{name} serves {active[:12]}, {digest[:12]} is in serving")
        if (marked := (self.pipe.home / "drafts" / "serving").read_text().strip()) != digest:
            found.append(f"a replica that starts would serve {marked[:12]}")
        if f"gen-{serving.generation:06d}-{digest[:12]}" not in dict(store.tags(DRAFTS)):
            found.append(f"generation {serving.generation} has no tag")
        return found

    def _left_behind(self) -> list[str]:
        store = self.pipe.store
        branches = [b for b in store.branches(STATES) if b != "main"]
        branches += [b for b in store.branches(DRAFTS) if b.startswith("serving-")]
        files = [
            p for kind in ("train", "held_out", "requests") for p in (self.pipe.home / "spool" / kind).glob("[!.]*")
        ]
        ranks = self.pipe.trainers()
        return [*branches, *map(str, files), *(f"training process {p.pid}" for p in ranks)]
