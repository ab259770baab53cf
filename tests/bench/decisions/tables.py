"""Turns what ``collect`` gathered into the two tables of the corpus.

Owns the join: answers, walks and live counters are of one request when they are of one conversation, since every
conversation is served once. Live answers that differ from the captured ones are left out, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench.decisions.corpus import DATA, REQUESTS_SCHEMA, SCORES_SCHEMA
from tests.bench.decisions.prompts import HASH_KEY, LONGEST, choose
from tide.domain import EvalReport
from tide.sglang_plugin.admission import conversation_hash

Answers = dict[str, dict[str, Any]]


def write_tables(home: Path) -> None:
    """``scores.parquet`` and ``requests.parquet``."""
    answers = {hashed(line): line for w in LONGEST for line in lines(home / f"answers-{w}.jsonl")}
    drafts: dict[str, Any] = json.loads((home / "drafts.json").read_text())
    rows = [row for name in drafts for row in walked(home, name, answers)]
    names = {row["conversation"]: row["request"] for row in rows}
    live = [row for name in drafts for row in served(home, name, answers, names)]
    DATA.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows + live, SCORES_SCHEMA), DATA / "scores.parquet", compression="zstd")
    table = pa.Table.from_pylist(list(inputs(home, set(names.values()), answers)), REQUESTS_SCHEMA)
    pq.write_table(table, DATA / "requests.parquet", compression="zstd")
    (DATA / "drafts.json").write_text(json.dumps(drafts, indent=1) + "\n")
    (home / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts(names)))
    print(f"{len(rows)} walked rows, {len(live)} live ones, {table.num_rows} requests, in {DATA}")


def prompts(names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The scored prompts with the names of their requests, as ``speed`` reads them."""
    for workload in LONGEST:
        for prompt in choose(workload).scored:
            if request := names.get(conversation_hash(HASH_KEY.encode(), prompt.conversation)):
                yield {"workload": workload, "request": request, "messages": prompt.messages}


def hashed(line: dict[str, Any]) -> str:
    """Name of a conversation everywhere outside the client."""
    return conversation_hash(HASH_KEY.encode(), line["conversation"])


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a file of JSON lines."""
    return (json.loads(line) for line in path.read_text().splitlines())


def walked(home: Path, name: str, answers: Answers) -> Iterator[dict[str, Any]]:
    """Rows of one draft's walk."""
    report = EvalReport.model_validate_json((home / f"walk-{name}.json").read_bytes())
    for score in report.scores:
        answer = answers[score.conversation]
        fields = score.model_dump(include=set(SCORES_SCHEMA.names))
        fields |= {"workload": answer["workload"], "draft": name, "source": "walk"}
        yield fields | {"prompt_tokens": answer["prompt_tokens"]}


def served(home: Path, name: str, answers: Answers, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Rows of one draft's live counters, the answers token for token as captured; a request is named as walked."""
    left_out = 0
    for line in lines(home / f"live-{name}.jsonl"):
        conversation = hashed(line)
        same = line["output_ids"] == answers[conversation]["output_ids"]
        if not same or not line["verify_steps"] or conversation not in names:
            left_out += 1
            continue
        yield {
            "workload": line["workload"],
            "draft": name,
            "source": "live",
            "request": names[conversation],
            "conversation": conversation,
            "slice": line["workload"],
            "prompt_tokens": line["prompt_tokens"],
            "tokens": line["completion_tokens"],
            **{field: line[field] for field in ("verify_steps", "proposed", "accepted")},
        }
    if left_out:
        print(f"{name}: {left_out} live answers left out: other tokens than captured, or no verify step")


def inputs(home: Path, requests: set[str], answers: Answers) -> Iterator[dict[str, Any]]:
    """Rows of the plugin's own request table, for the scored requests."""
    wanted = [c for c in REQUESTS_SCHEMA.names if c != "workload"]
    for path in sorted((home / "spool" / "requests").glob("*.parquet")):
        for row in pq.read_table(path, columns=wanted).to_pylist():
            if row["request"] in requests:
                yield row | {"workload": answers[row["conversation"]]["workload"]}
