"""The whole cycle, as a user runs it: `tide demo --fast`, on real SGLang, SpecForge, lakeFS and Prefect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tide.domain import Signed
from tide.signatures import keys
from tide.signatures.attestation import check_attestation
from tide.signatures.signing import TrustedKeys

REPOSITORY = Path(__file__).parents[2]
TIDE = Path(sys.executable).with_name("tide")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """One telling: its folder, its report and what it printed."""
    home = tmp_path_factory.mktemp("demo")
    (home / "models").symlink_to(REPOSITORY / ".tide" / "models", target_is_directory=True)
    run = subprocess.run(
        [str(TIDE), "demo", "--fast", "--home", str(home)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={**os.environ, "TIDE_TRAIN_THREADS": "2"},
        timeout=2400,
    )
    assert run.returncode == 0, f"{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
    folder = home / "demo"
    return folder, json.loads((folder / "report.json").read_text()), run.stdout


@pytest.mark.timeout(2500)
def test_the_first_draft_comes_from_bootstrap_and_the_second_replaces_it_without_a_restart(
    told: tuple[Path, dict[str, Any], str],
) -> None:
    first, second = told[1]["cycles"]
    assert first["drift"]["cause"] == "bootstrap"
    assert first["verdict"]["incumbent"] != first["verdict"]["candidate"]
    assert first["promotion"]["generation"] == 1
    assert first["promotion"]["replicas"][0]["restarted"]
    assert second["promotion"]["generation"] == 2
    assert second["promotion"]["previous"] == first["candidate"]["digest"]
    assert second["candidate"]["parent"] == first["candidate"]["digest"]
    assert not second["promotion"]["replicas"][0]["restarted"]
    assert second["snapshot"]["commit"] != first["snapshot"]["commit"]


def test_nothing_was_dropped_and_no_request_failed_during_the_swap(told: tuple[Path, dict[str, Any], str]) -> None:
    report = told[1]
    assert report["swap_failed_requests"] == 0
    assert report["swap_s"] > 0
    assert not any(report["capture"]["dropped"].values())
    assert report["capture"]["tokens"] > 0


def test_all_three_arms_were_measured_and_no_ratio_is_claimed(told: tuple[Path, dict[str, Any], str]) -> None:
    report = told[1]
    assert set(report["held_out"]) == {"no_speculation", "static", "adapted"}
    assert report["held_out"]["no_speculation"]["acceptance_length"] == 1.0
    for arm in report["held_out"].values():
        assert set(arm["output_tokens_per_s"]) == {"1", "4"}
        assert all(rate > 0 for rate in arm["output_tokens_per_s"].values())
    assert report["ratios"] == {}
    assert "no ratios" in told[2]


def test_each_draft_serves_by_an_attestation_signed_with_the_service_s_own_key(
    told: tuple[Path, dict[str, Any], str],
) -> None:
    folder, report, _ = told
    trusted = TrustedKeys([keys.read(folder / keys.FOLDER / keys.SIGNING).public])
    for generation, cycle in enumerate(report["cycles"], start=1):
        digest = cycle["candidate"]["digest"]
        signed = Signed.model_validate_json((folder / "drafts" / f"{digest}.attestation.json").read_bytes())
        found = check_attestation(signed, digest, trusted)
        assert (found.kind, found.generation) == ("promotion", generation)
        assert found.verdict is not None


def test_the_picture_is_drawn_and_every_part_has_ended(told: tuple[Path, dict[str, Any], str]) -> None:
    folder = told[0]
    assert (folder / "acceptance.png").stat().st_size > 10_000
    ours = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    assert ours == []
