"""What is exported is what ledger, serving.json, spool and replicas say; what is not known is absent, never 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.memory_store import MemoryStore
from tests.support.approving import REQUEST
from tests.support.signed import verdict_on
from tests.unit.test_ledger_tail import CountingStore, drift
from tests.unit.test_rollout import REPOSITORY, A, B, promote
from tests.unit.test_status import NOW, DownStore, served, sources
from tide.approvals import steps as approvals
from tide.lineage import ledger
from tide.watching import metrics
from tide.watching.metrics import PipelineCollector

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    (tmp_path / "spool" / "train").mkdir(parents=True)
    return tmp_path / "spool"


def collector(
    store: MemoryStore, engines: list[FakeEngine], spool: Path, clock: Callable[[], float] = lambda: NOW
) -> PipelineCollector:
    return PipelineCollector(sources(store, engines, spool), quota_bytes=1 << 30, clock=clock)


def scrape(found: PipelineCollector) -> Samples:
    """By name and labels, through the text that Prometheus gets."""
    registry = CollectorRegistry()
    registry.register(found)
    page = generate_latest(registry).decode()
    samples: Samples = {}
    for family in text_string_to_metric_families(page):
        assert family.documentation, f"{family.name} says nothing of itself"
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples, f"{key} twice"
            samples[key] = sample.value
    return samples


def one(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def names(samples: Samples) -> set[str]:
    return {name for name, _ in samples}


def test_every_figure_of_a_service_that_is_well(tmp_path: Path, spool: Path) -> None:
    engine, other = FakeEngine("r0"), FakeEngine("r1")
    store = served(tmp_path, engine, other)
    promotion = promote(store, B, [engine, other], tmp_path / "drafts", 1)
    other.swap_draft(A)
    for kind, record in (
        ("drift", drift()),
        ("drift", drift("retrain", "headroom", rate=0.4, expected_rate=0.5, cusum=7.0, cusum_threshold=20.0)),
        ("verdict", verdict_on(B, A)),
        ("verdict", verdict_on(B, A, outcome="inconclusive")),
        ("promotion", promotion),
        ("approval", drift()),
    ):
        ledger.append(store, REPOSITORY, kind, record)
    found = scrape(collector(store, [engine, other], spool, clock=lambda: promotion.at + 60))
    assert one(found, "tide_cycles_total", decision="none") == one(found, "tide_cycles_total", decision="retrain") == 1
    assert one(found, "tide_cycles_total", decision="watch") == 0
    assert one(found, "tide_verdicts_total", outcome="promote") == 1
    assert one(found, "tide_verdicts_total", outcome="inconclusive") == 1
    assert (one(found, "tide_promotions_total"), one(found, "tide_rollbacks_total")) == (1, 0)
    assert one(found, "tide_ledger_records_total", kind="approval") == 1
    assert one(found, "tide_drift_state", decision="retrain") == 1
    assert one(found, "tide_drift_state", decision="none") == 0
    assert (one(found, "tide_cusum"), one(found, "tide_cusum_threshold")) == (7.0, 20.0)
    assert (one(found, "tide_acceptance_rate"), one(found, "tide_acceptance_rate_baseline")) == (0.4, 0.5)
    assert one(found, "tide_serving_generation") == 2
    assert one(found, "tide_serving_draft_info", digest=B) == 1
    assert one(found, "tide_serving_draft_age_seconds") == pytest.approx(60)
    assert one(found, "tide_replica_matches_serving", replica="r0") == 1
    assert one(found, "tide_replica_matches_serving", replica="r1") == 0
    assert one(found, "tide_approvals_waiting") == 0
    assert {labels: value for (name, labels), value in found.items() if name == "tide_up"} == {
        (("source", source),): 1.0 for source in ("serving", "ledger", "approvals", "spool", "replica:r0", "replica:r1")
    }


def test_a_promotion_that_waits_is_counted_with_its_age(tmp_path: Path, spool: Path) -> None:
    engine = FakeEngine("r0")
    store = served(tmp_path, engine)
    approvals.ask(store, REPOSITORY, REQUEST.model_copy(update={"asked_at": NOW - 90}))
    found = scrape(collector(store, [engine], spool))
    assert one(found, "tide_approvals_waiting") == 1
    assert one(found, "tide_approval_oldest_seconds") == pytest.approx(90)


def test_a_source_that_is_down_is_said_so_and_its_figures_are_absent(tmp_path: Path, spool: Path) -> None:
    dead = FakeEngine("r0")
    dead.healthy = False
    found = scrape(collector(DownStore(), [dead], spool / "missing"))
    assert {labels[0][1]: value for (name, labels), value in found.items() if name == "tide_up"} == {
        "serving": 0.0,
        "ledger": 0.0,
        "approvals": 0.0,
        "spool": 0.0,
        "replica:r0": 0.0,
    }
    assert names(found) == {"tide_up", "tide_ledger_unread_records", "tide_ledger_unreadable_records"}
    engine = FakeEngine("r0")
    partly = scrape(collector(served(tmp_path, engine), [engine], spool / "missing"))
    assert one(partly, "tide_up", source="spool") == 0
    assert one(partly, "tide_replica_matches_serving", replica="r0") == 1


def test_counters_appear_once_the_ledger_was_read_to_its_end(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = MemoryStore(), [NOW]
    for _ in range(5):
        ledger.append(store, REPOSITORY, "drift", drift())
    found = collector(store, [], spool, clock=lambda: now[0])
    monkeypatch.setattr(found._tail, "_reads", 3)
    first = scrape(found)
    assert one(first, "tide_ledger_unread_records") == 2
    assert "tide_cycles_total" not in names(first), "a start must not look like a burst"
    now[0] += 60
    assert one(scrape(found), "tide_cycles_total", decision="none") == 5


def test_scrapes_close_together_share_one_look_and_an_idle_one_reads_no_record(spool: Path) -> None:
    store, now = CountingStore(), [NOW]
    ledger.append(store, REPOSITORY, "drift", drift())
    found = collector(store, [], spool, clock=lambda: now[0])
    scrape(found)
    reads = store.reads
    now[0] += metrics.CACHE_S / 2
    scrape(found)
    assert store.reads == reads
    now[0] += 600
    scrape(found)
    ledger_reads = store.reads
    now[0] += 600
    scrape(found)
    assert store.reads - ledger_reads <= 1, "serving.json alone"


def test_registering_asks_nobody(spool: Path) -> None:
    class Untouched(MemoryStore):
        def read(self, repository: str, ref: str, path: str) -> bytes:
            raise AssertionError((repository, ref, path))

    CollectorRegistry().register(collector(Untouched(), [], spool))


def test_the_engine_under_suspicion_is_a_metric_of_its_own(spool: Path) -> None:
    store = MemoryStore()
    ledger.append(store, REPOSITORY, "drift", drift("watch", "engine", engine_requests=30.0))
    found = scrape(collector(store, [], spool))
    assert one(found, "tide_drift_engine_suspected") == 1
    assert one(found, "tide_cycles_total", decision="watch") == 1
