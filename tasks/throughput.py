"""What a verdict needs to know of the engine and of its load: the newest profile, and the last day's requests."""

from __future__ import annotations

import calendar
import time
from collections import defaultdict
from pathlib import Path

from tasks.stage import cache_folder
from tide import wiring
from tide.domain import EngineProfile, Snapshot, TargetContract
from tide.states import requests, snapshots
from tide.throughput import profiles
from tide.throughput.load import ServiceLoad, service_load


def profile_for(target: TargetContract, *, steps: int | None = None) -> EngineProfile | None:
    """The newest profile of the target's engine, or None: `tide profile` measures one.

    Args:
        steps: only one that says what so many draft steps cost.
    """
    config = wiring.settings()
    return profiles.newest_for(wiring.store(config), config.drafts_repository, target, steps=steps)


def load_of(snapshot: Snapshot) -> ServiceLoad:
    """The service's load in the day before the end of a snapshot, each replica's concurrency for itself."""
    if not snapshot.windows:
        return service_load(())
    store = wiring.store(wiring.settings())
    since = float(calendar.timegm(time.strptime(snapshot.windows[-1], "%Y%m%dT%H%M%SZ")))
    folder = cache_folder("requests")
    files = snapshots.fetch_request_tables(store, snapshot.repository, snapshot.commit, folder, since=since)
    replicas = defaultdict[str, list[Path]](list)
    for file in files:
        replicas[snapshots.replica_of(file)].append(file)
    return service_load(requests.read_table(own) for own in replicas.values())
