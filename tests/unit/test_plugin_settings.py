"""Settings of the plugin: inert by default, clear about mistakes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tide.errors import ConfigError
from tide.sglang_plugin import register
from tide.sglang_plugin.settings import MIB, PluginSettings


def test_the_plugin_is_inert_without_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not PluginSettings.from_environment({}).active
    for name in PluginSettings.model_fields:
        monkeypatch.delenv(f"TIDE_{name.upper()}", raising=False)
    register()


def test_variables_are_read_by_name_and_empty_ones_count_as_unset(tmp_path: Path) -> None:
    settings = PluginSettings.from_environment(
        {"TIDE_SPOOL_DIR": str(tmp_path), "TIDE_SAMPLE_RATE": "0.25", "TIDE_DRAFT_DIR": "", "TIDE_SERVICE": "other"}
    )
    assert (settings.spool_dir, settings.sample_rate, settings.draft_dir) == (tmp_path, 0.25, None)
    assert (settings.prompt_rows, settings.shard_bytes, settings.shard_age_s) == (256, 64 * MIB, 60.0)


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("TIDE_SAMPLE_RATE", "1.5", "less than or equal to 1"),
        ("TIDE_SAMPLE_RATE", "often", "number"),
        ("TIDE_PROMPT_ROWS", "0", "greater than or equal to 1"),
        ("TIDE_SHARD_AGE_S", "-3", "greater than 0"),
        ("TIDE_QUEUE_BYTES", "64MiB", "integer"),
    ],
)
def test_a_wrong_value_is_refused_by_variable_value_and_rule(variable: str, value: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable}='{value}'.*{hint}"):
        PluginSettings.from_environment({variable: value})


@pytest.mark.parametrize(
    "environment",
    [
        {"TIDE_MIN_TOKENS": "100", "TIDE_MAX_TOKENS": "50"},
        {"TIDE_SHARD_BYTES": str(2 << 30)},
    ],
)
def test_values_that_contradict_each_other_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is above"):
        PluginSettings.from_environment(environment)


def test_a_wrong_setting_ends_the_process_because_sglang_only_logs_a_plugin_s_exception(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIDE_SPOOL_DIR", str(tmp_path))
    monkeypatch.setenv("TIDE_SAMPLE_RATE", "2")
    with pytest.raises(SystemExit, match="TIDE_SAMPLE_RATE"):
        register()


def test_folders_are_made(tmp_path: Path) -> None:
    settings = PluginSettings(spool_dir=tmp_path / "spool", draft_dir=tmp_path / "drafts")
    settings.prepare()
    assert sorted(p.name for p in (tmp_path / "spool").iterdir()) == ["held_out", "requests", "train"]
    assert (tmp_path / "drafts").is_dir()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"TIDE_SPOOL_DIR.*file"):
        PluginSettings(spool_dir=tmp_path / "file").prepare()


def test_the_hash_key_is_made_once_private_and_kept(tmp_path: Path) -> None:
    settings = PluginSettings(spool_dir=tmp_path)
    key = settings.key()
    assert PluginSettings(spool_dir=tmp_path).key() == key
    assert stat.S_IMODE((tmp_path / "hash.key").stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["hash.key"]


def test_a_given_key_wins_and_is_not_shown(tmp_path: Path) -> None:
    settings = PluginSettings(spool_dir=tmp_path, hash_key="a secret of the service")
    assert settings.key() == b"a secret of the service"
    assert "secret" not in repr(settings)
    assert not (tmp_path / "hash.key").exists()


def test_a_broken_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hash.key").write_text("short")
    with pytest.raises(ConfigError, match="too short"):
        PluginSettings(spool_dir=tmp_path).key()
