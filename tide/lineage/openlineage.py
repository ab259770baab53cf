"""Lineage for the catalogue a team already has: records of lineage as OpenLineage events, by the official client.

Owns the mapping, and delivery. An option beside the commits and the ledger, never in their place: what cannot be
delivered is logged as a warning once, counted in ``lost``, and stops nothing. Knows nothing of stores: it is told of
commits.

    record      job       inputs                               output
    states      harvest   main before the window               repository@commit
    candidate   train     states, parent draft                 draft, by digest
    verdict     evaluate  candidate, incumbent, states         verdict, by digest
    promotion   promote   draft, previous draft, verdict       repository@commit
    rollback    rollback  draft, previous draft, verdict       repository@commit

Datasets are in the namespace ``lakefs://<host>``. Each event is a COMPLETE one: stages that fail leave no record.
Filters, tags and facets of the client's own configuration (``openlineage.yml``) hold; its transport does not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from tide.domain import LineageRecord
from tide.errors import ConfigError
from tide.lineage.history import Logged

log = logging.getLogger(__name__)

TIMEOUT_S = 3.0
"""For one try; there are two. A stage waits for it."""
PAUSE_S = 30.0
"""After a failure nothing is tried for so long: a receiver that hangs must not slow down every commit."""
_JOBS = {
    "states": "harvest",
    "candidate": "train",
    "verdict": "evaluate",
    "promotion": "promote",
    "rollback": "rollback",
}
_ON_BRANCHES = frozenset({"candidate", "verdict"})
"""Records that are final on a candidate's own branch. All others are committed on a branch and are final on main."""
_MAIN = "main"
_NO_DATASET = frozenset({"", "none", "imported"})


