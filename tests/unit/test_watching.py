"""Dashboard, alert rules and scrape configuration parse, and ask for metrics that somebody really exports."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.fake_engine import FakeEngine
from tests.support.signed import verdict_on
from tests.unit.test_ledger_tail import drift
from tests.unit.test_metrics import collector
from tests.unit.test_rollout import REPOSITORY, A, B
from tests.unit.test_status import served
from tide.cli.metrics import PORT
from tide.lineage import ledger
from tide.sglang_plugin.counters import PrometheusMirror

FOLDER = Path(__file__).parents[2] / "infra" / "watching"
WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "offset", "bool"}


def metrics_in(expression: str) -> set[str]:
    """Names of the metrics in a PromQL expression: what is no function, no label, no string and no keyword."""
    text = re.sub(r'"[^"]*"', "", expression)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    found = re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\s*\()\b(?!\s*\()", text)
    return {name for name in found if name not in WORDS}


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("increase(tide_cycles_total[1h])", {"tide_cycles_total"}),
        ('sglang:a > 0 and on (instance) sum by (x) (b_c{d="e"})', {"sglang:a", "b_c"}),
        ('up{job="tide"} == 0 or absent(tide_up)', {"up", "tide_up"}),
        ("time() - x > 4 * 900", {"x"}),
    ],
)
def test_names_are_found_in_expressions(expression: str, names: set[str]) -> None:
    assert metrics_in(expression) == names


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every metric that a Prometheus with this configuration gets."""
    return pipeline(tmp_path_factory.mktemp("home")) | plugin() | sglang() | {"up"}


def pipeline(home: Path) -> set[str]:
    (home / "spool" / "train").mkdir(parents=True)
    engine = FakeEngine("r0")
    store = served(home, engine)
    figures = {"rate": 0.4, "expected_rate": 0.5, "cusum": 7.0, "cusum_threshold": 20.0}
    ledger.append(store, REPOSITORY, "drift", drift("retrain", "headroom", **figures))
    ledger.append(store, REPOSITORY, "verdict", verdict_on(B, A))
    registry = CollectorRegistry()
    registry.register(collector(store, [engine], home / "spool"))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {sample.name for family in families for sample in family.samples}


def plugin() -> set[str]:
    counters = {
        f"tide_capture_{name}_total" for name in (*PrometheusMirror.TOTALS, "dropped_rows", "excluded_requests")
    }
    return counters | {f"tide_capture_{name}" for name in PrometheusMirror.GAUGES}


def sglang() -> set[str]:
    """Names in the source of the installed SGLang, which is not imported for it: that takes 20 s."""
    spec = importlib.util.find_spec("sglang")
    assert spec
    assert spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations))) / "srt" / "observability"
    return {name for path in folder.rglob("*.py") for name in re.findall(r'"(sglang:[a-z_]+)"', path.read_text())}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return content


def test_the_installed_sglang_was_read(exported: set[str]) -> None:
    assert {"sglang:spec_accept_length", "sglang:num_running_reqs"} <= exported
    assert len(exported) > 60


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_asks_for_what_is_exported_and_says_what_to_do(rule: dict[str, Any], exported: set[str]) -> None:
    assert metrics_in(rule["expr"]) <= exported
    assert metrics_in(rule["expr"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert len(rule["annotations"]["summary"]) > 10
    assert f"RUNBOOK.md#{rule['alert'].lower()}: " in rule["annotations"]["runbook"]
    assert re.fullmatch(r"\d+[mh]", rule.get("for", "0m"))


def test_every_alert_has_its_paragraph_and_every_paragraph_its_alert() -> None:
    written = set(re.findall(r"^## (\w+)$", (FOLDER / "RUNBOOK.md").read_text(), re.MULTILINE))
    assert written == {rule["alert"] for rule in rules()}


def test_the_alerts_that_were_asked_for_are_there() -> None:
    expressions = {rule["alert"]: rule["expr"] for rule in rules()}
    assert "<= 1.005" in expressions["TideAcceptanceCollapsed"]
    for name in (
        "TideDraftMismatch",
        "TideNoCycle",
        "TideSpoolFilling",
        "TideCaptureDrops",
        "TideApprovalWaiting",
        "TideExporterDown",
    ):
        assert name in expressions


def test_every_panel_asks_for_what_is_exported(exported: set[str]) -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len(panels) >= 20
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            found = metrics_in(target["expr"])
            assert found, panel["title"]
            assert found <= exported, panel["title"]


def test_panels_do_not_overlap_and_their_ids_differ() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_every_exported_metric_of_the_pipeline_is_in_the_readme(tmp_path: Path) -> None:
    text = (FOLDER / "README.md").read_text()
    assert {name for name in pipeline(tmp_path) if name not in text} == set()


def test_the_scrape_configuration_has_both_jobs_and_the_exporters_own_port() -> None:
    content = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in content["scrape_configs"]}
    assert targets == {"sglang": ["127.0.0.1:30000"], "tide": [f"127.0.0.1:{PORT}"]}
    assert content["rule_files"] == ["alerts.yml"]
