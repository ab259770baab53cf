"""The built wheel beside SGLang: serving users install the plugin into what they have, and no pin moves."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")


def tracked(*folders: str) -> list[str]:
    """Files of the working tree that git knows and that are there."""
    command = ["git", "ls-files", "-z", "--", *folders]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [name for name in found.split("\0") if name and (REPOSITORY / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git tracks: setuptools packs whatever an earlier build left in build/lib."""
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, source / name)
    command = [
        str(UV),
        "build",
        "--wheel",
        "--no-build-isolation",
        "--python",
        sys.executable,
        "--out-dir",
        str(folder),
    ]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_installing_the_wheel_beside_sglang_changes_no_other_package(wheel: Path) -> None:
    command = [str(UV), "pip", "install", "--offline", "--dry-run", "--python", sys.executable, str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    changed = [line.split()[1].split("==")[0] for line in done.stderr.splitlines() if line.startswith((" + ", " - "))]
    assert set(changed) <= {"tide"}, done.stderr


def test_the_wheel_has_every_package_its_entry_points_and_its_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(next(n for n in names if n.endswith("METADATA"))).decode())
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    for needed in (
        "tide/sglang_plugin/__init__.py",
        "tasks/harvest.py",
        "flows/adapt.py",
        "infra/lakefs/go.mod",
        "infra/pools/slurm.json",
        "infra/pools/gpt-oss-120b/draft/config.json",
        "tide/guard.lua",
    ):
        assert needed in names
    assert not [n for n in names if n.startswith(("tests/", "infra/sglang_cpu"))]
    modules = {name for name in tracked("tide", "tasks", "flows", "infra") if name.endswith(".py")}
    assert {n for n in names if n.endswith(".py")} == {n for n in modules if not n.startswith("infra/sglang_cpu/")}
    assert "tide = tide.sglang_plugin:register" in entry_points
    assert "tide = tide.cli:main" in entry_points
    base = {r.split(";")[0].split(">")[0].split("=")[0].strip() for r in metadata.get_all("Requires-Dist") or []
            if "extra ==" not in r}  # fmt: skip
    assert base == {"cryptography", "httpx", "prometheus-client", "pyarrow", "pydantic", "safetensors"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Private :: Do Not Upload" in (metadata.get_all("Classifier") or [])
