"""`tide rollout`, `rollback`, `reconcile`, `serving` and `doctor`, with a canary: what they print and exit with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.signed import AUTHORITY, KEY
from tests.unit.test_rollout import REPOSITORY, A, B
from tests.unit.test_trial import GOOD, WORSE, Rig, Seen
from tide import cli, wiring
from tide.cli import service
from tide.config import Settings
from tide.watching import doctor


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A serves, B is judged; the command finds this service wherever it looks."""
    rig = Rig(tmp_path)
    key = tmp_path / "key"
    key.write_text("")
    config = Settings(service="svc", home=tmp_path, public_keys=KEY.public, signing_key_file=key, _env_file=None)
    monkeypatch.setattr(service, "use_stack", lambda _home: config)
    parts = {"store": rig.store, "site": rig.site, "authority": AUTHORITY, "engines": rig.engines}
    for name, value in parts.items():
        monkeypatch.setattr(wiring, name, lambda *_, value=value: value)
    rig.config = config  # type: ignore[attr-defined]
    return rig


def tide(monkeypatch: pytest.MonkeyPatch | None = None, *words: str, site: Any = None) -> tuple[int, str]:
    if monkeypatch is not None and site is not None:
        monkeypatch.setattr(wiring, "site", lambda _config: site)
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def watched(rig: Rig, report: Any) -> Any:
    return dataclasses.replace(rig.site, watch=Seen(report))


def test_a_rollout_prints_every_replica_and_a_refused_one_exits_with_1(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = tide(monkeypatch, "rollout", "candidate-bbbbbb", site=watched(rig, WORSE))
    assert code == 1
    assert "refused by the canary (regression): below the incumbent" in text
    assert f"{A} serves" in text
    assert "r0: bbbbbbbbbbbb -> aaaaaaaaaaaa" in text


def test_a_rollout_that_passes_and_a_rollback_to_a_generation(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = tide(monkeypatch, "rollout", "candidate-bbbbbb", site=watched(rig, GOOD))
    assert (code, f"generation 2: draft {B} serves" in text, "r1: aaaaaaaaaaaa -> bbbbbbbbbbbb" in text) == (
        0,
        True,
        True,
    )
    code, text = tide(None, "rollback", "--to", "gen-1")
    assert (code, f"generation 3: draft {A} serves again" in text) == (0, True)
    assert rig.drafts == [A, A]


def test_reconcile_names_who_is_out_of_service_and_exits_with_1(rig: Rig) -> None:
    assert tide(None, "reconcile") == (0, "every replica matches serving.json\n")
    rig.engines[1].healthy = False
    code, text = tide(None, "reconcile")
    assert (code, "r1: OUT OF SERVICE" in text) == (1, True)


def test_serving_and_doctor_tell_a_canary_from_a_replica_gone_astray(rig: Rig) -> None:
    lease = rig.leave_lease()
    assert f"on trial: {B} on r0, by elsewhere/1/1" in tide(None, "serving")[1]
    assert json.loads(tide(None, "serving", "--json")[1])["serving"]["canary"]["draft"] == B
    config: Settings = rig.config  # type: ignore[attr-defined]
    states = {c.name: c for c in doctor.examine(config, rig.store, rig.engines)}
    assert (states["replica r0"].state, "on trial" in states["replica r0"].detail) == ("ok", True)
    assert "canary" not in states
    assert lease.replicas == ("r0",)


def test_doctor_finds_a_canary_that_nobody_ended(rig: Rig) -> None:
    rig.leave_lease(lease_until=1.0)
    config: Settings = rig.config  # type: ignore[attr-defined]
    found = {c.name: c for c in doctor.examine(config, rig.store, rig.engines)}["canary"]
    assert (found.state, found.fix) == ("wrong", "`tide reconcile` ends it with the incumbent")
    assert config.drafts_repository == REPOSITORY