class OpenLineage:
    """Sends an event for every record of lineage it is told of.

    Args:
        url: receiver, for example ``http://127.0.0.1:5000``; ``file:///path`` appends lines of JSON to a file.
        api_key: sent as a bearer token; empty: none.
        store: address of the store, for the namespace of datasets.
        service: namespace of jobs is ``tide/<service>``.
        states_repository: where states commits stand that a record names by id alone.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the extra is not installed, or the address is of no known kind.
    """

    def __init__(
        self,
        url: str,
        *,
        store: str,
        service: str,
        states_repository: str,
        api_key: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = _client(url, api_key)
        self._url, self._clock = url, clock
        self._datasets, self._jobs = f"lakefs://{urlsplit(store).netloc}", f"tide/{service}"
        self._states = states_repository
        self._lock = threading.Lock()
        self._paused_until = float("-inf")
        self.lost = 0
        """Events that were not delivered."""

    def committed(self, repository: str, branch: str, commit: Logged) -> None:
        """Send the event of a commit, when it carries a record that is final on this branch. Never raises."""
        try:
            record = LineageRecord.from_metadata(commit.metadata)
            if record is None or (branch == _MAIN) == (record.kind in _ON_BRANCHES):
                return
            if self._clock() < self._paused_until:
                raise TimeoutError(f"not tried within {PAUSE_S:.0f} s after a failure")
            self._client.emit(self._event(repository, commit, record))
        except Exception as error:  # noqa: BLE001  whatever is wrong with a report, the work it reports is done
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            first, self.lost = self.lost == 0, self.lost + 1
            if self._clock() >= self._paused_until:
                self._paused_until = self._clock() + PAUSE_S
        text = "OpenLineage at %s: an event was not delivered (%d so far): %s: %s"
        # Once: a receiver that is down for a night would fill the log; the lineage itself is in the commits.
        log.log(logging.WARNING if first else logging.DEBUG, text, self._url, self.lost, type(error).__name__, error)

    def _event(self, repository: str, commit: Logged, record: LineageRecord) -> Any:
        from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
        from openlineage.client.uuid import generate_static_uuid

        at = datetime.fromtimestamp(commit.created_at, UTC)
        run = generate_static_uuid(at, f"{self._datasets}/{repository}@{commit.id}".encode())
        return RunEvent(
            eventType=RunState.COMPLETE,
            eventTime=at.isoformat(),
            run=Run(runId=str(run), facets=_run_facets(record)),
            job=Job(namespace=self._jobs, name=_JOBS.get(record.kind, record.kind), facets=_job_facets()),
            inputs=self._inputs(repository, commit, record),
            outputs=[self._output(repository, commit, record)],
            producer=_producer(),
        )

    def _inputs(self, repository: str, commit: Logged, record: LineageRecord) -> list[Any]:
        from openlineage.client.event_v2 import InputDataset

        if record.kind == "states":
            names = [f"{repository}@{id}" for id in commit.parents[:1]]
        else:
            names = [self._name(kind, value) for kind, value in record.parents.items() if value not in _NO_DATASET]
        return [InputDataset(namespace=self._datasets, name=name, facets=_version(name)) for name in names]

    def _name(self, kind: str, value: str) -> str:
        return f"{self._states}@{value}" if kind == "states" and "@" not in value else value

    def _output(self, repository: str, commit: Logged, record: LineageRecord) -> Any:
        from openlineage.client.event_v2 import OutputDataset
        from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

        name = record.subject if record.kind in _ON_BRANCHES else f"{repository}@{commit.id}"
        facets = {}
        if record.kind == "states":
            facets["outputStatistics"] = statistics.OutputStatisticsOutputDatasetFacet(
                rowCount=int(record.facts.get("rows", 0)),
                fileCount=int(record.facts.get("shards", 0)),
                producer=_producer(),
            )
        return OutputDataset(namespace=self._datasets, name=name, facets=_version(name, commit.id), outputFacets=facets)


def _client(url: str, api_key: str) -> Any:
    try:
        from openlineage.client import OpenLineageClient
        from openlineage.client.transport.file import FileConfig, FileTransport
        from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport, TokenProvider
    except ImportError as error:
        raise ConfigError(
            f"TIDE_OPENLINEAGE_URL is set, but {error.name} is not installed: `pip install 'tide[openlineage]'`, "
            "or unset it"
        ) from error
    scheme, host, path = urlsplit(url)[:3]
    if scheme == "file" and path.strip("/") and host in {"", "localhost"}:
        return OpenLineageClient(transport=FileTransport(FileConfig(log_file_path=url, append=True)))
    if scheme not in {"http", "https"} or not host:
        raise ConfigError(f"TIDE_OPENLINEAGE_URL is {url!r}; expected http://host:port, https://host or file:///path")
    auth = ApiKeyTokenProvider({"api_key": api_key}) if api_key else TokenProvider({})
    retry = {"total": 1, "backoff_factor": 0.2, "status_forcelist": [502, 503, 504], "allowed_methods": ["POST"]}
    return OpenLineageClient(transport=HttpTransport(HttpConfig(url=url, timeout=TIMEOUT_S, auth=auth, retry=retry)))


@lru_cache
def _own_version() -> str:
    return version("tide")


def _producer() -> str:
    """A package URL: OpenLineage wants a URI that names who made the event."""
    return f"pkg:generic/tide@{_own_version()}"


def _version(name: str, commit: str | None = None) -> dict[str, Any]:
    """The standard facet with the commit that holds a dataset, as far as it is known."""
    from openlineage.client.facet_v2 import dataset_version_dataset

    commit = commit or name.partition("@")[2]
    if not commit:
        return {}
    facet = dataset_version_dataset.DatasetVersionDatasetFacet(datasetVersion=commit, producer=_producer())
    return {"version": facet}


def _job_facets() -> dict[str, Any]:
    from openlineage.client.facet_v2 import job_type_job

    facet = job_type_job.JobTypeJobFacet(
        processingType="BATCH", integration="TIDE", jobType="STAGE", producer=_producer()
    )
    return {"jobType": facet}


def _run_facets(record: LineageRecord) -> dict[str, Any]:
    """Which version of TIDE it was, and what the record says, as tags."""
    from openlineage.client.facet_v2 import processing_engine_run, tags_run

    said = {"kind": record.kind, "subject": record.subject, **record.facts}
    tags = [tags_run.TagsRunFacetFields(key=key, value=value, source="TIDE") for key, value in said.items() if value]
    engine = processing_engine_run.ProcessingEngineRunFacet(
        version=_own_version(), name="TIDE", openlineageAdapterVersion=_own_version(), producer=_producer()
    )
    return {"processing_engine": engine, "tags": tags_run.TagsRunFacet(tags=tags, producer=_producer())}
